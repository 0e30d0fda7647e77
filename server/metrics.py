"""The front end's Prometheus metrics, and the workers' families merged beside them.

Labels are bounded: route templates, finish reasons, error kinds, roles and worker slots; never
request ids or names from requests. Knows no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.types import CACHE_INFO_LABELS, Role
from server.discovery.places import REASONS
from server.dispatch.fleet import Fleet, Loss

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_INTERVAL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)
_NAME = re.compile(r"plait_[a-z0-9_]+")
_KINDS = frozenset({"counter", "gauge", "histogram"})

_OWN = frozenset(
    f"plait_{name}"
    for name in (
        "requests",
        "requests_running",
        "requests_waiting",
        "workers_ready",
        "workers_refused",
        "fleet_kv_utilization",
        "fleet_cache_info",
        "errors",
        "aborts",
        "replays",
        "workers_lost",
        "prompt_tokens",
        "output_tokens",
        "cached_tokens",
        "router_matched_tokens",
        "router_choices",
        "discovery_endpoints",
        "discovery_lists",
        "discovery_failures",
        "ttft_seconds",
        "itl_seconds",
        "e2e_seconds",
    )
)


class Metrics:
    """One per front end; `expose` is the answer to a scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.num_parked = 0  # requests that wait here because no worker is ready
        self.requests = self._counter(
            "plait_requests", "Choices that ended, by how", ("route", "finish_reason")
        )
        self.errors = self._counter(
            "plait_errors", "Error answers, by kind and HTTP status", ("kind", "status")
        )
        self.aborts = self._counter(
            "plait_aborts", "Choices given up because the client went away", ()
        )
        self.replays = self._counter(
            "plait_replays", "Choices continued on another worker, by why", ("reason",)
        )
        self.prompt_tokens = self._counter("plait_prompt_tokens", "Prompt tokens submitted", ())
        self.output_tokens = self._counter("plait_output_tokens", "Tokens generated", ())
        self.cached_tokens = self._counter(
            "plait_cached_tokens", "Prompt tokens served from the prefix cache", ()
        )
        self.router_matched = self._counter(
            "plait_router_matched_tokens",
            "Prompt tokens that the router took for cached where it sent them",
            (),
        )
        self.router_choices = self._counter(
            "plait_router_choices", "Workers that the router chose, by role", ("role",)
        )
        self.workers_lost = self._counter(
            "plait_workers_lost", "Workers that left the fleet, by role and why", ("role", "reason")
        )
        self.discovery_endpoints = Gauge(
            "plait_discovery_endpoints",
            "Workers' addresses that are ready, by where they were found",
            ("source",),
            registry=self.registry,
        )
        self.discovery_lists = self._counter(
            "plait_discovery_lists",
            "Times that all endpoints of a service were listed, not only changes",
            ("source",),
        )
        self.discovery_failures = self._counter(
            "plait_discovery_failures",
            "Attempts to learn of workers that failed, by where and why",
            ("source", "reason"),
        )
        self.discovery_lists.labels("kubernetes")
        for source, reasons in REASONS.items():
            self.discovery_endpoints.labels(source)
            for reason in reasons:
                self.discovery_failures.labels(source, reason)
        for replayed in ("lost", "handed_back"):
            self.replays.labels(replayed)
        for role in get_args(Role):
            self.router_choices.labels(role)
            for reason in get_args(Loss):
                self.workers_lost.labels(role, reason)
        self.ttft = self._histogram("plait_ttft_seconds", "Submission to first token", _LATENCY_S)
        self.itl = self._histogram("plait_itl_seconds", "Time between tokens", _INTERVAL_S)
        self.e2e = self._histogram("plait_e2e_seconds", "Submission to last token", _LATENCY_S)

    def expose(self) -> bytes:
        return generate_latest(self.registry)

    def watch(self, fleet: Fleet) -> None:
        """Report the workers of `fleet` from now on."""
        self.registry.register(_FleetCollector(self, fleet))

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=buckets)


class _FleetCollector(Collector):
    """Reads the fleet at each scrape. A worker's family that takes a front end's name, another
    prefix or an unknown kind is left out: one broken worker must not break the whole page."""

    def __init__(self, metrics: Metrics, fleet: Fleet) -> None:
        self._metrics = metrics
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        running = sum(worker.load.num_running for worker in self._fleet)
        waiting = sum(worker.load.num_waiting for worker in self._fleet)
        yield _gauge("plait_requests_running", "Requests that workers compute", running)
        yield _gauge(
            "plait_requests_waiting",
            "Requests in workers' queues, or waiting for a worker",
            waiting + self._metrics.num_parked,
        )
        ready = GaugeMetricFamily("plait_workers_ready", "Workers that serve", labels=["role"])
        for role in get_args(Role):
            ready.add_metric([role], sum(w.hello.role == role for w in self._fleet))
        yield ready
        refused = GaugeMetricFamily(
            "plait_workers_refused",
            "Workers that are there and given nothing: their model is not the fleet's",
            labels=["role"],
        )
        held_off = [worker.hello.role for worker in self._fleet.refused.values()]
        for role in get_args(Role):
            refused.add_metric([role], held_off.count(role))
        yield refused
        yield from self._pools()
        yield from self._merged()

    def describe(self) -> Iterable[Metric]:
        return ()

    def _pools(self) -> Iterator[Metric]:
        """Of the workers that answers are held by: prefill groups keep theirs as a cache."""
        holders = [worker for worker in self._fleet if worker.hello.role != "prefill"]
        num_pages = sum(worker.hello.total_pages for worker in holders)
        heard = [worker for worker in holders if worker.families]
        num_idle = sum(w.load.free_pages + w.load.evictable_pages for w in heard)
        num_known = sum(worker.hello.total_pages for worker in heard)
        yield _gauge(
            "plait_fleet_kv_utilization",
            "Share of all decode workers' KV pages that are in use, 0 to 1",
            1 - num_idle / num_known if num_known else 0.0,
        )
        info = GaugeMetricFamily(
            "plait_fleet_cache_info", "Shape of all decode workers' pools", labels=CACHE_INFO_LABELS
        )
        if holders:
            page_size = str(holders[0].hello.page_size)
            info.add_metric([page_size, str(num_pages), page_size, str(num_pages)], 1)
        yield info

    def _merged(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for worker in self._fleet:
            where = {"worker": str(worker.slot), "role": worker.hello.role}
            for family in worker.families:
                name = family.name
                if family.kind == "counter":
                    name = name.removesuffix("_total")
                if name in _OWN or family.kind not in _KINDS or not _NAME.fullmatch(name):
                    continue
                metric = merged.setdefault(name, Metric(name, family.help, family.kind))
                if metric.type == family.kind:
                    for sample in family.samples:
                        metric.add_sample(sample.name, {**sample.labels, **where}, sample.value)
        return merged.values()


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
