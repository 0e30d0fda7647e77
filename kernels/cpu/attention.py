"""Decode attention and index scores where each query reads its own cache rows, without copying
them. The specification is kernels.attention and kernels.index_logits.

A thread takes a share of all (query, head) pairs, balanced by the rows they read; heads of a query
that share keys are computed together, while a row is in the first cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.compiled import compiled, compiled_parallel, prange
from kernels.cpu.gemm import arrange_rows, strip
from kernels.cpu.mix import mix
from kernels.cpu.tile import BF16, FP16, FP32

_KINDS = {torch.bfloat16: (BF16, 2), torch.float16: (FP16, 2), torch.float32: (FP32, 4)}
_THREAD_WORK = 16_384  # multiply-adds below which waking another thread costs more than it saves


@compiled
def dots(
    q: int, dim: int, num_heads: int, keys: int, row_stride: int, rows: Any, scores: int, width: int
) -> None:
    """scores[m, i] (row stride `width`) = q[m] · key of rows[i], four keys at a time where they
    lie one behind the other, as in a page they do."""
    i = 0
    while i < rows.size:
        r = rows[i]
        wide = i + 4 <= rows.size and (
            rows[i + 1] == r + 1 and rows[i + 2] == r + 2 and rows[i + 3] == r + 3
        )
        strip(
            FP32, 4, wide, q, dim, num_heads, keys + 4 * r * row_stride, row_stride, dim,
            scores + 4 * i, width, True,
        )  # fmt: skip
        i += 4 if wide else 1


@compiled
def softmax(scores: Any, scale: float) -> None:
    """scores[i] = softmax of scale · scores, in place; scale > 0."""
    highest = scores.max()
    total = np.float32(0)
    for i in range(scores.size):
        scores[i] = math.exp((scores[i] - highest) * scale)
        total += scores[i]
    for i in range(scores.size):
        scores[i] /= total


@compiled
def attend(
    q: int, dim: int, num_heads: int, keys: int, values: int, row_stride: int, value_dim: int,
    rows: Any, scale: float, scores: Any, out: int,
) -> None:  # fmt: skip
    """out [num_heads, value_dim]: heads that share their keys attend to `rows`, at least one.

    scores: fp32 [num_heads or more, rows.size or more] to work in.
    """
    dots(q, dim, num_heads, keys, row_stride, rows, scores.ctypes.data, scores.shape[1])
    for m in range(num_heads):
        softmax(scores[m, : rows.size], scale)
    i = 0
    while i < rows.size:
        four = i + 4 <= rows.size
        a = values + 4 * rows[i] * row_stride
        b, c, d = a, a, a
        if four:
            b = values + 4 * rows[i + 1] * row_stride
            c = values + 4 * rows[i + 2] * row_stride
            d = values + 4 * rows[i + 3] * row_stride
        m = 0
        while m < num_heads:
            at = scores.ctypes.data + 4 * (m * scores.shape[1] + i)
            target = out + 4 * m * value_dim
            first = i == 0
            if four and m + 2 <= num_heads:
                mix(2, 4, at, scores.shape[1], a, b, c, d, target, value_dim, value_dim, first)
                m += 2
                continue
            if four:
                mix(1, 4, at, scores.shape[1], a, b, c, d, target, value_dim, value_dim, first)
            else:
                mix(1, 1, at, scores.shape[1], a, b, c, d, target, value_dim, value_dim, first)
            m += 1
        i += 4 if four else 1


@compiled_parallel
def attend_all(
    kind: Any, size: int, q: int, dim: int, num_heads: int, group: int, keys: int, key_head: int,
    values: int, value_head: int, row_stride: int, value_dim: int, rows: Any, counts: Any,
    scale: float, w_uv: int, out_dim: int, out: int, scores: Any, partial: int, num_threads: int,
) -> None:  # fmt: skip
    """out [N, num_heads, out_dim] = attention of q [N, num_heads, dim] to rows[n, : counts[n]].

    A query without rows is left as it is. Heads h // group share keys + key_head (h // group) and
    so on. Where out_dim differs from 0, a head's result goes through w_uv [num_heads, out_dim,
    value_dim]; else it is stored as it is, [.., value_dim]. Work: scores [num_threads, group, K],
    partial [num_threads, group, value_dim].
    """
    total = counts.sum() * num_heads
    for part in prange(num_threads):
        low, high = total * part // num_threads, total * (part + 1) // num_threads
        base = 0  # rows read by all pairs before query n
        for n in range(counts.size):
            count = counts[n]
            if count == 0:
                continue
            # the heads whose first row falls into this thread's share
            h = min(num_heads, max(0, (low - base + count - 1) // count))
            end = min(num_heads, max(0, (high - base + count - 1) // count))
            base += count * num_heads
            while h < end:
                shared = h // group
                together = min(end, (shared + 1) * group) - h
                head = n * num_heads + h
                target = partial + 4 * part * group * value_dim
                if out_dim == 0:
                    target = out + 4 * head * value_dim
                attend(
                    q + 4 * head * dim, dim, together, keys + 4 * shared * key_head,
                    values + 4 * shared * value_head, row_stride, value_dim, rows[n, :count],
                    scale, scores[part], target,
                )  # fmt: skip
                for m in range(together if out_dim > 0 else 0):
                    arrange_rows(
                        kind, target + 4 * m * value_dim, value_dim, 1, value_dim,
                        target + 4 * m * value_dim,
                    )  # fmt: skip
                    v = 0
                    while v < out_dim:
                        wide = v + 4 <= out_dim
                        strip(
                            kind, size, wide, target + 4 * m * value_dim, value_dim, 1,
                            w_uv + size * ((h + m) * out_dim + v) * value_dim, value_dim,
                            value_dim, out + 4 * ((head + m) * out_dim + v), out_dim, True,
                        )  # fmt: skip
                        v += 4 if wide else 1
                h += together


@compiled_parallel
def index_all(
    q: int, dim: int, num_heads: int, weights: Any, keys: int, rows: Any, counts: Any, out: Any,
    scores: Any, num_threads: int,
) -> None:  # fmt: skip
    """out[n, i] = Σ_h weights[n, h] relu(q[n, h] · keys[rows[n, i]]), -inf from counts[n] on.

    Work: scores [num_threads, num_heads, 64]: keys are taken in blocks of 64.
    """
    blocks = (rows.shape[1] + 63) // 64
    total = blocks * counts.size
    for part in prange(num_threads):
        block = scores[part]
        for unit in range(total * part // num_threads, total * (part + 1) // num_threads):
            n, first = unit // blocks, unit % blocks * 64
            last = min(first + 64, rows.shape[1])
            end = min(last, max(first, counts[n]))
            at = q + 4 * n * num_heads * dim
            dots(at, dim, num_heads, keys, dim, rows[n, first:end], block.ctypes.data, 64)
            for i in range(first, last):
                out[n, i] = 0.0 if i < end else -np.inf
            for h in range(num_heads):
                for i in range(first, end):
                    out[n, i] += weights[n, h] * max(block[h, i - first], np.float32(0))


def mla(
    q: Tensor, cache: Tensor, rows: Tensor, counts: Tensor, w_uv: Tensor, scale: float
) -> Tensor:
    """As kernels.attention.mla_rows, for an fp32 cache."""
    num, num_heads, dim = q.shape
    out_dim, value_dim = w_uv.shape[1:]
    out = torch.zeros(num, num_heads, out_dim)
    key_offset = cache.shape[1] - dim
    kind, size = _KINDS[w_uv.dtype]
    num_threads = _num_threads(rows.numel() * num_heads * (dim + value_dim))
    partial = torch.empty(num_threads * num_heads * value_dim)
    q, w_uv = q.contiguous(), w_uv.contiguous()
    attend_all(
        kind, size, q.data_ptr(), dim, num_heads, num_heads, cache.data_ptr() + 4 * key_offset, 0,
        cache.data_ptr(), 0, cache.stride(0), value_dim, rows.numpy(), counts.numpy(),
        np.float32(scale), w_uv.data_ptr(), out_dim, out.data_ptr(),
        np.empty((num_threads, num_heads, rows.shape[1]), np.float32), partial.data_ptr(),
        num_threads,
    )  # fmt: skip
    return out


def gqa(
    q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, counts: Tensor, scale: float
) -> Tensor:
    """As kernels.attention.gqa_rows, for an fp32 cache."""
    num, num_heads, dim = q.shape
    group = num_heads // keys.shape[1]
    out = torch.zeros(num, num_heads, dim)
    num_threads = _num_threads(rows.numel() * num_heads * 2 * dim)
    q = q.contiguous()
    attend_all(
        FP32, 4, q.data_ptr(), dim, num_heads, group, keys.data_ptr(), dim, values.data_ptr(), dim,
        keys.stride(0), dim, rows.numpy(), counts.numpy(), np.float32(scale), 0, 0, out.data_ptr(),
        np.empty((num_threads, group, rows.shape[1]), np.float32), 0, num_threads,
    )  # fmt: skip
    return out


def index_logits(q: Tensor, weights: Tensor, keys: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """As kernels.index_logits.index_logits_rows, for an fp32 cache."""
    _, num_heads, dim = q.shape
    out = torch.empty(rows.shape)
    num_threads = _num_threads(rows.numel() * num_heads * dim)
    q = q.contiguous()
    index_all(
        q.data_ptr(), dim, num_heads, weights.contiguous().numpy(), keys.data_ptr(), rows.numpy(),
        counts.numpy(), out.numpy(), np.empty((num_threads, num_heads, 64), np.float32),
        num_threads,
    )  # fmt: skip
    return out


def warm_up(dtypes: tuple[torch.dtype, ...]) -> None:
    """Compile (or load from the cache) these kernels, for w_uv of these dtypes."""
    q, cache = torch.ones(1, 1, 8), torch.ones(4, 16)
    rows, counts = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for dtype in dtypes:
        mla(q, cache, rows, counts, torch.ones(1, 8, 8, dtype=dtype), 1.0)
    index_logits(q, torch.ones(1, 1), cache[:, :8].contiguous(), rows, counts)


def _num_threads(work: int) -> int:
    return min(torch.get_num_threads(), 1 + work // _THREAD_WORK)
