"""A worker's metrics, as plain values for the heartbeat. Owns the histograms. Knows no HTTP and no
other worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from engine.engine import Engine
from engine.metrics.families import by, from_group, from_handoffs, from_pool, from_scheduler
from engine.metrics.host_tier import from_host_tier
from engine.plan import StepResult
from engine.stopwatch import HANDOFF_QUEUE, PREFILL, QUEUE, RESERVE_WAIT, TAIL, WAIT
from engine.types import MetricFamily, MetricSample, Role

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_STAGE_BUCKETS = (*_STEP_BUCKETS, 30, 60, 120)
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
_REASONS = (
    "address",
    "request_id",
    "connection",
    "unregistered",
    "duplicate_room",
    "unknown_room",
    "geometry",
    "model",
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
        metrics = chain(
            self._registry.collect(),
            from_scheduler(load, engine.scheduler.counts),
            from_pool(load, engine),
            from_group(engine),
            from_handoffs(load, engine),
            from_host_tier(load, engine),
            _from_channel(num_malformed, refused),
        )
        return [_plain(metric) for metric in metrics]


def _from_channel(num_malformed: int, refused: Mapping[str, int]) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "plait_malformed_messages", "Messages dropped by the worker's channel", value=num_malformed
    )
    yield by(
        "reason",
        CounterMetricFamily,
        "plait_refused_messages",
        "What the worker did not let in or follow",
        {reason: refused.get(reason, 0) for reason in _REASONS},
    )


def _plain(metric: Metric) -> MetricFamily:
    samples = [MetricSample(s.name, dict(s.labels), s.value) for s in metric.samples]
    return MetricFamily(metric.name, metric.type, metric.documentation, samples)
