"""How a step's tokens are dealt to the ranks of a context-parallel group. Pure functions of values
that all ranks share; knows no tensors and no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

DealMode = Literal["in-seq-split", "round-robin-split"]
DEAL_MODES: Final[tuple[str, ...]] = get_args(DealMode)


@dataclass(frozen=True, slots=True)
class Run:
    """Evenly spaced tokens of one request that one rank computes: batch tokens first, first +
    stride, ... of request `req`, `num` of them. Their distance in position is `stride`, too."""

    req: int  # place in the batch
    first: int  # in the flattened batch
    num: int
    stride: int = 1

    @property
    def tokens(self) -> range:
        return range(self.first, self.first + self.num * self.stride, self.stride)


def deal(lengths: Sequence[int], cp_size: int, mode: str) -> list[list[Run]]:
    """The runs of each rank, in the order in which that rank computes them.

    `in-seq-split` cuts each request's new tokens into 2N blocks and gives rank r the blocks r and
    2N - 1 - r, so that every rank has early and late ones and the causal work is even. The first
    `length mod 2N` blocks are one token longer; a request shorter than 2N tokens has empty blocks.
    `round-robin-split` gives token t of the flattened batch to rank t mod N.

    Raises ValueError for another mode.
    """
    if mode not in DEAL_MODES:
        raise ValueError(f"mode {mode!r} is unknown; accepted are {', '.join(DEAL_MODES)}")
    shares: list[list[Run]] = [[] for _ in range(cp_size)]
    begin = 0
    for req, length in enumerate(lengths):
        if mode == "in-seq-split":
            blocks = _cut(begin, length, 2 * cp_size)
            for rank, share in enumerate(shares):
                (early, num), (late, more) = blocks[rank], blocks[-1 - rank]
                if early + num == late:  # the last rank's two are one
                    num, more = num + more, 0
                share += [Run(req, at, n) for at, n in ((early, num), (late, more)) if n]
        else:
            for rank, share in enumerate(shares):
                first = begin + (rank - begin) % cp_size
                num = len(range(first, begin + length, cp_size))
                if num:
                    share.append(Run(req, first, num, cp_size))
        begin += length
    return shares


def _cut(begin: int, length: int, num_blocks: int) -> list[tuple[int, int]]:
    """(first token, number of tokens) of each block."""
    size, longer = divmod(length, num_blocks)
    blocks = []
    for block in range(num_blocks):
        num = size + (block < longer)
        blocks.append((begin, num))
        begin += num
    return blocks
