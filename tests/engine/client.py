"""Drives an engine without sockets: what its clients would see, and what is left afterwards."""

from __future__ import annotations

import threading
from pathlib import Path

from engine.config import WorkerConfig
from engine.engine import Engine
from engine.loading import load_engine
from engine.types import Request, SamplingParams, TokenLogprob, TokenOut


class Client:
    """What the clients of an engine see."""

    def __init__(
        self, folder: Path, *, device: str = "cpu", dtype: str = "float32", **options
    ) -> None:
        config = WorkerConfig(
            model=str(folder), listen_address="", device=device, dtype=dtype, **options
        )
        self.engine: Engine = load_engine(config)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenOut] = {}
        self.prompt_logprobs: dict[str, list] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.sampling: dict[str, dict] = {}
        self.takes_reports = True  # what the ranks report beside the steps; else it waits
        self.woken = threading.Semaphore(0)  # once for each report, and by whoever has news
        self.engine.mailbox.on_put = self.woken.release

    def close(self) -> None:
        self.engine.close()

    def submit(self, rid: str, prompt: list[int], **sampling) -> None:
        sampling.setdefault("max_tokens", 12)
        self.prompts[rid], self.sampling[rid] = prompt, sampling
        request = Request(rid=rid, token_ids=prompt, sampling=SamplingParams(**sampling))
        self._see(self.engine.scheduler.submit(request, []))

    def abort(self, rid: str) -> None:
        self._see(self.engine.scheduler.abort(rid))

    def step(self) -> bool:
        scheduler = self.engine.scheduler
        if self.takes_reports:
            for report in self.engine.mailbox.take():
                self.engine.report(report)
        plan = scheduler.plan()
        if plan is not None:
            self._see(scheduler.update(plan, self.engine.execute(plan)))
        return plan is not None

    def run(self) -> None:
        """Until nothing is left to do and no copy is under way."""
        while self.step() or self.engine.scheduler.cache.num_under_way:
            if self.engine.scheduler.cache.num_under_way:
                assert self.woken.acquire(timeout=60)
        load = self.engine.scheduler.load
        assert load.locked_pages == 0
        assert load.free_pages + load.evictable_pages == self.engine.capacity.logical_pages

    def _see(self, outs: list[TokenOut]) -> None:
        for out in outs:
            assert out.finish_reason != "error", out.error
            self.tokens.setdefault(out.rid, []).extend(out.ids)
            self.logprobs.setdefault(out.rid, []).extend(out.logprobs)
            if out.prompt_logprobs:
                self.prompt_logprobs[out.rid] = out.prompt_logprobs
            if out.finish_reason:
                self.ends[out.rid] = out
