from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.prefill import share_budget, spare_budget


@given(st.lists(st.integers(1, 500), max_size=12), st.integers(1, 256))
def test_shares_spend_the_budget_and_the_oldest_gets_half(remaining, budget):
    shares = share_budget(remaining, budget)
    assert sum(shares) == min(budget, sum(remaining))
    assert all(0 <= share <= left for share, left in zip(shares, remaining, strict=True))
    if remaining:
        assert shares[0] >= min(remaining[0], budget // 2)


def test_the_shortest_behind_a_long_one_goes_first():
    assert share_budget([1000, 300, 20, 30], 100) == [50, 0, 20, 30]


@given(st.lists(st.integers(1, 500), max_size=12), st.integers(1, 256))
def test_what_is_spare_is_what_one_more_gets(remaining, budget):
    given_to_it = share_budget([*remaining, 1000], budget)[-1]
    assert spare_budget(remaining, budget) - budget % 2 <= given_to_it
    assert given_to_it <= spare_budget(remaining, budget)
