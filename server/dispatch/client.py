"""The front end's side of the workers, put together: requests out, text deltas in.

Owns the channel, the thread that reads it and the way from there to the event loop. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time

from engine.channel import Channel
from engine.cluster_key import ClusterKey
from engine.messages import HandBack
from engine.tracing import NO_TRACER, Tracer
from server.detokenizer import TokenBytes
from server.dispatch.fleet import Capabilities, Fleet
from server.dispatch.reader import Event, Reader
from server.dispatch.requests import Requests
from server.dispatch.roster import Roster
from server.generation import NO_WORKER, EngineError, Limits
from server.metrics import Metrics
from server.router.router import Router


class EngineClient:
    """`start` it on the event loop, whose thread then makes every call to it and to its parts.
    `fingerprint`: what workers have to hold, where it is known."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        limits: Limits | None = None,
        *,
        policy: str = "prefix",
        fingerprint: str = "",
        key: ClusterKey | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        limits = limits or Limits()
        channel = Channel("frontend", key=key)
        self.fleet = Fleet(fingerprint)
        self.router = Router(self.fleet, policy)
        self.metrics = Metrics()
        self.metrics.watch(self.fleet)
        self.requests = Requests(token_bytes, limits, tracer, channel, self.router, self.metrics)
        self.roster = Roster(channel, self.fleet, self.router, self.requests, self.metrics)
        self.is_leaving = False  # load balancers should send new requests elsewhere
        self._worker_wait_s = limits.worker_wait_s
        self._channel = channel
        self._reader = Reader(channel, self.requests.answers, self.router.index, self._hand_over)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_ready(self) -> bool:
        return self.fleet.can_serve and not self.is_leaving

    def start(self) -> None:
        """Begin to read; once, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.roster.start()
        self._reader.start()

    async def close(self) -> None:
        """Fail what is unfinished, stop reading, close the sockets."""
        self.requests.fail_all("the server is shutting down")
        self.roster.stop()
        if self._loop is not None:
            self._reader.stop()
            await asyncio.to_thread(self._reader.join)
            self._loop = None
        self._channel.close()

    def start_leaving(self) -> None:
        """Be ready no more, although what comes is served still."""
        self.is_leaving = True

    def start_draining(self) -> None:
        """Accept nothing new; what is unfinished goes on."""
        self.is_leaving = self.requests.is_draining = True
        self.roster.joined.set()  # whoever waits for workers is told

    async def can_serve(self) -> None:
        """Returns once there were workers for a whole request, or the server shuts down."""
        await self.roster.joined.wait()

    async def capabilities(self) -> Capabilities:
        """Of the workers that are there, or were; waits for the first one. Raises EngineError."""
        if self.fleet.capabilities is None:
            try:
                await asyncio.wait_for(self.can_serve(), self._worker_wait_s)
            except asyncio.TimeoutError:
                raise EngineError("unavailable", NO_WORKER) from None
        if self.fleet.capabilities is None:
            raise EngineError("unavailable", "the server is shutting down")
        return self.fleet.capabilities

    def _hand_over(self, events: list[Event]) -> None:
        """Called by the reader, in its thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._on_events, events, time.perf_counter())

    def _on_events(self, events: list[Event], received_at: float) -> None:
        for address, event in events:
            self.fleet.heard(address)
            match event:
                case list():
                    self.requests.advance(address, event, received_at)
                case HandBack():
                    if event.is_overloaded:
                        self.router.hints.mark(address)
                    self.requests.handed_back(event)
                case _:
                    self.roster.take(address, event)
