"""The fleet as the front end sees it: the answer of GET /status, which `plait status` shows.

Knows no worker's inside: only what its hello and its heartbeats said.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from engine.types import Load
from server.dispatch.client import EngineClient
from server.dispatch.fleet import Worker
from server.health import state

# Workers speak twice a second: one that said nothing between two looks, two seconds apart, is late.
_LATE_LOOKS = 2


class LoadStatus(msgspec.Struct, frozen=True, kw_only=True):
    """By the worker's last heartbeat, of all front ends together."""

    running: int
    waiting: int
    waiting_tokens: int  # prompt tokens of those that wait
    rooms: int  # hand-offs under way


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one tier of a worker's KV memory. They add up to `total`."""

    used: int  # by requests; none of the host's are
    cached: int  # prefixes that may be evicted
    free: int
    fenced: int  # given up, but bytes of a hand-off may still come into them
    total: int


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    instance_id: str  # of the process: another after a restart
    pid: int
    host: str
    address: str  # of its control socket
    ranks: int
    model: str  # a fingerprint of what it holds, and the weights' dtype: equal for all
    health: str  # ok, draining, overloaded or silent
    requests: int  # unfinished ones of this front end that it has a part in
    load: LoadStatus
    pages: dict[str, TierStatus]  # by tier; empty until the first heartbeat


class PlaceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where workers are looked for: an item of --workers."""

    place: str
    ready: int  # addresses there that may be given work
    error: str  # why nothing new can be learned there; empty: it can


class RefusedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is there and given nothing, since it does not go with the others."""

    role: str
    instance_id: str
    address: str
    model: str
    reason: str


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    status: str  # ok, draining, or what is missing
    requests: int  # unfinished ones of this front end
    parked: int  # of those, requests that no worker can be given now
    workers: list[WorkerStatus]
    places: list[PlaceStatus]
    refused: list[RefusedStatus]
    absent: list[str]  # control addresses where no worker has said hello, or not since it was lost


def answer(client: EngineClient) -> Response:
    """GET /status: always 200, with what there is."""
    return Response(
        msgspec.json.encode(fleet_status(client)),
        headers={"Cache-Control": "no-store"},
        media_type="application/json",
    )


def fleet_status(client: EngineClient) -> FleetStatus:
    return FleetStatus(
        status=state(client),
        requests=len(client.requests),
        parked=client.metrics.num_parked,
        workers=[_worker_status(client, worker) for worker in client.fleet],
        places=[
            PlaceStatus(place=place.name, ready=place.num_ready, error=place.error)
            for place in client.roster.places
        ],
        refused=[
            RefusedStatus(
                role=refused.hello.role,
                instance_id=refused.hello.instance_id,
                address=address,
                model=str(refused.hello.model_id),
                reason=refused.reason,
            )
            for address, refused in client.fleet.refused.items()
        ],
        absent=[
            address
            for address in client.roster.addresses
            if client.fleet.at(address) is None and address not in client.fleet.refused
        ],
    )


def _worker_status(client: EngineClient, worker: Worker) -> WorkerStatus:
    hello, load = worker.hello, worker.load
    return WorkerStatus(
        role=hello.role,
        instance_id=hello.instance_id,
        pid=hello.pid,
        host=hello.host,
        address=worker.address,
        ranks=hello.cp_size,
        model=str(hello.model_id),
        health=_health(client, worker),
        requests=worker.num_live,
        load=LoadStatus(
            running=load.num_running,
            waiting=load.num_waiting,
            waiting_tokens=load.waiting_tokens,
            rooms=load.num_rooms,
        ),
        pages=_pages(load, hello.total_pages) if load != Load() else {},
    )


def _health(client: EngineClient, worker: Worker) -> str:
    if worker.num_silent_looks >= _LATE_LOOKS:
        return "silent"
    if not worker.takes_requests:
        return "draining"
    return "overloaded" if client.router.hints.is_overloaded(worker.address) else "ok"


def _pages(load: Load, total: int) -> dict[str, TierStatus]:
    device = TierStatus(
        used=total - load.free_pages - load.evictable_pages - load.fenced_pages,
        cached=load.evictable_pages,
        free=load.free_pages,
        fenced=load.fenced_pages,
        total=total,
    )
    if not load.total_host_pages:
        return {"device": device}
    host = TierStatus(
        used=0,
        cached=load.total_host_pages - load.free_host_pages,
        free=load.free_host_pages,
        fenced=0,
        total=load.total_host_pages,
    )
    return {"device": device, "host": host}
