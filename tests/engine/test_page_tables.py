"""A step's batch on its way from a plan to tensors: page tables, places, padding."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import BatchArrays
from engine.page_tables import PageTables
from engine.plan import Extend, Start, StepPlan
from engine.staging import Staging
from engine.types import SamplingParams

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


def test_staged_arrays_keep_shape_and_dtype() -> None:
    arrays = [np.arange(3), np.arange(4, dtype=np.int32).reshape(2, 2), np.zeros(0, dtype=np.int64)]
    for array, tensor in zip(arrays, Staging(torch.device("cpu")).send(*arrays), strict=True):
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
