"""The thread that reads the workers' channel and turns outputs into text, off the event loop.

Owns the answers' text state while they grow. Knows no routing: what it finds goes to the loop, in
one call per batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from engine.channel import FrontendChannel
from engine.messages import Outputs, ToFrontend
from engine.types import TokenOut
from server.answer import Answer, Delta

logger = logging.getLogger(__name__)

POLL_S = 1.0  # only bounds how long a lost wake-up could last

# (instance id, its message), outputs replaced by (rid, delta) pairs
Event = tuple[str, "ToFrontend | list[tuple[str, Delta]]"]


class Reader:
    """`answers` is written by the event loop; `deliver` is called in this thread and must only hand
    over."""

    def __init__(
        self,
        channel: FrontendChannel,
        answers: Mapping[str, Answer],
        deliver: Callable[[list[Event]], None],
    ) -> None:
        self._channel = channel
        self._answers = answers
        self._deliver = deliver
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """From the thread that posts; `join` then returns soon."""
        self._is_stopping = True
        self._channel.wake()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping:
            events: list[Event] = [
                (
                    source,
                    self._fold(source, message.outs) if isinstance(message, Outputs) else message,
                )
                for source, message in self._channel.receive(POLL_S)
            ]
            if events:
                self._deliver(events)

    def _fold(self, source: str, outs: list[TokenOut]) -> list[tuple[str, Delta]]:
        deltas = []
        for out in outs:
            answer = self._answers.get(out.rid)
            if answer is None or answer.source != source:
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
