"""An engine's state as families of metrics: its scheduler, its pool, its group and its hand-offs.
Counts nothing itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.engine import Engine
from engine.run_ahead import OUTCOMES
from engine.types import CACHE_INFO_LABELS, Load

_Family: TypeAlias = type[CounterMetricFamily] | type[GaugeMetricFamily]

_EVENTS = (
    "admitted",
    "retracted",
    "aborted",
    "refused",
    "failed",
    "handed_over",
    "handoffs_failed",
)
_PINS = ("made", "refused", "expired", "dropped")


def by(label: str, family: _Family, name: str, text: str, values: Mapping[Any, float]) -> Metric:
    """A family with one label: `values` are by what it says."""
    metric = family(name, text, labels=[label])
    for said, value in values.items():
        metric.add_metric([str(said)], value)
    return metric


def from_scheduler(load: Load, counts: Counter[str]) -> Iterator[Metric]:
    yield by(
        "event",
        CounterMetricFamily,
        "plait_scheduler_events",
        "What happened to requests in the scheduler",
        {event: counts[event] for event in _EVENTS},
    )
    yield by(
        "phase",
        CounterMetricFamily,
        "plait_computed_tokens",
        "Tokens computed",
        {phase: counts[f"{phase}_tokens"] for phase in ("prefill", "decode")},
    )
    yield CounterMetricFamily(
        "plait_prefix_cache_hit_tokens",
        "Tokens that admitted requests found in the prefix cache",
        value=counts["cached_tokens"],
    )
    for name, text, value in (
        ("plait_worker_running_requests", "Requests in the running set", load.num_running),
        ("plait_worker_waiting_requests", "Requests waiting for admission", load.num_waiting),
        ("plait_worker_waiting_tokens", "Tokens of the waiting requests", load.waiting_tokens),
    ):
        yield GaugeMetricFamily(name, text, value=value)


def from_pool(load: Load, engine: Engine) -> Iterator[Metric]:
    capacity, cache = engine.capacity, engine.scheduler.cache
    cached = load.evictable_pages + load.locked_pages
    yield by(
        "state",
        GaugeMetricFamily,
        "plait_pool_pages",
        "KV pages by state",
        {
            "free": load.free_pages,
            "evictable": load.evictable_pages,
            "locked": load.locked_pages,
            "held": capacity.logical_pages - load.free_pages - cached - load.fenced_pages,
            "fenced": load.fenced_pages,
        },
    )
    in_use = capacity.logical_pages - load.free_pages - load.evictable_pages
    yield GaugeMetricFamily(
        "plait_kv_utilization",
        "Share of the KV pages that are in use, 0 to 1",
        value=in_use / capacity.logical_pages,
    )
    page_size, num_pages = str(capacity.page_size), str(capacity.logical_pages)
    info = GaugeMetricFamily("plait_cache_info", "The KV pool's shape", labels=CACHE_INFO_LABELS)
    info.add_metric([page_size, num_pages, page_size, num_pages], 1)
    yield info
    yield by(
        "kind",
        GaugeMetricFamily,
        "plait_pool_tokens",
        "Tokens that the KV pool holds",
        {
            "logical": capacity.logical_tokens,
            "physical": capacity.physical_tokens,  # of one rank
        },
    )
    yield GaugeMetricFamily(
        "plait_pinned_pages", "Pages of pinned prefixes", value=cache.pinned_pages
    )
    yield by(
        "event",
        CounterMetricFamily,
        "plait_pins",
        "What became of pins",
        {event: cache.counts[f"pins_{event}"] for event in _PINS},
    )
    yield by(
        "rank",
        GaugeMetricFamily,
        "plait_pool_used_pages",
        "KV pages in use, by the rank that owns them",
        dict(enumerate(cache.device.used_by_lane())),
    )


def from_group(engine: Engine) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "plait_cp_size", "Ranks of the context-parallel group", value=engine.group.size
    )
    yield GaugeMetricFamily(
        "plait_cp_stream_workspace_bytes",
        "Workspace of the streamed reads on one rank",
        value=engine.leader.stream_workspace_bytes,
    )
    mesh = engine.leader.mesh
    gathered, waited = {0: mesh.gathered_bytes}, {0: mesh.wait_s}
    for report in sorted(engine.reports, key=lambda report: report.rank):
        gathered[report.rank] = report.gathered_bytes
        waited[report.rank] = report.gather_wait_s
    yield by(
        "rank",
        CounterMetricFamily,
        "plait_cp_gathered_bytes",
        "Bytes received from other ranks",
        gathered,
    )
    yield by(
        "rank",
        CounterMetricFamily,
        "plait_cp_gather_wait_seconds",
        "Time spent waiting for gathers",
        waited,
    )
    yield by(
        "outcome",
        CounterMetricFamily,
        "plait_steps_ahead",
        "Decode steps that the device began before they were planned",
        {outcome: engine.leader.runner.ahead_counts[outcome] for outcome in OUTCOMES},
    )


def from_handoffs(load: Load, engine: Engine) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "plait_handoff_rooms", "Hand-offs under way at this worker", value=load.num_rooms
    )
    if engine.record is None:
        return
    side = engine.scheduler.prefill_side
    for name, text, by_rank in (
        ("plait_handoff_pages_sent", "KV pages pushed to decode workers", side.pages_sent),
        ("plait_handoff_bytes_sent", "Bytes pushed to decode workers", side.bytes_sent),
        ("plait_handoff_write_seconds", "Time in which a push was running", side.seconds),
        ("plait_handoff_write_failures", "Rooms whose pages could not be pushed", side.failures),
    ):
        yield by("rank", CounterMetricFamily, name, text, dict(enumerate(by_rank)))
