"""How one step's prefill tokens are shared out. A pure function of lengths.

The oldest prefill gets at least half of the budget, so a long prompt always advances; the other
half goes to the shortest of the rest first, so short prompts behind a long one do not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence


def share_budget(remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens of this step for each prefill; `remaining` is by seniority, each >= 1.

    The shares sum to min(budget, sum(remaining)).
    """
    shares = [0] * len(remaining)
    if not remaining:
        return shares
    shares[0] = min(remaining[0], budget if len(remaining) == 1 else -(-budget // 2))
    left = budget - shares[0]
    for i in sorted(range(1, len(remaining)), key=lambda i: (remaining[i], i)):
        shares[i] = min(remaining[i], left)
        left -= shares[i]
    shares[0] += min(remaining[0] - shares[0], left)
    return shares


def spare_budget(remaining: Sequence[int], budget: int) -> int:
    """Tokens of this step that one more prefill, the longest and youngest, would be given; of an
    odd budget it may be one less."""
    shares = share_budget(remaining, budget)
    return budget - sum(shares[1:]) - min(sum(shares[:1]), budget // 2)
