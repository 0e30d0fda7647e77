"""Decode steps that the device begins before they are planned: while the host hears of one step's
tokens and plans the next, the device computes that next one already, as if all went on.

What is begun is a guess about the plan. A plan that asks for these requests at these positions, or
for some of them, takes the result; any other drops it, and computes what it asks for. Neither is
visible in what is computed: a dropped step has written KV where its requests' next tokens belong,
which is written again or given up with the page. Knows no scheduling and no sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from engine.plan import StepPlan

OUTCOMES: Final = ("taken", "dropped")  # of a step begun ahead


class TokenRead:
    """Sampled tokens on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        """tokens: [N] int64. The copy is in order with the device's current stream."""
        self._host = tokens
        self._copied: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


@dataclass(frozen=True, slots=True)
class BegunDecode:
    """A decode step that the device computes; row by row, one request each."""

    req_indices: tuple[int, ...]
    positions: tuple[int, ...]  # of the token computed
    tokens: torch.Tensor  # [N] int64, sampled, on the device
    read: TokenRead

    def rows_of(self, plan: StepPlan) -> list[int] | None:
        """Where the plan's extends are in here, in the plan's order; None: not all of them are."""
        if plan.starts:  # a req_index may be another request's by now
            return None
        rows = {req_index: row for row, req_index in enumerate(self.req_indices)}
        found = []
        for extend in plan.extends:
            row = rows.get(extend.req_index)
            if row is None or len(extend.token_ids) > 1 or extend.targets or not extend.samples:
                return None
            if self.positions[row] != extend.start:
                return None
            found.append(row)
        return found
