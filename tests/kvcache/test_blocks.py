from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks import plan_blocks
from kvcache.sharding import CpSharedKVLayout


@settings(deadline=None, max_examples=80)
@given(data=st.data(), cp_size=st.integers(1, 5), page_size=st.sampled_from([1, 3, 4]))
def test_gathered_blocks_give_back_every_context(data, cp_size, page_size):
    """Real bytes: each rank holds its rows, the gather is a concatenation."""
    layouts = [CpSharedKVLayout(page_size, cp_size, rank) for rank in range(cp_size)]
    num_pages = 8  # a rank's
    pages = data.draw(st.permutations(range(1, num_pages * cp_size + 1)))
    pools = [torch.full(((num_pages + 1) * page_size,), -1) for _ in layouts]
    for page in pages:
        for inside in range(page_size):
            loc = torch.tensor(page * page_size + inside)
            for layout, pool in zip(layouts, pools, strict=True):
                if bool(layout.owned_by_this_rank(loc)):
                    pool[layout.row(loc)] = loc
    shared = list(pages[: data.draw(st.integers(0, 4))])
    rest = list(pages[len(shared) :])
    contexts, lengths = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        own = [rest.pop() for _ in range(min(len(rest), data.draw(st.integers(0, 4))))]
        contexts.append(shared + own)
        low = max(0, (len(contexts[-1]) - 1) * page_size + 1) if contexts[-1] else 0
        lengths.append(data.draw(st.integers(low, len(contexts[-1]) * page_size)))
    per_rank = data.draw(st.integers(1, 12))
    plans = [plan_blocks(contexts, lengths, layout, per_rank) for layout in layouts]
    seen: list[dict[int, int]] = [{} for _ in contexts]
    num_read = 0
    for blocks in zip(*plans, strict=True):
        assert len({block.most for block in blocks}) == 1 and blocks[0].most <= per_rank
        parts = [
            pool.view(-1, page_size)[block.own] for pool, block in zip(pools, blocks, strict=True)
        ]
        gathered = torch.cat(parts).flatten()
        num_read += blocks[0].most * cp_size
        for i, span in enumerate(blocks[0].spans):
            if span is not None:
                for at, loc in enumerate(gathered[span.rows].tolist(), span.begin):
                    assert at not in seen[i], "a token was read twice"
                    seen[i][at] = loc
    for context, length, found in zip(contexts, lengths, seen, strict=True):
        assert found == {
            at: context[at // page_size] * page_size + at % page_size for at in range(length)
        }
    if per_rank >= 12 and plans[0]:  # one block: each page once, but for padding
        assert num_read <= len({p for c in contexts for p in c}) + cp_size * 8


def test_what_cannot_be_planned_is_named():
    layout = CpSharedKVLayout(4, 2)
    with pytest.raises(ValueError, match="pages_per_rank must be positive, got 0"):
        plan_blocks([[1]], [4], layout, 0)
    with pytest.raises(ValueError, match="9 tokens need 3 pages of 4"):
        plan_blocks([[1, 2]], [9], layout, 1)
    with pytest.raises(ValueError, match="need 1 pages"):
        plan_blocks([[0]], [1], layout, 1)
