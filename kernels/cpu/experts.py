"""The feed-forward part of a layer in one call: routed experts, or one dense gated MLP.

All threads first compute silu(gate) * up for their share of the intermediate columns, then their
share of the output columns, so no two threads add to the same number and each weight is read once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.compiled import compiled, compiled_parallel, prange
from kernels.cpu.gemm import PANEL_FLOATS, arrange_rows, multiply, share
from kernels.cpu.norm import rms_norm_rows
from kernels.cpu.tile import add_scaled, arrange, silu_mul

UNIT = 16  # intermediate columns that stay with one thread: `arrange` works on so many


@compiled
def gate_up(
    kind: Any, size: int, x: int, ldx: int, num_rows: int, w13: int, hidden: int, inner: int,
    low: int, high: int, h: int, up: int, panel: int,
) -> None:  # fmt: skip
    """h[:, low:high] = silu(x · gateᵀ) * (x · upᵀ) for those columns, arranged for the next
    product; h has row stride `inner`, low is a multiple of UNIT.

    `up` has room for num_rows * (high - low) fp32.
    """
    width = high - low
    if width <= 0:
        return
    w = w13 + size * low * hidden
    to = h + 4 * low
    multiply(kind, size, x, ldx, num_rows, w, hidden, width, hidden, to, inner, 1, panel)
    w += size * inner * hidden
    multiply(kind, size, x, ldx, num_rows, w, hidden, width, hidden, up, width, 1, panel)
    for m in range(num_rows):
        gate_at = to + 4 * m * inner
        silu_mul(gate_at, up + 4 * m * width, gate_at, width)
        arrange(kind, gate_at, gate_at, width)


@compiled_parallel
def swiglu(
    kind: Any, size: int, x: int, ldx: int, num_rows: int, norm: int, eps: float, w13: int,
    w2: int, hidden: int, inner: int, y: int, fresh: int, work: int, num_threads: int,
) -> None:  # fmt: skip
    """y [num_rows, hidden] = (fresh ? 0 : y) + (silu(x · gateᵀ) * (x · upᵀ)) · w2ᵀ; w13 [2 inner,
    hidden]. Where `norm` is an address, rms_norm(x) takes x's place.

    `work` has room for num_threads * PANEL_FLOATS + num_rows * (hidden + 2 * inner) fp32.
    """
    rows = work + 4 * num_threads * PANEL_FLOATS
    h = rows + 4 * num_rows * hidden
    ups = h + 4 * num_rows * inner
    if norm != 0:
        rms_norm_rows(x, ldx, num_rows, hidden, norm, eps, rows)
        arrange_rows(kind, rows, hidden, num_rows, hidden, rows)
    else:
        arrange_rows(kind, x, ldx, num_rows, hidden, rows)
    for part in prange(num_threads):
        low, high = share(inner, part, num_threads, UNIT)
        gate_up(
            kind, size, rows, hidden, num_rows, w13, hidden, inner, low, high, h,
            ups + 4 * num_rows * low, work + 4 * PANEL_FLOATS * part,
        )  # fmt: skip
    for part in prange(num_threads):
        low, high = share(hidden, part, num_threads, 4)
        multiply(
            kind, size, h, inner, num_rows, w2 + size * low * inner, inner, high - low, inner,
            y + 4 * low, hidden, fresh, work + 4 * PANEL_FLOATS * part,
        )  # fmt: skip


@compiled
def group_by_expert(ids: Any, num_experts: int) -> tuple[Any, Any]:
    """(starts [num_experts + 1], pairs [T k]): expert e was chosen by pairs[starts[e]:starts[e+1]].

    A pair is token * k + choice; within an expert they ascend. Raises ValueError for an id that
    is no expert's.
    """
    if np.min(ids) < 0 or np.max(ids) >= num_experts:
        raise ValueError("topk_ids names an expert that is not there, expected 0 to E - 1")
    starts = np.zeros(num_experts + 1, np.int64)
    for expert in ids:
        starts[expert + 1] += 1
    starts = np.cumsum(starts)
    fill = starts.copy()
    pairs = np.empty(ids.size, np.int64)
    for pair in range(ids.size):
        pairs[fill[ids[pair]]] = pair
        fill[ids[pair]] += 1
    return starts, pairs


@compiled
def routed_down(
    kind: Any, size: int, h: int, w2: int, hidden: int, inner: int, low: int, high: int,
    starts: Any, pairs: Any, weights: Any, top_k: int, outputs: int, y: int, fresh: int,
    panel: int,
) -> None:  # fmt: skip
    """y[:, low:high] (row stride hidden) = (fresh ? 0 : y) + every token's weighted sum over its
    experts.

    The rows of h, and of `outputs` [T top_k, hidden], are in the order of `pairs`.
    """
    width = high - low
    if width <= 0:
        return
    place = np.empty(pairs.size, np.int64)
    for i in range(pairs.size):
        place[pairs[i]] = i
    for expert in range(starts.size - 1):
        first, count = starts[expert], starts[expert + 1] - starts[expert]
        if count > 0:
            multiply(
                kind, size, h + 4 * first * inner, inner, count,
                w2 + size * (expert * hidden + low) * inner, inner, width, inner,
                outputs + 4 * (first * hidden + low), hidden, 1, panel,
            )  # fmt: skip
    for pair in range(pairs.size):
        source = outputs + 4 * (place[pair] * hidden + low)
        target = y + 4 * (pair // top_k * hidden + low)
        add_scaled(weights[pair], source, target, width, fresh != 0 and pair % top_k == 0)


@compiled_parallel
def moe(
    kind: Any, size: int, x: int, ldx: int, w13: int, w2: int, hidden: int, inner: int,
    num_experts: int, ids: Any, weights: Any, top_k: int, shared13: int, shared2: int,
    shared_inner: int, y: int, fresh: int, work: int, num_threads: int,
) -> None:  # fmt: skip
    """y [T, hidden] = (fresh ? 0 : y) + sum over a token's experts of weight * expert(x), plus the
    shared experts (none where shared_inner is 0).

    ids and weights are flat, [T top_k]; w13 [num_experts, 2 inner, hidden], w2 [.., hidden, inner].
    `work` has room for num_threads * PANEL_FLOATS + T (hidden + 2 shared_inner) + T top_k (hidden +
    (1 + num_threads) inner) fp32.
    """
    starts, pairs = group_by_expert(ids, num_experts)
    num_rows = ids.size // top_k
    arranged = work + 4 * num_threads * PANEL_FLOATS
    shared_h = arranged + 4 * num_rows * hidden
    shared_up = shared_h + 4 * num_rows * shared_inner
    rows = shared_up + 4 * num_rows * shared_inner
    h = rows + 4 * pairs.size * hidden
    ups = h + 4 * pairs.size * inner
    arrange_rows(kind, x, ldx, num_rows, hidden, arranged)
    for i in range(pairs.size):
        source = arranged + 4 * (pairs[i] // top_k) * hidden
        add_scaled(np.float32(1), source, rows + 4 * i * hidden, hidden, True)
    groups = (inner + UNIT - 1) // UNIT
    active = np.flatnonzero(starts[1:] > starts[:-1])
    total = groups * active.size
    for part in prange(num_threads):
        panel = work + 4 * PANEL_FLOATS * part
        # a thread's share is a run of (expert, group of columns), experts outermost
        unit, end = total * part // num_threads, total * (part + 1) // num_threads
        while unit < end:
            expert, group = active[unit // groups], unit % groups
            num_groups = min(end - unit, groups - group)
            first, count = starts[expert], starts[expert + 1] - starts[expert]
            gate_up(
                kind, size, rows + 4 * first * hidden, hidden, count,
                w13 + size * expert * 2 * inner * hidden, hidden, inner, UNIT * group,
                min(inner, UNIT * (group + num_groups)), h + 4 * first * inner,
                ups + 4 * pairs.size * inner * part, panel,
            )  # fmt: skip
            unit += num_groups
        low, high = share(shared_inner, part, num_threads, UNIT)
        gate_up(
            kind, size, arranged, hidden, num_rows, shared13, hidden, shared_inner, low, high,
            shared_h, shared_up + 4 * num_rows * low, panel,
        )  # fmt: skip
    for part in prange(num_threads):
        panel = work + 4 * PANEL_FLOATS * part
        low, high = share(hidden, part, num_threads, 4)
        # the gathered rows are no longer needed: their room takes the experts' outputs
        routed_down(
            kind, size, h, w2, hidden, inner, low, high, starts, pairs, weights, top_k, rows, y,
            fresh, panel,
        )  # fmt: skip
        if shared_inner > 0:
            multiply(
                kind, size, shared_h, shared_inner, num_rows, shared2 + size * low * shared_inner,
                shared_inner, high - low, shared_inner, y + 4 * low, hidden, 0, panel,
            )  # fmt: skip
