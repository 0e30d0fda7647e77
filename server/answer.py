"""One answer as it grows: a worker's outputs folded, in order and once each, into text deltas.

Owned by the reader thread. Knows no socket, no HTTP and no other request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.types import TokenLogprob, TokenOut
from server.detokenizer import AnswerText

StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to an answer. `logprobs` has an entry for each token that is shown with
    this text; hidden tokens (a stop token, what a stop string cut off) have none."""

    choice: int
    text: str = ""
    num_tokens: int = 0  # generated, hidden ones included
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: StopReason | None = None
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    cached_host_tokens: int = 0  # those of them that came from the host tier
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    error: str = ""  # not empty: the answer ends here without a finish_reason
    attempt: int = 0  # that said it; by now another may be under way

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or bool(self.error)


class Answer:
    """`token_ids` are the tokens received so far, which a replay starts from. Only outputs of the
    current `attempt` count; the event loop raises it with each replay."""

    def __init__(self, choice: int, text: AnswerText) -> None:
        self.choice = choice
        self.token_ids: list[int] = []
        self.attempt = 0
        self.ended_early = False  # by a stop string: the worker does not know yet
        self._text = text
        self._early: dict[int, TokenOut] = {}  # outputs that overtook others
        self._waiting_logprobs: list[TokenLogprob] = []  # of tokens not shown yet
        self._num_shown = 0
        self._sent_prompt = False
        self._finished = False

    def fold(self, out: TokenOut) -> Delta | None:
        """The delta that `out` makes possible; None when it brings nothing new (yet)."""
        if self._finished:
            return None
        if out.index > len(self.token_ids):
            self._early[out.index] = out
            return None
        before = len(self.token_ids)
        text, reason, error = self._append(out)
        while not self._finished and (following := self._next_early()) is not None:
            more, reason, error = self._append(following)
            text += more
        num_tokens = len(self.token_ids) - before
        if not (num_tokens or self._finished):
            return None
        first, self._sent_prompt = not self._sent_prompt, True
        return Delta(
            choice=self.choice,
            text=text,
            num_tokens=num_tokens,
            logprobs=self._take_logprobs(),
            finish_reason=reason,
            cached_tokens=out.cached_tokens if first else 0,
            cached_host_tokens=out.cached_host_tokens if first else 0,
            prompt_logprobs=out.prompt_logprobs if first else [],
            error=error,
            attempt=out.attempt,
        )

    def _next_early(self) -> TokenOut | None:
        """Of this attempt: it says again what one before has said, but not how that one failed."""
        for place in sorted(self._early):
            if place > len(self.token_ids):
                break
            out = self._early.pop(place)
            if out.attempt == self.attempt:
                return out
        return None

    def _append(self, out: TokenOut) -> tuple[str, StopReason | None, str]:
        """(text, finish reason, error) after the tokens of `out` that are new."""
        num_known = len(self.token_ids) - out.index
        pieces: list[str] = []
        for place in range(num_known, len(out.ids)):
            token_id = out.ids[place]
            self.token_ids.append(token_id)
            if out.stop_token and place == len(out.ids) - 1:
                break
            if out.logprobs:
                self._waiting_logprobs.append(out.logprobs[place])
            pieces.append(self._text.feed(token_id))
            if self._text.stopped:
                self._finished = True
                self.ended_early = out.finish_reason is None or place < len(out.ids) - 1
                return "".join(pieces), "stop", ""
        if out.finish_reason is None:
            return "".join(pieces), None, ""
        self._finished = True
        if out.finish_reason in ("abort", "error"):
            error = out.error or "the worker gave up this request"
            return "".join(pieces), None, error
        pieces.append(self._text.finish())
        by_stop = self._text.stopped or out.finish_reason == "stop"
        return "".join(pieces), "stop" if by_stop else "length", ""

    def _take_logprobs(self) -> list[TokenLogprob]:
        num_new = self._text.num_shown - self._num_shown
        self._num_shown = self._text.num_shown
        shown = self._waiting_logprobs[:num_new]
        del self._waiting_logprobs[:num_new]
        return shown
