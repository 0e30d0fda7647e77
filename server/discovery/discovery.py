"""Follows every place that `--workers` names and keeps the roster as they say.

Owns which addresses are known from where. A worker is taken up once some place has it ready, and
let go, keeping what it does, when none has it so any more. Knows no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from server.discovery.dns import DnsSource
from server.discovery.kubernetes import KubernetesSource
from server.discovery.kubernetes_api import KubernetesApi
from server.discovery.places import Place, Reason, Source, dns_name, kind_of, kubernetes_service
from server.metrics import Metrics
from server.options.config import ServeConfig

log = logging.getLogger(__name__)


class Workers(Protocol):
    """What discovery needs of the roster."""

    metrics: Metrics
    places: list[Place]

    def add(self, address: str) -> None: ...

    def retire(self, address: str) -> None: ...


class Discovery:
    """`start` it on the event loop. `sources` are those of the items that have to be followed; an
    item without one is an address."""

    def __init__(self, workers: Workers, items: Sequence[str], sources: Mapping[str, Source]):
        self._workers = workers
        self._sources = sources
        self._seen = [_Seen(self, Place(item, kind_of(item))) for item in dict.fromkeys(items)]
        self._tasks: list[asyncio.Task[None]] = []
        self._known: set[str] = set()  # addresses that the roster has from here

    def start(self) -> None:
        self._workers.places[:] = [seen.place for seen in self._seen]
        for seen in self._seen:
            source = self._sources.get(seen.place.name)
            if source is None:
                seen.found({seen.place.name: True})
            else:
                self._tasks.append(asyncio.create_task(_follow(source, seen)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def settle(self) -> None:
        """Make the roster's addresses those that are ready somewhere."""
        ready = {
            address
            for seen in self._seen
            for address, is_ready in seen.addresses.items()
            if is_ready
        }
        for address in sorted(ready - self._known):
            self._workers.add(address)
        for address in sorted(self._known - ready):
            log.info("%s is ready no more: it gets no new requests", address)
            self._workers.retire(address)
        self._known = ready

    def count(self, place: Place) -> None:
        """Tell the metrics how many are ready in places of this kind."""
        num_ready = sum(p.place.num_ready for p in self._seen if p.place.kind == place.kind)
        self._workers.metrics.discovery_endpoints.labels(place.kind).set(num_ready)

    @property
    def metrics(self) -> Metrics:
        return self._workers.metrics


class _Seen:
    """What one place has said so far."""

    def __init__(self, discovery: Discovery, place: Place) -> None:
        self.place = place
        self.addresses: Mapping[str, bool] = {}
        self._discovery = discovery

    def found(self, addresses: Mapping[str, bool]) -> None:
        place = self.place
        if place.error:
            log.info("%s can be followed again", place.name)
            place.error = ""
        self.addresses = dict(addresses)
        place.num_ready = sum(addresses.values())
        self._discovery.count(place)
        self._discovery.settle()

    def failed(self, reason: Reason, message: str) -> None:
        self._discovery.metrics.discovery_failures.labels(self.place.kind, reason).inc()
        if message != self.place.error:
            log.warning("%s: %s; known workers stay", self.place.name, message)
        self.place.error = message

    def listed(self) -> None:
        self._discovery.metrics.discovery_lists.labels(self.place.kind).inc()


async def _follow(source: Source, seen: _Seen) -> None:
    try:
        await source.follow(seen)
    except Exception:  # a fault here must not end the server, which has workers
        log.exception("%s is followed no more", seen.place.name)
        seen.failed("answer", "an error of this server: see its log")


def sources_of(config: ServeConfig) -> dict[str, Source]:
    """By item, those that have to be followed. Raises ConfigError where Kubernetes is asked for and
    cannot be reached from here."""
    sources: dict[str, Source] = {}
    api: KubernetesApi | None = None
    for item in config.workers:
        kind = kind_of(item)
        if kind == "dns":
            sources[item] = DnsSource(dns_name(item), config.dns_interval_s)
        elif kind == "kubernetes":
            api = api or KubernetesApi(config.kubernetes_api, config.kubernetes_credentials)
            sources[item] = KubernetesSource(api, kubernetes_service(item), item)
    return sources
