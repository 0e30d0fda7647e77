"""One worker's scheduler: submit and abort -> plan() -> (the ranks execute) -> update().

It alone decides; it owns the waiting queue, the running set and, through the prefix cache, all
pages. It knows no tensors, no text and no sockets. `update` takes what the step found and yields
what the clients are told; what others are to be told it leaves in `notes`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.handoff.decode_side import DecodeSide, Destination
from engine.handoff.note import Note
from engine.handoff.prefill_side import PrefillSide
from engine.handoff.room import Incoming, Outgoing, RoomReport
from engine.messages import RoomClosed
from engine.plan import Extend, Sampled, Start, StepPlan, StepResult
from engine.req import Req
from engine.scheduler.admission import Admission
from engine.scheduler.prefill import share_budget
from engine.scheduler.running import RunningSet
from engine.scheduler.waiting import WaitingQueue
from engine.types import FinishReason, Load, Request, TokenOut
from kvcache.prefix_cache import PrefixCache


class Scheduler:
    """Continuous batching with chunked prefill: each step decodes every running request and spends
    `chunk_size` tokens on prompts."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        page_size: int,
        chunk_size: int,
        max_running: int,
        context_length: int,
        vocab_size: int,
        num_ranks: int = 1,
        destination: Destination | None = None,
        looks_ahead: bool = False,  # see RunningSet: for ranks that run ahead
    ) -> None:
        self._cache = cache
        self._page_size = page_size
        self._chunk_size = chunk_size
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._waiting = WaitingQueue()
        self._running = RunningSet(cache, page_size, max_running, looks_ahead)
        self._admission = Admission(cache, page_size)
        self.notes: list[Note] = []  # to be sent and cleared by the owner
        self.started: list[Req] = []  # by the last plan, some of them again
        self.prefill_side = PrefillSide(num_ranks, page_size, self._running, self.notes)
        self.decode_side = DecodeSide(cache, self._running, self.notes, destination)
        self._arrived: list[Req] = []  # handed over since the last step
        self._reqs: dict[str, Req] = {}
        self._in_step: list[Req] = []  # in the order of the plan's extends
        self._num_submitted = 0
        self._step = 0
        self.counts: Counter[str] = Counter()  # events, cumulative

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
        before = self._reqs.get(req.rid)
        if before is not None and before.attempt < attempt:  # its abort is still on the way
            self._leave(before)
        error = self._refusal(req)
        reason = self._finish_reason(req) if output_ids and not error else None
        if error or reason is not None:  # the latter: a replay of an answer that was complete
            self.counts["refused"] += bool(error)
            if outgoing is not None:
                self.notes.append(Note(RoomClosed(room=outgoing.room), to=outgoing.decode))
            return [self._out(req, finish_reason=reason or "error", error=error)]
        self._reqs[req.rid] = req
        self._waiting.push(req)
        if outgoing is not None:
            self.prefill_side.add(req)
        if incoming is not None:
            self.decode_side.expect(req)
        return []

    def abort(self, rid: str, attempt: int | None = None) -> list[TokenOut]:
        """Stop a request at once, waiting or running; between steps only. With `attempt`, not where
        a later one of it runs by now."""
        req = self._reqs.get(rid)
        if req is None or (attempt is not None and req.attempt > attempt):
            return []
        self.counts["aborted"] += 1
        return [self._end(req, "abort")]

    # -- what the other side of a hand-off says

    def report(self, report: RoomReport) -> None:
        """A rank's word on a room."""
        req = self.prefill_side.report(report)
        if req is not None:
            self.counts["handoffs_failed"] += 1
            self._fail_room(req, f"the KV could not be handed over: {report.error}")

    def report_in_step(self, report: RoomReport) -> bool:
        """`report` between `plan` and `update`: where the request's prefill was complete before and
        nothing has failed. False, and nothing has changed, elsewhere."""
        req = self.prefill_side.get(report.room)
        if req is None or report.status == "failed" or self._reqs.get(req.rid) is req:
            return False
        self.report(report)
        return True

    def acknowledge(self, item: int, rank: int) -> None:
        """A rank has done its part of a copy between the tiers."""
        self._cache.acknowledge(item, rank)

    def close_rooms_of(self, rid: str) -> None:
        """The front end that had the request is gone, and its prefill was complete."""
        for req in self.prefill_side.of_request(rid):
            self._close_room(req)

    def close_room(self, room: str) -> bool:
        """The decode worker wants nothing more for it. False where there is no such room."""
        req = self.prefill_side.get(room)
        if req is None:
            return False
        self._close_room(req)
        return True

    def lose_decode(self, name: str) -> None:
        """That decode worker is gone."""
        for req in self.prefill_side.of_decode(name):
            self._fail_room(req, "the decode worker is gone")

    def _fail_room(self, req: Req, reason: str) -> None:
        self.prefill_side.hand_back(req, reason)
        self._close_room(req)

    def _close_room(self, req: Req) -> None:
        if self._reqs.get(req.rid) is req:
            self._leave(req)
        else:  # its prefill was complete
            self.prefill_side.close(req)

    def arrive(self, room: str, token_id: int) -> bool:
        """A room's KV is here; `token_id` is the request's next token. False where there is no such
        room."""
        if self.decode_side.get(room) is None:
            return False
        self.counts["handed_over"] += 1
        req = self.decode_side.arrive(room, token_id)
        self._keep(req)
        self._arrived.append(req)
        return True

    def room_closed(self, message: RoomClosed) -> bool:
        """The prefill group is done with a room and hands nothing over. False: no such room."""
        is_known = self.decode_side.knows(message.room)
        req = self.decode_side.closed(message)
        if req is not None:
            self._drop(req)
            self.decode_side.end(req, message)
        return is_known

    def lose_prefill(self, address: str) -> None:
        """That prefill group does not answer any more."""
        for req in self.decode_side.lose(address):
            self._drop(req)
            self.decode_side.abandon(req, "the prefill group is gone")

    def hand_back_all(self, reason: str) -> None:
        """Give up every request for others to go on with."""
        for req in list(self._reqs.values()):
            self.prefill_side.hand_back(req, reason)
            self._leave(req)

    def _drop(self, req: Req) -> None:
        """Out of the running set; its pages are still its own."""
        del self._reqs[req.rid]
        self._running.remove(req)

    def _refusal(self, req: Req) -> str:
        if req.rid in self._reqs:
            return f"request id {req.rid!r} is in use"
        if not req.request.token_ids:
            return "the prompt is empty: at least one token is needed"
        room = self._context_length - req.num_prompt
        if req.sampling.max_tokens < 0 or req.sampling.max_tokens > room:
            return (
                f"{req.num_prompt} prompt tokens and max_tokens {req.sampling.max_tokens} exceed "
                f"the context length of {self._context_length}"
            )
        if req.incoming is not None and len(req.token_ids) >= self._context_length:
            return (
                f"{len(req.token_ids)} tokens fill the context length of {self._context_length}: "
                "there is nothing to decode"
            )
        bad = [t for t in req.token_ids if not 0 <= t < self._vocab_size]
        bad += [t for t in req.sampling.logit_bias if not 0 <= t < self._vocab_size]
        if bad:
            return f"token id {bad[0]} is outside the vocabulary of {self._vocab_size}"
        return ""

    # -- a step

    def plan(self) -> StepPlan | None:
        """The next step; None where there is nothing to do."""
        self.started = []
        arrived, self._arrived = self._arrived, []
        extends, retracted = self._plan_decodes()
        starts = [self._start_of(req) for req in arrived if req.req_index >= 0]
        starts += [] if retracted else self._admit()
        prefilling = self._prefilling()
        shares = share_budget([req.num_to_compute for req in prefilling], self._chunk_size)
        extends += [
            self._extend(r, share) for r, share in zip(prefilling, shares, strict=True) if share
        ]
        host = self._cache.take_orders()
        if not extends and not self.prefill_side.has_orders and not host:
            if retracted:  # none is left that runs: what room is there for those that wait?
                return self.plan()
            if self._waiting and self._is_empty:
                if self._cache.drop_pins():  # they are wishes, and a request comes first
                    return self.plan()
                raise RuntimeError(f"a waiting request fits an empty pool never: {self.load}")
            return None
        self._step += 1
        finished, self._running.finished_indices = self._running.finished_indices, []
        open_rooms, pushes, close_rooms = self.prefill_side.take_orders()
        return StepPlan(
            step=self._step,
            finished=finished,
            starts=starts,
            extends=extends,
            open_rooms=open_rooms,
            pushes=pushes,
            close_rooms=close_rooms,
            host=host,
        )

    @property
    def _is_empty(self) -> bool:
        """No page is anybody's."""
        nobody_has = not len(self._running) and not len(self.prefill_side)
        return nobody_has and self.decode_side.is_quiet and not self._cache.num_under_way

    def _plan_decodes(self) -> tuple[list[Extend], bool]:
        """One token for each decoding request, oldest first, and whether pages ran out for some."""
        self._in_step = []
        extends: list[Extend] = []
        retracted: list[Req] = []
        for req in [req for req in self._running if req.is_decoding]:
            if req.req_index < 0:  # just retracted for an older one
                continue
            retracted += self._running.ensure_page(req)
            if req.req_index >= 0:
                extends.append(self._extend(req, 1))
        for req in retracted:
            self._waiting.push(req)
        self.counts["retracted"] += len(retracted)
        return extends, bool(retracted)

    def _prefilling(self) -> list[Req]:
        """Running requests that do not decode in this step: prefills, and what has just started."""
        decoding = {id(req) for req in self._in_step}
        return [r for r in self._running if id(r) not in decoding and r.incoming is None]

    def _admit(self) -> list[Start]:
        """Start waiting requests while this step has tokens for them."""
        starts: list[Start] = []
        for req in self._waiting:
            if req.incoming is not None:  # costs no tokens here
                if self._running.is_full or not self._admission.reserve(req, len(self._running)):
                    break
                self._waiting.remove(req)
                self._running.add(req)
                self.decode_side.ask(req, self._page_size)
                continue
            prefilling = self._prefilling()
            shares = share_budget([r.num_to_compute for r in prefilling], self._chunk_size)
            spare = self._chunk_size - sum(shares[1:]) - min(sum(shares[:1]), self._chunk_size // 2)
            if self._running.is_full or spare <= 0:
                break
            verdict = self._admission.admit(req, len(self._running), prefilling)
            if verdict == "full":
                break  # nothing younger overtakes it: it would wait for ever
            if verdict == "later":
                continue
            self._start(req, starts)
        return starts

    def _start(self, req: Req, starts: list[Start]) -> None:
        self._waiting.remove(req)
        self._running.add(req)
        self.started.append(req)
        self.counts["admitted"] += 1
        self.counts["cached_tokens"] += req.num_computed
        starts.append(self._start_of(req))
        if req.outgoing is not None:
            self.prefill_side.open(req)

    def _start_of(self, req: Req) -> Start:
        return Start(
            req_index=req.req_index,
            sampling=req.sampling,
            prompt_ids=req.request.token_ids,
            output_ids=req.token_ids[req.num_prompt :],
        )

    def _extend(self, req: Req, num_tokens: int) -> Extend:
        start, end = req.num_computed, req.num_computed + num_tokens
        page_start, req.num_pages_known = req.num_pages_known, len(req.pages)
        self._in_step.append(req)
        if req.outgoing is not None:
            self.prefill_side.push(req, end)
        return Extend(
            req_index=req.req_index,
            token_ids=req.token_ids[start:end],
            start=start,
            page_start=page_start,
            pages=req.pages[page_start:],
            samples=end == len(req.token_ids) and req.sampling.max_tokens > 0,
            targets=req.request.token_ids[start + 1 : end + 1] if req.scores_prompt else [],
        )

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenOut]:
        """Fold a step's result in; one TokenOut for each request that got a token or ended."""
        outs: list[TokenOut] = []
        for req, extend, sampled in zip(self._in_step, plan.extends, result.sampled, strict=True):
            was_decoding = req.is_decoding
            self.counts["decode_tokens" if was_decoding else "prefill_tokens"] += len(
                extend.token_ids
            )
            req.num_computed += len(extend.token_ids)
            if req.scores_prompt:
                req.prompt_logprobs += [] if req.prompt_logprobs else [None]
                req.prompt_logprobs += sampled.target_logprobs
            if req.num_to_compute == 0:
                if not was_decoding:
                    self._keep(req)  # others with this prompt find it at once
                outs.append(self._token_out(req, sampled))
        self._in_step = []
        return outs

    def _keep(self, req: Req) -> None:
        """Hand what is computed to the prefix cache, and its prompt for the time that the request
        asks for."""
        self._running.keep_in_cache(req)
        node = req.node
        if node is None or not req.request.pin_s:
            return
        if req.num_tree > req.num_prompt:  # output too, after a replay or a retraction
            node = self._cache.match(req.request.token_ids).node
        self._cache.pin(node, req.request.pin_s)

    def _token_out(self, req: Req, sampled: Sampled) -> TokenOut:
        prompt_logprobs = req.prompt_logprobs if req.scores_prompt else []
        if sampled.token_id is None:
            return self._end(req, "length", prompt_logprobs=prompt_logprobs)
        req.token_ids.append(sampled.token_id)
        reason = self._finish_reason(req)
        fields = {
            "ids": [sampled.token_id],
            "logprobs": [sampled.logprob] if sampled.logprob is not None else [],
            "prompt_logprobs": prompt_logprobs,
        }
        if reason is not None:
            return self._end(req, reason, stop_token=reason == "stop", **fields)
        out = self._out(req, **fields)
        req.num_emitted = req.num_output
        if req.outgoing is not None:
            self.counts["handed_over"] += 1
            self._drop(req)
            self.prefill_side.complete(req, sampled.token_id)
        return out

    def _finish_reason(self, req: Req) -> FinishReason | None:
        sampling = req.sampling
        if req.num_output > sampling.min_tokens and req.token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        at_limit = req.num_output >= sampling.max_tokens
        return "length" if at_limit or len(req.token_ids) >= self._context_length else None

    def _out(self, req: Req, **fields: Any) -> TokenOut:
        return TokenOut(
            rid=req.rid,
            index=req.num_emitted,
            attempt=req.attempt,
            cached_tokens=req.num_cached or 0,
            cached_host_tokens=req.num_cached_host,
            **fields,
        )

    def _end(self, req: Req, reason: FinishReason, **fields: Any) -> TokenOut:
        """The one way out for a request that is answered here, whatever the reason."""
        self._leave(req)
        return self._out(req, finish_reason=reason, **fields)

    def _leave(self, req: Req) -> None:
        if req.req_index < 0:
            del self._reqs[req.rid]
            self._waiting.remove(req)
            if req.incoming is not None:
                self.decode_side.give_up(req)
        else:
            self._drop(req)
            if req.incoming is not None:
                self.decode_side.close(req)
            elif req.outgoing is None:
                self._running.give_back(req)
        if req.outgoing is not None:
            self.prefill_side.close(req)

    def fail_step(self, error: str) -> list[TokenOut]:
        """The step could not be executed: its requests end with `error`, all others go on."""
        failed, self._in_step = self._in_step, []
        self.counts["failed"] += len(failed)
        return [self._end(req, "error", error=error) for req in failed]

    # -- what others may know

    @property
    def is_idle(self) -> bool:
        return not self._reqs and not len(self.prefill_side)

    def attempt_of(self, rid: str) -> int:
        """Of the request of that id that waits or runs; -1 where there is none."""
        req = self._reqs.get(rid)
        return req.attempt if req is not None else -1

    def knows(self, rid: str) -> bool:
        """It may yet have something to say about this request."""
        return rid in self._reqs or bool(self.prefill_side.of_request(rid))

    @property
    def used_pages_by_lane(self) -> list[int]:
        """Pages held or cached, by the rank that owns them."""
        return self._cache.used_pages_by_lane()

    @property
    def pinned_pages(self) -> int:
        return self._cache.pinned_pages

    @property
    def num_copies(self) -> int:
        """Between the tiers, that some rank has not reported yet."""
        return self._cache.num_under_way

    @property
    def cache_counts(self) -> Counter[str]:
        """What pins and the host tier have done, cumulative: see PrefixCache and TieredCache."""
        return self._cache.counts

    @property
    def load(self) -> Load:
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens,
            free_pages=self._cache.free_pages,
            evictable_pages=self._cache.evictable_pages,
            locked_pages=self._cache.locked_pages,
            fenced_pages=self.decode_side.fenced_pages,
            num_rooms=len(self.prefill_side) + len(self.decode_side),
            total_host_pages=self._cache.total_host_pages,
            free_host_pages=self._cache.free_host_pages,
        )
