"""One step from its planning to its result: what the ranks are told, and whose each part is."""

from __future__ import annotations

from engine.plan import Extend, Start
from engine.req import Req


class Step:
    """Put together by Scheduler.plan; Scheduler.update folds its result in."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.extends: list[Extend] = []
        self.reqs: list[Req] = []  # whose the extends are, in their order

    def start(self, req: Req) -> None:
        self.starts.append(
            Start(
                req_index=req.req_index,
                sampling=req.sampling,
                prompt_ids=req.request.token_ids,
                output_ids=req.token_ids[req.num_prompt :],
            )
        )

    def extend(self, req: Req, num_tokens: int) -> None:
        """Compute its next `num_tokens`; the ranks are told the pages that they do not know."""
        start, end = req.num_computed, req.num_computed + num_tokens
        page_start, req.num_pages_known = req.num_pages_known, len(req.pages)
        self.reqs.append(req)
        self.extends.append(
            Extend(
                req_index=req.req_index,
                token_ids=req.token_ids[start:end],
                start=start,
                page_start=page_start,
                pages=req.pages[page_start:],
                samples=end == len(req.token_ids) and req.sampling.max_tokens > 0,
                targets=req.request.token_ids[start + 1 : end + 1] if req.scores_prompt else [],
            )
        )
