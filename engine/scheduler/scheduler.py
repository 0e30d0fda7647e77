"""One worker's scheduler: submit and abort -> plan() -> (the ranks execute) -> update().

It alone decides; it owns the requests and, through the prefix cache, all pages. What other workers
say of a hand-off goes to `prefill_side` and `decode_side`, what ranks say of a copy between the
tiers to `cache`. It knows no tensors, no text and no sockets. `update` takes what the step found
and yields what the clients are told; what others are to be told it leaves in `notes`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.handoff.decode_side import DecodeSide, Destination
from engine.handoff.note import Note, hand_back
from engine.handoff.prefill_side import PrefillSide
from engine.handoff.room import Incoming, Outgoing
from engine.messages import RoomClosed
from engine.plan import Sampled, StepPlan, StepResult
from engine.req import Req
from engine.scheduler.admission import Admission
from engine.scheduler.limits import Limits
from engine.scheduler.prefill import share_budget
from engine.scheduler.requests import Requests
from engine.scheduler.running import RunningSet
from engine.scheduler.step import Step
from engine.types import FinishReason, Load, Request, TokenOut
from kvcache.prefix_cache import PrefixCache


class Scheduler:
    """Continuous batching with chunked prefill: each step decodes every running request and spends
    `chunk_size` tokens on prompts."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        chunk_size: int,
        max_running: int,
        context_length: int,
        vocab_size: int,
        num_ranks: int = 1,
        destination: Destination | None = None,
        looks_ahead: bool = False,  # see RunningSet: for ranks that run ahead
    ) -> None:
        self.cache = cache
        self.counts: Counter[str] = Counter()  # events, cumulative
        self.notes: list[Note] = []  # to be sent and cleared by the owner
        self.started: list[Req] = []  # by the last plan, some of them again
        self._limits = Limits(context_length, vocab_size)
        self._chunk_size = chunk_size
        self._running = RunningSet(cache, max_running, looks_ahead)
        self._requests = Requests(self._running)
        self._admission = Admission(cache, self._requests, chunk_size)
        self.prefill_side = PrefillSide(
            num_ranks, cache.page_size, self._requests, self.notes, self.counts
        )
        self.decode_side = DecodeSide(cache, self._requests, self.notes, self.counts, destination)
        self._step = Step()  # that executes, between `plan` and `update`
        self._num_steps = 0
        self._num_submitted = 0

    # -- what the clients ask

    def submit(
        self,
        request: Request,
        output_ids: list[int],
        attempt: int = 0,
        *,
        outgoing: Outgoing | None = None,
        incoming: Incoming | None = None,
    ) -> list[TokenOut]:
        """Queue a request: to be prefilled and decoded here, to be prefilled for another worker
        (`outgoing`), or to be decoded here after another has prefilled it (`incoming`). A request
        that cannot be served ends here, alone."""
        req = Req.new(request, list(output_ids), self._num_submitted)
        req.attempt, req.outgoing, req.incoming = attempt, outgoing, incoming
        self._num_submitted += 1
        before = self._requests.get(req.rid)
        if before is not None and before.attempt < attempt:  # its abort is still on the way
            self._leave(before)
        is_in_use = self._requests.get(req.rid) is not None
        error = f"request id {req.rid!r} is in use" if is_in_use else self._limits.refusal(req)
        reason = self._limits.finish_reason(req) if output_ids and not error else None
        if error or reason is not None:  # the latter: a replay of an answer that was complete
            self.counts["refused"] += bool(error)
            if outgoing is not None:
                self.notes.append(Note(RoomClosed(room=outgoing.room), to=outgoing.decode))
            return [req.out(finish_reason=reason or "error", error=error)]
        self._requests.add(req)
        if outgoing is not None:
            self.prefill_side.add(req)
        if incoming is not None:
            self.decode_side.expect(req)
        return []

    def abort(self, rid: str, attempt: int | None = None) -> list[TokenOut]:
        """Stop a request at once, waiting or running; between steps only. With `attempt`, not where
        a later one of it runs by now."""
        req = self._requests.get(rid)
        if req is None or (attempt is not None and req.attempt > attempt):
            return []
        self.counts["aborted"] += 1
        return [self._end(req, "abort")]

    def hand_back_all(self, reason: str) -> None:
        """Give up every request for others to go on with."""
        for req in self._requests:
            self.notes.append(hand_back(req, reason))
            self._leave(req)

    # -- a step

    def plan(self) -> StepPlan | None:
        """The next step; None where there is nothing to do."""
        self.started = []
        step = self._step = Step()
        arrived = self.decode_side.take_arrived()
        retracted = self._decode(step)
        for req in arrived:
            if req.req_index >= 0:  # else it has ended, or was retracted at once
                step.start(req)
        if not retracted:
            self._admit(step)
        self._prefill(step)
        host = self.cache.take_orders()
        if not step.extends and not self.prefill_side.has_orders and not host:
            # Where none is left that runs, there may be room for those that wait.
            return self.plan() if retracted or self._drop_pins() else None
        self._num_steps += 1
        open_rooms, pushes, close_rooms = self.prefill_side.take_orders()
        return StepPlan(
            step=self._num_steps,
            finished=self._running.take_finished(),
            starts=step.starts,
            extends=step.extends,
            open_rooms=open_rooms,
            pushes=pushes,
            close_rooms=close_rooms,
            host=host,
        )

    def _decode(self, step: Step) -> bool:
        """One token for each decoding request, oldest first; whether pages ran out for some."""
        retracted: list[Req] = []
        for req in [req for req in self._running if req.is_decoding]:
            if req.req_index < 0:  # just retracted for an older one
                continue
            retracted += self._running.ensure_page(req)
            if req.req_index >= 0:
                self._extend(step, req, 1)
        for req in retracted:
            self._requests.waiting.push(req)
        self.counts["retracted"] += len(retracted)
        return bool(retracted)

    def _admit(self, step: Step) -> None:
        """Start waiting requests while this step has tokens for them."""
        for req in self._admission.admit(self._prefilling(step)):
            if req.incoming is not None:
                self.decode_side.ask(req)
                continue
            self.started.append(req)
            self.counts["admitted"] += 1
            self.counts["cached_tokens"] += req.num_computed
            step.start(req)
            if req.outgoing is not None:
                self.prefill_side.open(req)

    def _prefill(self, step: Step) -> None:
        """Spend the step's tokens on prompts."""
        prefilling = self._prefilling(step)
        shares = share_budget([req.num_to_compute for req in prefilling], self._chunk_size)
        for req, share in zip(prefilling, shares, strict=True):
            if share:
                self._extend(step, req, share)

    def _prefilling(self, step: Step) -> list[Req]:
        """Running requests that do not decode in this step: prefills, and what has just started."""
        decoding = {id(req) for req in step.reqs}
        return [r for r in self._running if id(r) not in decoding and r.incoming is None]

    def _extend(self, step: Step, req: Req, num_tokens: int) -> None:
        if req.outgoing is not None:
            self.prefill_side.push(req, req.num_computed + num_tokens)
        step.extend(req, num_tokens)

    def _drop_pins(self) -> bool:
        """Pins are wishes, and a request comes first: end them where one waits although no page is
        anybody's. Whether there was need to."""
        nobody_has = not len(self._running) and not len(self.prefill_side)
        is_empty = nobody_has and self.decode_side.is_quiet and not self.cache.num_under_way
        if not len(self._requests.waiting) or not is_empty:
            return False
        if not self.cache.drop_pins():
            raise RuntimeError(f"a waiting request fits an empty pool never: {self.load}")
        return True

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenOut]:
        """Fold a step's result in; one TokenOut for each request that got a token or ended."""
        outs: list[TokenOut] = []
        step, self._step = self._step, Step()
        for req, extend, sampled in zip(step.reqs, plan.extends, result.sampled, strict=True):
            phase = "decode" if req.is_decoding else "prefill"
            self.counts[f"{phase}_tokens"] += len(extend.token_ids)
            req.num_computed += len(extend.token_ids)
            if req.scores_prompt:
                req.prompt_logprobs += [] if req.prompt_logprobs else [None]
                req.prompt_logprobs += sampled.target_logprobs
            if req.num_to_compute == 0:
                if phase == "prefill":
                    self._running.keep_prompt(req)  # others with this prompt find it at once
                outs.append(self._token_out(req, sampled))
        return outs

    def fail_step(self, error: str) -> list[TokenOut]:
        """The step could not be executed: its requests end with `error`, all others go on."""
        step, self._step = self._step, Step()
        self.counts["failed"] += len(step.reqs)
        return [self._end(req, "error", error=error) for req in step.reqs]

    def _token_out(self, req: Req, sampled: Sampled) -> TokenOut:
        prompt_logprobs = req.prompt_logprobs if req.scores_prompt else []
        if sampled.token_id is None:
            return self._end(req, "length", prompt_logprobs=prompt_logprobs)
        req.token_ids.append(sampled.token_id)
        reason = self._limits.finish_reason(req)
        fields = {
            "ids": [sampled.token_id],
            "logprobs": [sampled.logprob] if sampled.logprob is not None else [],
            "prompt_logprobs": prompt_logprobs,
        }
        if reason is not None:
            return self._end(req, reason, stop_token=reason == "stop", **fields)
        out = req.out(**fields)
        req.num_emitted = req.num_output
        if req.outgoing is not None:
            self.prefill_side.complete(req, sampled.token_id)
        return out

    def _end(self, req: Req, reason: FinishReason, **fields: Any) -> TokenOut:
        """The one way out for a request that is answered here, whatever the reason."""
        self._leave(req)
        return req.out(finish_reason=reason, **fields)

    def _leave(self, req: Req) -> None:
        """It neither waits nor runs any more, and its pages go where they belong."""
        if req.outgoing is not None:
            self.prefill_side.close(req)
        elif req.incoming is not None:
            self.decode_side.close(req)
        else:
            self._requests.remove(req)
            self._running.give_back(req)

    # -- what others may know

    @property
    def is_idle(self) -> bool:
        return not len(self._requests) and not len(self.prefill_side)

    def attempt_of(self, rid: str) -> int:
        """Of the request of that id that waits or runs; -1 where there is none."""
        req = self._requests.get(rid)
        return req.attempt if req is not None else -1

    def knows(self, rid: str) -> bool:
        """It may yet have something to say about this request."""
        return self._requests.get(rid) is not None or self.prefill_side.serves(rid)

    @property
    def load(self) -> Load:
        waiting = self._requests.waiting
        return Load(
            num_running=len(self._running),
            num_waiting=len(waiting),
            waiting_tokens=waiting.num_tokens,
            free_pages=self.cache.device.free_pages,
            evictable_pages=self.cache.device.evictable_pages,
            locked_pages=self.cache.device.locked_pages,
            fenced_pages=self.decode_side.fenced_pages,
            num_rooms=len(self.prefill_side) + len(self.decode_side),
            total_host_pages=self.cache.total_host_pages,
            free_host_pages=self.cache.free_host_pages,
        )
