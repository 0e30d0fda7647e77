"""Where workers are or should be: dialled, welcomed into the fleet, missed when they leave it.

Owned by the event loop. Knows no request: what a lost worker had is told to `Requests`.
"""

from __future__ import annotations

import asyncio
import logging

from engine.channel import Channel, Disconnected, Event
from engine.messages import Goodbye, Heartbeat, Hello
from engine.peers import LOOK_S
from server.discovery.places import Place
from server.dispatch.fleet import Fleet, Loss, Refused
from server.dispatch.requests import Requests
from server.metrics import Metrics
from server.router.router import Router

logger = logging.getLogger(__name__)

_LOSSES: dict[Loss, str] = {
    "removed": "was removed",
    "ended": "has ended",
    "replaced": "was replaced",
    "disconnected": "has broken the connection",
    "silent": "has fallen silent",
}


class Roster:
    """`start` it on the event loop. `add` tells where workers are, or will be."""

    def __init__(
        self,
        channel: Channel,
        fleet: Fleet,
        router: Router,
        requests: Requests,
        metrics: Metrics,
    ) -> None:
        self.addresses: dict[str, None] = {}
        self.places: list[Place] = []  # where addresses come from
        self.metrics = metrics
        self.joined = asyncio.Event()  # there were workers for a whole request
        self._channel = channel
        self._fleet = fleet
        self._router = router
        self._requests = requests
        self._retired: set[str] = set()  # of the addresses, those that get nothing new
        self._looks: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._looks = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def stop(self) -> None:
        if self._looks is not None:
            self._looks.cancel()

    def add(self, address: str) -> None:
        """Dial the worker at this ZeroMQ endpoint, again whenever it goes away."""
        self.addresses[address] = None
        self._retired.discard(address)
        self._channel.post_dial(address)
        worker = self._fleet.at(address)
        if worker is not None:
            worker.is_retired = False
            self._on_joined()

    def retire(self, address: str) -> None:
        """Give it nothing new, and forget it when it has done what it has."""
        if address in self.addresses:
            self._retired.add(address)
            worker = self._fleet.at(address)
            if worker is not None:
                worker.is_retired = True
            self._forget_retired()

    def remove(self, address: str) -> None:
        """Forget it; what it had is replayed elsewhere."""
        self.addresses.pop(address, None)
        self._retired.discard(address)
        self._channel.post_hang_up(address)
        self._lose(address, "removed")
        self._router.index.drop(address)

    def take(self, address: str, event: Event) -> None:
        """What a worker says of itself."""
        match event:
            case Heartbeat():
                self._fleet.beat(address, event)
            case Hello():
                self._welcome(address, event)
            case Goodbye():
                self._lose(address, "ended")
            case Disconnected():
                self._lose(address, "disconnected")

    def _welcome(self, address: str, hello: Hello) -> None:
        if address not in self.addresses:  # it was still on its way when the address was removed
            self._router.index.drop(address)
            return
        self._lose(address, "replaced")
        same = self._fleet.with_instance(hello.instance_id)
        if same is not None:  # which now talks over this connection only
            logger.warning("%s and %s are one worker: name it once", same.address, address)
            self.remove(same.address)
        if reason := self._fleet.misfit(hello):
            self._fleet.refused[address] = Refused(hello, reason)
            logger.error("%s worker at %s is refused: %s", hello.role, address, reason)
            return
        self._requests.settle_model(hello.model_id)
        self._fleet.join(address, hello).is_retired = address in self._retired
        self._router.hints.clear(address)
        logger.info(
            "%s worker %s is ready (pid %d) at %s",
            hello.role,
            hello.instance_id,
            hello.pid,
            address,
        )
        self._on_joined()

    def _on_joined(self) -> None:
        """Somebody more takes requests."""
        if self._fleet.can_serve:
            self.joined.set()
        self._requests.worker_joined()

    def _lose(self, address: str, reason: Loss) -> None:
        self._fleet.refused.pop(address, None)
        worker = self._fleet.leave(address)
        if worker is None:
            return
        self.metrics.workers_lost.labels(worker.hello.role, reason).inc()
        how = _LOSSES[reason]
        is_expected = self._requests.is_draining and not worker.num_live
        logger.log(
            logging.INFO if is_expected else logging.WARNING,
            "%s worker %s at %s %s with %d requests",
            worker.hello.role,
            worker.hello.instance_id,
            address,
            how,
            worker.num_live,
        )
        self._requests.worker_lost(worker, how, said_goodbye=reason == "ended")

    def _look(self) -> None:
        self.start()  # the next one
        for worker in self._fleet.look():
            self._lose(worker.address, "silent")
            # Once it is back it has to say hello again.
            self._channel.post_hang_up(worker.address)
            self._channel.post_dial(worker.address)
        self._forget_retired()
        self._take_refused()

    def _take_refused(self) -> None:
        """Where no worker is left, those that were refused because of them may serve."""
        for address, refused in list(self._fleet.refused.items()):
            if not self._fleet.misfit(refused.hello):
                del self._fleet.refused[address]
                self._welcome(address, refused.hello)

    def _forget_retired(self) -> None:
        for address in list(self._retired):
            worker = self._fleet.at(address)
            if worker is None or not worker.num_live:
                self.remove(address)
