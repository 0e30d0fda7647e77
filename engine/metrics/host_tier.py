"""A host tier's state as families of metrics; none where a worker has no host tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.engine import Engine
from engine.metrics.families import by
from engine.types import Load
from kvcache.prefix_cache import SkipReason

# Copies between the tiers: by direction, why one is not made
_SKIPS: dict[str, tuple[str, ...]] = {
    "backup": ("no_host_pages",),
    "load_back": get_args(SkipReason),
}


def from_host_tier(load: Load, engine: Engine) -> Iterator[Metric]:
    if not load.total_host_pages:
        return
    cache, capacity = engine.scheduler.cache, engine.capacity
    num_device = capacity.logical_pages - load.free_pages
    num_host = load.total_host_pages - load.free_host_pages
    yield by(
        "state",
        GaugeMetricFamily,
        "plait_host_pages",
        "Pages of the host tier",
        {"cached": num_host, "free": load.free_host_pages},
    )
    tokens = {"device": num_device * capacity.page_size, "host": num_host * capacity.page_size}
    # Where the KV is not sharded each rank has every page.
    token_bytes = engine.bytes_per_token * (engine.group.size // capacity.num_shards)
    yield by(
        "tier",
        GaugeMetricFamily,
        "plait_tier_held_tokens",
        "Room of pages in use, in tokens",
        tokens,
    )
    yield by(
        "tier",
        GaugeMetricFamily,
        "plait_tier_held_bytes",
        "Bytes of pages in use, of all ranks",
        {tier: num_tokens * token_bytes for tier, num_tokens in tokens.items()},
    )
    yield GaugeMetricFamily(
        "plait_host_copies", "Copies between the tiers under way", value=cache.num_under_way
    )
    yield CounterMetricFamily(
        "plait_host_hit_tokens",
        "Tokens of prefixes that were found in the host tier and loaded back",
        value=cache.counts["loaded_back_tokens"],
    )
    yield from _host_copies(cache.counts)
    yield by(
        "tier",
        CounterMetricFamily,
        "plait_evicted_pages",
        "Pages evicted from the prefix cache",
        {tier: cache.counts[f"evicted_{tier}_pages"] for tier in ("device", "host")},
    )
    yield CounterMetricFamily(
        "plait_dropped_pages",
        "Pages evicted from the device that the host tier did not have",
        value=cache.counts["dropped_device_pages"],
    )
    yield from _host_bytes(engine)


def _host_copies(counts: Counter[str]) -> Iterator[Metric]:
    for event, text in (
        ("started", "Copies between the tiers"),
        ("finished", "Those that all ranks have done"),
    ):
        by_direction = {direction: counts[f"{direction}s_{event}"] for direction in _SKIPS}
        name = f"plait_host_copies_{event}"
        yield by("direction", CounterMetricFamily, name, text, by_direction)
    skipped = CounterMetricFamily(
        "plait_host_copies_skipped", "Those that were not made", labels=["direction", "reason"]
    )
    for direction, reasons in _SKIPS.items():
        for reason in reasons:
            skipped.add_metric([direction, reason], counts[f"{direction}s_skipped_{reason}"])
    yield skipped


def _host_bytes(engine: Engine) -> Iterator[Metric]:
    labels = ["rank", "direction"]
    copied = CounterMetricFamily(
        "plait_host_copied_bytes", "Bytes copied between the tiers", labels=labels
    )
    seconds = CounterMetricFamily(
        "plait_host_copy_seconds", "Time from copies' begin to their end", labels=labels
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
    yield from (copied, seconds)
    yield by(
        "rank",
        CounterMetricFamily,
        "plait_load_back_wait_seconds",
        "Time that forwards waited for load-backs",
        dict(sorted(waits.items())),
    )
