"""A worker's metrics, as plain values for the heartbeat. Knows no HTTP and no other worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.engine import Engine
from engine.plan import StepResult
from engine.run_ahead import OUTCOMES
from engine.stopwatch import HANDOFF_QUEUE, PREFILL, QUEUE, RESERVE_WAIT, TAIL, WAIT
from engine.types import CACHE_INFO_LABELS, Load, MetricFamily, MetricSample, Role
from kvcache.prefix_cache import SkipReason

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_STAGE_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
)
_COMPUTES_PROMPTS = {
    QUEUE: "From a request's arrival at the worker to its first step",
    PREFILL: "From a request's first step to its first token",
}
_STAGES: dict[Role, dict[str, str]] = {
    "colocated": _COMPUTES_PROMPTS,
    "prefill": {
        **_COMPUTES_PROMPTS,
        HANDOFF_QUEUE: "From a decode worker's reservation to the request's first step",
        TAIL: "From the first token until all ranks' pages are in the decode worker's memory",
    },
    "decode": {
        RESERVE_WAIT: "From a request's arrival to the reservation of its pages",
        WAIT: "From the reservation of a request's pages until all its KV is in them",
    },
}
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
# Copies between the tiers: by direction, why one is not made
_SKIPS: dict[str, tuple[str, ...]] = {
    "backup": ("no_host_pages",),
    "load_back": get_args(SkipReason),
}
_REASONS = (
    "address",
    "request_id",
    "connection",
    "unregistered",
    "duplicate_room",
    "unknown_room",
    "geometry",
    "reservation",
    "unknown_frontend",
)


class WorkerMetrics:
    def __init__(self, role: Role) -> None:
        self._registry = CollectorRegistry()
        self._step_seconds = Histogram(
            "plait_step_seconds",
            "Time of one step, by phase",
            ["phase"],
            buckets=_STEP_BUCKETS,
            registry=self._registry,
        )
        self._step_requests = Histogram(
            "plait_step_requests",
            "Requests computed in one step",
            buckets=_SIZE_BUCKETS,
            registry=self._registry,
        )
        self._stages = {
            name: Histogram(name, text, buckets=_STAGE_BUCKETS, registry=self._registry)
            for name, text in _STAGES[role].items()
        }

    def observe(self, result: StepResult, num_requests: int) -> None:
        for phase, seconds in result.seconds.items():
            self._step_seconds.labels(phase).observe(seconds)
        self._step_requests.observe(num_requests)

    def observe_stage(self, family: str, seconds: float) -> None:
        """A request is through a stage. Not for this role's families: ignored."""
        if family in self._stages:
            self._stages[family].observe(seconds)

    def families(
        self, engine: Engine, *, num_malformed: int, refused: Mapping[str, int]
    ) -> list[MetricFamily]:
        """Everything, cumulative since the process began."""
        load = engine.scheduler.load
        metrics = [*self._registry.collect(), *_from_scheduler(load, engine.scheduler.counts)]
        metrics += [*_from_pool(load, engine), *_from_group(engine), _steps_ahead(engine)]
        metrics += _from_handoffs(load, engine)
        metrics += _from_host_tier(load, engine)
        malformed = CounterMetricFamily(
            "plait_malformed_messages", "Messages dropped by the worker's channel"
        )
        malformed.add_metric([], num_malformed)
        senseless = CounterMetricFamily(
            "plait_refused_messages", "What the worker did not let in or follow", labels=["reason"]
        )
        for reason in _REASONS:
            senseless.add_metric([reason], refused.get(reason, 0))
        return list(_plain([*metrics, malformed, senseless]))


def _steps_ahead(engine: Engine) -> Metric:
    steps = CounterMetricFamily(
        "plait_steps_ahead",
        "Decode steps that the device began before they were planned",
        labels=["outcome"],
    )
    for outcome in OUTCOMES:
        steps.add_metric([outcome], engine.leader.runner.ahead_counts[outcome])
    return steps


def _from_scheduler(load: Load, counts: Mapping[str, int]) -> Iterator[Metric]:
    events = CounterMetricFamily(
        "plait_scheduler_events", "What happened to requests in the scheduler", labels=["event"]
    )
    for event in _EVENTS:
        events.add_metric([event], counts.get(event, 0))
    yield events
    tokens = CounterMetricFamily("plait_computed_tokens", "Tokens computed", labels=["phase"])
    for phase in ("prefill", "decode"):
        tokens.add_metric([phase], counts.get(f"{phase}_tokens", 0))
    yield tokens
    yield CounterMetricFamily(
        "plait_prefix_cache_hit_tokens",
        "Tokens that admitted requests found in the prefix cache",
        value=counts.get("cached_tokens", 0),
    )
    for name, text, value in (
        ("plait_worker_running_requests", "Requests in the running set", load.num_running),
        ("plait_worker_waiting_requests", "Requests waiting for admission", load.num_waiting),
        ("plait_worker_waiting_tokens", "Tokens of the waiting requests", load.waiting_tokens),
    ):
        yield GaugeMetricFamily(name, text, value=value)


def _from_pool(load: Load, engine: Engine) -> Iterator[Metric]:
    capacity = engine.capacity
    pages = GaugeMetricFamily("plait_pool_pages", "KV pages by state", labels=["state"])
    cached = load.evictable_pages + load.locked_pages
    for state, value in (
        ("free", load.free_pages),
        ("evictable", load.evictable_pages),
        ("locked", load.locked_pages),
        ("held", capacity.logical_pages - load.free_pages - cached - load.fenced_pages),
        ("fenced", load.fenced_pages),
    ):
        pages.add_metric([state], value)
    yield pages
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
    tokens = GaugeMetricFamily(
        "plait_pool_tokens", "Tokens that the KV pool holds", labels=["kind"]
    )
    tokens.add_metric(["logical"], capacity.logical_tokens)
    tokens.add_metric(["physical"], capacity.physical_tokens)  # of one rank
    yield tokens
    yield from _pins(engine)
    owned = GaugeMetricFamily(
        "plait_pool_used_pages", "KV pages in use, by the rank that owns them", labels=["rank"]
    )
    for rank, used in enumerate(engine.scheduler.cache.device.used_by_lane()):
        owned.add_metric([str(rank)], used)
    yield owned


def _pins(engine: Engine) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "plait_pinned_pages", "Pages of pinned prefixes", value=engine.scheduler.cache.pinned_pages
    )
    pins = CounterMetricFamily("plait_pins", "What became of pins", labels=["event"])
    for event in _PINS:
        pins.add_metric([event], engine.scheduler.cache.counts[f"pins_{event}"])
    yield pins


def _from_group(engine: Engine) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "plait_cp_size", "Ranks of the context-parallel group", value=engine.group.size
    )
    yield GaugeMetricFamily(
        "plait_cp_stream_workspace_bytes",
        "Workspace of the streamed reads on one rank",
        value=engine.leader.stream_workspace_bytes,
    )
    gathered = CounterMetricFamily(
        "plait_cp_gathered_bytes", "Bytes received from other ranks", labels=["rank"]
    )
    waited = CounterMetricFamily(
        "plait_cp_gather_wait_seconds", "Time spent waiting for gathers", labels=["rank"]
    )
    mesh = engine.leader.mesh
    ranks = [(0, mesh.gathered_bytes, mesh.wait_s)]
    ranks += [(r.rank, r.gathered_bytes, r.gather_wait_s) for r in engine.reports]
    for rank, num_bytes, wait_s in sorted(ranks):
        gathered.add_metric([str(rank)], num_bytes)
        waited.add_metric([str(rank)], wait_s)
    yield from (gathered, waited)


def _from_handoffs(load: Load, engine: Engine) -> Iterator[Metric]:
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
        family = CounterMetricFamily(name, text, labels=["rank"])
        for rank, value in enumerate(by_rank):
            family.add_metric([str(rank)], value)
        yield family


def _from_host_tier(load: Load, engine: Engine) -> Iterator[Metric]:
    if not load.total_host_pages:
        return
    counts = engine.scheduler.cache.counts
    pages = GaugeMetricFamily("plait_host_pages", "Pages of the host tier", labels=["state"])
    pages.add_metric(["cached"], load.total_host_pages - load.free_host_pages)
    pages.add_metric(["free"], load.free_host_pages)
    yield pages
    num_device = engine.capacity.logical_pages - load.free_pages
    held_tokens = GaugeMetricFamily(
        "plait_tier_held_tokens", "Room of pages in use, in tokens", labels=["tier"]
    )
    held_bytes = GaugeMetricFamily(
        "plait_tier_held_bytes", "Bytes of pages in use, of all ranks", labels=["tier"]
    )
    num_host = load.total_host_pages - load.free_host_pages
    # Where the KV is not sharded each rank has every page.
    num_copies = engine.group.size // engine.capacity.num_shards
    for tier, num_pages in (("device", num_device), ("host", num_host)):
        num_tokens = num_pages * engine.capacity.page_size
        held_tokens.add_metric([tier], num_tokens)
        held_bytes.add_metric([tier], num_tokens * engine.bytes_per_token * num_copies)
    yield from (held_tokens, held_bytes)
    yield GaugeMetricFamily(
        "plait_host_copies",
        "Copies between the tiers under way",
        value=engine.scheduler.cache.num_under_way,
    )
    yield CounterMetricFamily(
        "plait_host_hit_tokens",
        "Tokens of prefixes that were found in the host tier and loaded back",
        value=counts["loaded_back_tokens"],
    )
    yield from _host_copies(counts)
    evicted = CounterMetricFamily(
        "plait_evicted_pages", "Pages evicted from the prefix cache", labels=["tier"]
    )
    for tier in ("device", "host"):
        evicted.add_metric([tier], counts[f"evicted_{tier}_pages"])
    yield evicted
    yield CounterMetricFamily(
        "plait_dropped_pages",
        "Pages evicted from the device that the host tier did not have",
        value=counts["dropped_device_pages"],
    )
    yield from _host_bytes(engine)


def _host_copies(counts: Counter[str]) -> Iterator[Metric]:
    started = CounterMetricFamily(
        "plait_host_copies_started", "Copies between the tiers", labels=["direction"]
    )
    finished = CounterMetricFamily(
        "plait_host_copies_finished", "Those that all ranks have done", labels=["direction"]
    )
    skipped = CounterMetricFamily(
        "plait_host_copies_skipped", "Those that were not made", labels=["direction", "reason"]
    )
    for direction, reasons in _SKIPS.items():
        started.add_metric([direction], counts[f"{direction}s_started"])
        finished.add_metric([direction], counts[f"{direction}s_finished"])
        for reason in reasons:
            skipped.add_metric([direction, reason], counts[f"{direction}s_skipped_{reason}"])
    yield from (started, finished, skipped)


def _host_bytes(engine: Engine) -> Iterator[Metric]:
    labels = ["rank", "direction"]
    copied = CounterMetricFamily(
        "plait_host_copied_bytes", "Bytes copied between the tiers", labels=labels
    )
    seconds = CounterMetricFamily(
        "plait_host_copy_seconds", "Time from copies' begin to their end", labels=labels
    )
    waited = CounterMetricFamily(
        "plait_load_back_wait_seconds",
        "Time that forwards waited for load-backs",
        labels=["rank"],
    )
    for rank in range(engine.group.size):
        report = engine.host_reports.get(rank)
        for direction in _SKIPS:
            num_bytes = report.num_bytes.get(direction, 0) if report is not None else 0
            copied.add_metric([str(rank), direction], num_bytes)
            value = report.seconds.get(direction, 0.0) if report is not None else 0.0
            seconds.add_metric([str(rank), direction], value)
    waits = {0: engine.leader.host.wait_s if engine.leader.host is not None else 0.0}
    waits |= {r.rank: r.load_back_wait_s for r in engine.reports}
    for rank, wait_s in sorted(waits.items()):
        waited.add_metric([str(rank)], wait_s)
    yield from (copied, seconds, waited)


def _plain(metrics: Iterable[Metric]) -> Iterator[MetricFamily]:
    for metric in metrics:
        samples = [MetricSample(s.name, dict(s.labels), s.value) for s in metric.samples]
        yield MetricFamily(metric.name, metric.type, metric.documentation, samples)
