"""A worker's metrics, as plain values for the heartbeat. Knows no HTTP and no other worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.capacity import Capacity
from engine.plan import StepResult
from engine.types import Load, MetricFamily, MetricSample

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_EVENTS = ("admitted", "retracted", "aborted", "refused", "failed")


class WorkerMetrics:
    def __init__(self) -> None:
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

    def observe(self, result: StepResult, num_requests: int) -> None:
        for phase, seconds in result.seconds.items():
            self._step_seconds.labels(phase).observe(seconds)
        self._step_requests.observe(num_requests)

    def families(
        self, load: Load, counts: Mapping[str, int], capacity: Capacity, num_malformed: int
    ) -> list[MetricFamily]:
        """Everything, cumulative since the process began."""
        metrics = [*self._registry.collect(), *_from_scheduler(load, counts)]
        metrics += _from_pool(load, capacity)
        malformed = CounterMetricFamily(
            "plait_malformed_messages", "Messages dropped by the worker's channel"
        )
        malformed.add_metric([], num_malformed)
        return list(_plain([*metrics, malformed]))


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


def _from_pool(load: Load, capacity: Capacity) -> Iterator[Metric]:
    pages = GaugeMetricFamily("plait_pool_pages", "KV pages by state", labels=["state"])
    cached = load.evictable_pages + load.locked_pages
    for state, value in (
        ("free", load.free_pages),
        ("evictable", load.evictable_pages),
        ("locked", load.locked_pages),
        ("held", capacity.num_pages - load.free_pages - cached),
    ):
        pages.add_metric([state], value)
    yield pages
    yield GaugeMetricFamily(
        "plait_pool_tokens",
        "Tokens that the KV pool holds",
        value=capacity.num_pages * capacity.page_size,
    )


def _plain(metrics: Iterable[Metric]) -> Iterator[MetricFamily]:
    for metric in metrics:
        samples = [MetricSample(s.name, dict(s.labels), s.value) for s in metric.samples]
        yield MetricFamily(metric.name, metric.type, metric.documentation, samples)
