"""A step's batch on its way from a plan to tensors: page tables, places, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import BatchArrays
from engine.page_tables import PageTables
from engine.plan import Extend, Start, StepPlan
from engine.staging import Staging
from engine.types import SamplingParams
from tests.engine.apart import StagingApart, TablesApart, stage_apart

PAGE = 4


def start(req_index: int) -> Start:
    return Start(req_index=req_index, sampling=SamplingParams(max_tokens=1), prompt_ids=[1])


def test_a_plan_becomes_a_batch() -> None:
    tables, staging = PageTables(3, 5, torch.device("cpu")), Staging(torch.device("cpu"))
    first = Extend(req_index=2, token_ids=[7, 8, 9, 10, 11, 12], start=0, pages=[6, 3])
    tables.update(StepPlan(step=1, starts=[start(2)], extends=[first]), staging)
    decode = Extend(req_index=2, token_ids=[13], start=8, page_start=2, pages=[9])
    other = Extend(req_index=0, token_ids=[20, 21], start=3, pages=[4, 5])
    plan = StepPlan(step=2, starts=[start(0)], extends=[decode, other])
    tables.update(plan, staging)
    batch = BatchArrays.of(plan.extends, tables, PAGE).send(tables, staging, PAGE)
    assert batch.token_ids.tolist() == [13, 20, 21]
    assert batch.positions.tolist() == [8, 3, 4]
    assert batch.out_loc.tolist() == [9 * PAGE, 4 * PAGE + 3, 5 * PAGE]
    assert batch.page_table.tolist() == [[6, 3, 9], [4, 5, 0]]
    assert batch.starts == (8, 3) and batch.lengths == (1, 2)


def test_a_place_that_is_used_again_keeps_no_page_and_padding_has_none() -> None:
    tables, staging = PageTables(2, 4, torch.device("cpu")), Staging(torch.device("cpu"))
    long = Extend(req_index=0, token_ids=[1] * 12, start=0, pages=[2, 3, 4])
    tables.update(StepPlan(step=1, starts=[start(0)], extends=[long]), staging)
    short = Extend(req_index=0, token_ids=[1], start=0, pages=[5])
    tables.update(StepPlan(step=2, starts=[start(0)], extends=[short]), staging)
    assert tables.table[0].tolist() == [5, 0, 0, 0]
    assert not tables.table[tables.padding].any()
    assert tables.padding == 2


class Steps:
    """Plans of three requests, two places and pages of any number; what the tables then hold."""

    def __init__(self) -> None:
        self.tables, self.staging = TablesApart(2, 6), StagingApart()
        self.pages: dict[int, list[int]] = {}

    def take(self, req_index: int, starts: bool, page_start: int, pages: list[int]) -> None:
        own = [] if starts else self.pages.get(req_index, [])
        page_start = min(page_start, len(own))
        pages = pages[: 6 - page_start]
        extend = Extend(
            req_index=req_index, token_ids=[1], start=0, page_start=page_start, pages=pages
        )
        plan = StepPlan(step=1, starts=[start(req_index)] if starts else [], extends=[extend])
        self.tables.update(plan, self.staging)
        self.pages[req_index] = own[:page_start] + pages + own[page_start + len(pages) :]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.booleans(), st.integers(0, 5), st.lists(st.integers(1, 99))
        ),
        max_size=12,
    )
)
def test_a_device_holds_the_pages_of_the_requests_that_run_and_no_others(
    plans: list[tuple[int, bool, int, list[int]]],
) -> None:
    """New places, grown contexts, pages that were exchanged; padding has none."""
    with pytest.MonkeyPatch.context() as patch:
        stage_apart(patch)
        steps = Steps()
        for plan in plans:
            steps.take(*plan)
            for req_index in range(2):
                own = steps.pages.get(req_index, [])
                assert steps.tables.table[req_index].tolist() == own + [0] * (6 - len(own))
            assert not steps.tables.table[steps.tables.padding].any()


def test_staging_waits_for_a_copy_before_its_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrays of any size, more of them than copies may be under way; one that needs more memory."""
    stage_apart(monkeypatch)
    staging = StagingApart()
    sent = [
        [np.arange(n) + 100 * n, np.arange(2 * n, dtype=np.int32).reshape(2, n)]
        for n in (3, 0, 1, 5, 9000, 2, 9000, 30_000, 4, 1)
    ]
    arrived = [staging.send(*arrays) for arrays in sent]
    for arrays, tensors in zip(sent, arrived, strict=True):
        for array, tensor in zip(arrays, tensors, strict=True):
            assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype


def test_staged_arrays_come_to_the_place_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    stage_apart(monkeypatch)
    staging = StagingApart()
    out = torch.zeros(200, dtype=torch.uint8)
    for begin in (7, 40):
        first = np.arange(begin, begin + 3)
        tensors = staging.send(first, np.array([begin], dtype=np.int32), out=out)
        assert [t.data_ptr() - out.data_ptr() for t in tensors] == [0, 32]
        assert out[:24].view(torch.int64).tolist() == first.tolist()
        assert out[32:36].view(torch.int32).tolist() == [begin]


def test_staged_arrays_keep_shape_and_dtype() -> None:
    arrays = [np.arange(3), np.arange(4, dtype=np.int32).reshape(2, 2), np.zeros(0, dtype=np.int64)]
    for array, tensor in zip(arrays, Staging(torch.device("cpu")).send(*arrays), strict=True):
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
