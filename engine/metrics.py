"""A worker's metrics, as plain values for the heartbeat. Knows no HTTP and no other worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.engine import Engine
from engine.plan import StepResult
from engine.stopwatch import HANDOFF_QUEUE, PREFILL, QUEUE, RESERVE_WAIT, TAIL, WAIT
from engine.types import Load, MetricFamily, MetricSample, Role

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
        metrics += [*_from_pool(load, engine), *_from_group(engine)]
        metrics += _from_handoffs(load, engine)
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
    tokens = GaugeMetricFamily(
        "plait_pool_tokens", "Tokens that the KV pool holds", labels=["kind"]
    )
    tokens.add_metric(["logical"], capacity.logical_tokens)
    tokens.add_metric(["physical"], capacity.physical_tokens)  # of one rank
    yield tokens
    owned = GaugeMetricFamily(
        "plait_pool_used_pages", "KV pages in use, by the rank that owns them", labels=["rank"]
    )
    for rank, used in enumerate(engine.scheduler.used_pages_by_lane):
        owned.add_metric([str(rank)], used)
    yield owned


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


def _plain(metrics: Iterable[Metric]) -> Iterator[MetricFamily]:
    for metric in metrics:
        samples = [MetricSample(s.name, dict(s.labels), s.value) for s in metric.samples]
        yield MetricFamily(metric.name, metric.type, metric.documentation, samples)
