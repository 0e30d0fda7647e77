"""A rank without tensors: it keeps, for every loc, which prefix was written there, and derives each
token from what it reads back through the page tables. A wrong page, a lost or a stale row changes
the answer, so equal answers mean that the scheduler's plans were right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.plan import Sampled, Start, StepPlan, StepResult


def next_token(prefix: Sequence[int], vocab_size: int) -> int:
    return chain(prefix) % vocab_size


def chain(prefix: Sequence[int]) -> int:
    value = 7
    for token in prefix:
        value = step_chain(value, token)
    return value


def step_chain(value: int, token: int) -> int:
    return (value * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 61)


@dataclass
class Twin:
    page_size: int
    vocab_size: int
    rows: dict[int, int] = field(default_factory=dict)  # loc -> chain value of the prefix there
    tables: dict[int, dict[int, int]] = field(default_factory=dict)
    started: dict[int, Start] = field(default_factory=dict)
    computed: list[int] = field(default_factory=list)  # tokens of each step

    def execute(self, plan: StepPlan) -> StepResult:
        for req_index in plan.finished:
            self.started.pop(req_index, None)  # unknown where the step that starts it failed
        for start in plan.starts:
            assert start.req_index not in self.started, "req_index is in use"
            self.started[start.req_index] = start
            self.tables[start.req_index] = {}
        for extend in plan.extends:
            table = self.tables[extend.req_index]
            table.update(enumerate(extend.pages, extend.page_start))
        self.computed.append(sum(len(e.token_ids) for e in plan.extends))
        return StepResult(step=plan.step, sampled=[self._run(e) for e in plan.extends])

    def _run(self, extend) -> Sampled:
        assert extend.req_index in self.started
        assert extend.token_ids
        table = self.tables[extend.req_index]
        value = self.rows[self._loc(table, extend.start - 1)] if extend.start else 7
        for position, token in enumerate(extend.token_ids, extend.start):
            value = step_chain(value, token)
            self.rows[self._loc(table, position)] = value
        return Sampled(
            req_index=extend.req_index,
            token_id=value % self.vocab_size if extend.samples else None,
        )

    def _loc(self, table: dict[int, int], position: int) -> int:
        page = table[position // self.page_size]
        assert page > 0, "the dummy page was used"
        return page * self.page_size + position % self.page_size
