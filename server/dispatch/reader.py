"""The thread that reads the workers' channel and turns outputs into text, off the event loop.

Owns the answers' text state while they grow. Knows no routing: what it finds goes to the loop, in
one call per batch; what workers cache goes into the router's index.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

from engine.channel import Channel, Disconnected
from engine.channel import Event as Message
from engine.messages import Hello, Outputs
from engine.types import TokenOut
from kvcache.events import KVEvents
from server.answer import Answer, Delta
from server.router.prefix_index import PrefixIndex

logger = logging.getLogger(__name__)

POLL_S = 0.5  # the channel tells workers about once a second that this process is there

# (worker's address, its message), outputs replaced by (rid, delta) pairs
Event: TypeAlias = "tuple[str, Message | list[tuple[str, Delta]]]"


class Reader:
    """`answers` is written by the event loop; `deliver` is called in this thread and must only hand
    over."""

    def __init__(
        self,
        channel: Channel,
        answers: Mapping[str, Answer],
        index: PrefixIndex,
        deliver: Callable[[list[Event]], None],
    ) -> None:
        self._channel = channel
        self._answers = answers
        self._index = index
        self._deliver = deliver
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """`join` then returns soon."""
        self._is_stopping = True
        self._channel.wake()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping:
            events: list[Event] = []
            for address, message in self._channel.receive(POLL_S):
                match message:
                    case Outputs(outs=outs):
                        events.append((address, self._fold(outs)))
                    case KVEvents():
                        self._index.apply(address, message)
                        continue
                    case Hello(total_pages=total_pages):
                        self._index.drop(address)
                        self._index.add(address, total_pages)
                        events.append((address, message))
                    case _:
                        if isinstance(message, Disconnected):
                            self._index.drop(address)
                        events.append((address, message))
            if events:
                self._deliver(events)

    def _fold(self, outs: list[TokenOut]) -> list[tuple[str, Delta]]:
        deltas = []
        for out in outs:
            answer = self._answers.get(out.rid)
            if answer is None or answer.attempt != out.attempt:
                continue
            try:
                delta = answer.fold(out)
            # A fault in one answer's text must not silence all the others.
            except Exception:
                logger.exception("request %s: an output could not be read", out.rid)
                delta = Delta(choice=answer.choice, error="the answer could not be decoded")
            if delta is not None:
                deltas.append((out.rid, delta))
        return deltas
