from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.deal import DEAL_MODES, deal


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    cp_size=st.integers(1, 9),
    mode=st.sampled_from(DEAL_MODES),
)
def test_every_token_is_dealt_once_and_runs_stay_in_their_request(lengths, cp_size, mode):
    shares = deal(lengths, cp_size, mode)
    assert len(shares) == cp_size
    dealt = [t for share in shares for run in share for t in run.tokens]
    assert sorted(dealt) == list(range(sum(lengths)))
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    for share in shares:
        for run in share:
            assert run.num >= 1
            assert all(ends[run.req] - lengths[run.req] <= t < ends[run.req] for t in run.tokens)


def test_in_seq_split_gives_each_rank_an_early_and_a_late_block():
    # 13 tokens in 2N = 4 blocks: 4, 3, 3, 3
    first, second = deal([13], 2, "in-seq-split")
    assert [list(run.tokens) for run in first] == [[0, 1, 2, 3], [10, 11, 12]]
    assert [list(run.tokens) for run in second] == [[4, 5, 6, 7, 8, 9]]


@given(length=st.integers(64, 4000), cp_size=st.integers(1, 8))
def test_in_seq_split_balances_causal_work(length, cp_size):
    work = [
        sum(t + 1 for run in share for t in run.tokens)
        for share in deal([length], cp_size, "in-seq-split")
    ]
    assert max(work) - min(work) <= 2 * length  # of about length**2 / (2 * cp_size) each


def test_requests_are_dealt_each_on_its_own():
    shares = deal([4, 5], 2, "in-seq-split")
    assert [list(run.tokens) for run in shares[0]] == [[0], [3], [4, 5], [8]]
    assert [list(run.tokens) for run in shares[1]] == [[1, 2], [6, 7]]


def test_round_robin_counts_over_the_flattened_batch():
    shares = deal([3, 4], 2, "round-robin-split")
    assert [list(run.tokens) for run in shares[0]] == [[0, 2], [4, 6]]
    assert [list(run.tokens) for run in shares[1]] == [[1], [3, 5]]


def test_one_rank_computes_everything_in_order():
    for mode in DEAL_MODES:
        assert [t for run in deal([3, 4], 1, mode)[0] for t in run.tokens] == list(range(7))


def test_an_unknown_mode_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'zigzag'.*in-seq-split, round-robin-split"):
        deal([3], 2, "zigzag")
