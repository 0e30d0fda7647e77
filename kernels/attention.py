"""Softmax attention in plain torch: the specification of the faster kernels, and the back end where
there is none. Knows neither pages nor requests: keys come as tensors or as cache rows."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch

from kernels.dispatch import cpu_kernels, fall_back, gpu_kernels

_LOWEST = torch.finfo(torch.float32).min
_TINY = torch.finfo(torch.float32).tiny
_SLICE_QUERIES = 128


class Partial(NamedTuple):
    """Attention over a part of the keys. Parts merge by log-sum-exp; a query that no key of the
    part is allowed for has out 0 and lse -inf, never NaN."""

    out: torch.Tensor  # [G, M, V] float32
    lse: torch.Tensor  # [G, M, 1] float32, natural log


def attend(
    q: torch.Tensor,  # [G, M, D]; M = num_queries · heads, query-major
    k: torch.Tensor,  # [G, L, D]
    v: torch.Tensor,  # [G, L, V]
    allowed: torch.Tensor | None,  # bool [num_queries, W] or [G, num_queries, W]; None: every key
    scale: float,
) -> Partial:
    """Attention of M query rows in each of G groups, float32 inside whatever the dtypes.

    `allowed` speaks of the last W keys; the L - W before them are allowed for every query.
    """
    scores = torch.bmm(q.float(), k.float().transpose(1, 2)).mul_(scale)  # [G, M, L]
    if allowed is not None:
        num_queries, width = allowed.shape[-2:]
        tail = scores.view(q.shape[0], num_queries, -1, k.shape[1])[..., k.shape[1] - width :]
        tail.masked_fill_(~allowed.unsqueeze(-2), -torch.inf)
    # A finite stand-in for the maximum of nothing: exp(-inf - lowest) is 0, not NaN.
    highest = scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights, v.float()).div_(total.clamp_min(_TINY))
    return Partial(out, highest + total.log())


def merge(a: Partial | None, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys."""
    if a is None:
        return b
    lse = torch.logaddexp(a.lse, b.lse)
    base = lse.clamp_min(_LOWEST)
    return Partial(a.out * (a.lse - base).exp() + b.out * (b.lse - base).exp(), lse)


def causal(
    num_queries: int, width: int, first: int, stride: int, device: torch.device
) -> torch.Tensor:
    """bool [num_queries, width]: query i may see the keys 0 .. first + i · stride."""
    last = torch.arange(first, first + num_queries * stride, stride, device=device)
    return torch.arange(width, device=device) <= last.unsqueeze(1)


def mla_rows(
    q: torch.Tensor,  # [N, H, R]: rope part only (R = rope), or latent | rope (R = D)
    cache: torch.Tensor,  # [rows, D]: latent, then rope key
    rows: torch.Tensor,  # [N, K] int32 or int64; beyond the counts any valid index, or -1
    counts: torch.Tensor,  # [N] int32 or int64, 0 .. K: query n reads rows[n, : counts[n]]
    w_uv: torch.Tensor,  # [H, V, kv_lora_rank]
    scale: float,
) -> torch.Tensor:  # [N, H, V] in q's dtype
    """Latent attention where each query reads its own rows; from latents to values at the end.
    A query without rows gets 0."""
    if (cpu := _compiled(q, cache)) is not None:
        out: torch.Tensor = cpu.mla(q, cache, rows.long(), counts.long(), w_uv, scale)
        return out
    if (gpu := _triton("mla_rows", q, cache, w_uv.shape[2])) is not None:
        latent = gpu.mla_latents(q, cache, rows, counts, 0, w_uv.shape[2], scale)
        return values_of(latent, w_uv).to(q.dtype)
    within = _within(rows, counts)
    own = cache[rows].masked_fill_(~within.transpose(1, 2), 0)  # [N, K, D]
    keys, latent = own[..., own.shape[-1] - q.shape[-1] :], own[..., : w_uv.shape[2]]
    mixed = attend(q, keys, latent, within, scale).out
    return values_of(mixed, w_uv).to(q.dtype)


def mla_paged(
    q: torch.Tensor,  # [N, H, R], as for mla_rows
    cache: torch.Tensor,  # [rows, D]: latent, then rope key
    pages: torch.Tensor,  # [N, P] int32 or int64 row pages by position, any valid one behind them
    counts: torch.Tensor,  # [N] int32 or int64, 0 .. P · page_size: the contexts
    page_size: int,
    w_uv: torch.Tensor,  # [H, V, kv_lora_rank]
    scale: float,
) -> torch.Tensor:  # [N, H, V] in q's dtype
    """Latent attention where each query reads the whole of its own paged context."""
    if (gpu := _triton("mla_paged", q, cache, w_uv.shape[2])) is not None:
        latent = gpu.mla_latents(q, cache, pages, counts, page_size, w_uv.shape[2], scale)
        return values_of(latent, w_uv).to(q.dtype)
    return mla_rows(q, cache, _rows_of(pages, page_size), counts, w_uv, scale)


def mla_causal(
    q_nope: torch.Tensor,  # [M, H, nope], may be 0 wide
    q_pe: torch.Tensor,  # [M, H, rope]
    cache: torch.Tensor,  # [rows, kv_lora_rank + rope]
    pages: torch.Tensor,  # [P] int32 or int64 row pages by position, P · page_size >= start + M
    start: int,  # position of the first query
    page_size: int,
    w_uk: torch.Tensor,  # [H, nope, kv_lora_rank]
    w_uv: torch.Tensor,  # [H, V, kv_lora_rank]
    scale: float,
) -> torch.Tensor:  # [M, H, V] in q_pe's dtype
    """Latent attention of one request's queries at start, start + 1, ...: each sees the whole
    context up to itself."""
    widths = (w_uk.shape[1], w_uv.shape[1])
    if (gpu := _triton("mla_causal", q_pe, cache, w_uv.shape[2], widths)) is not None:
        found: torch.Tensor = gpu.mla_causal(
            q_nope, q_pe, cache, pages, start, page_size, w_uk, w_uv, scale
        )
        return found
    num, num_heads, _ = q_pe.shape
    own = cache[_rows_of(pages, page_size)[: start + num]].float()
    latent = own[:, : w_uv.shape[2]]
    q_latent = torch.einsum("mhd,hdl->mhl", q_nope.float(), w_uk.float())
    q = torch.cat((q_latent, q_pe.float()), dim=-1).flatten(0, 1)
    out = _attend_causal(q[None], num_heads, own[None], latent[None], start, scale)[0]
    return values_of(out.view(num, num_heads, -1), w_uv).to(q_pe.dtype)


def gqa_rows(
    q: torch.Tensor,  # [N, num_heads, D]
    keys: torch.Tensor,  # [rows, num_kv_heads, D]
    values: torch.Tensor,  # [rows, num_kv_heads, D]
    rows: torch.Tensor,  # [N, K]; rows and counts as for mla_rows
    counts: torch.Tensor,  # [N]
    scale: float,
) -> torch.Tensor:  # [N, num_heads, D] in q's dtype
    """Grouped-query attention where each query reads its own rows."""
    if (cpu := _compiled(q, keys)) is not None:
        out: torch.Tensor = cpu.gqa(q, keys, values, rows.long(), counts.long(), scale)
        return out
    num, num_heads, dim = q.shape
    num_kv = keys.shape[1]
    within = _within(rows, counts)  # [N, 1, K]
    absent = ~within.transpose(1, 2).unsqueeze(-1)
    k = keys[rows].masked_fill_(absent, 0).transpose(1, 2).flatten(0, 1)  # [N · num_kv_heads, K, D]
    v = values[rows].masked_fill_(absent, 0).transpose(1, 2).flatten(0, 1)
    allowed = within.repeat_interleave(num_kv, 0)
    grouped = q.reshape(num * num_kv, num_heads // num_kv, dim)
    return attend(grouped, k, v, allowed, scale).out.view(num, num_heads, dim).to(q.dtype)


def gqa_paged(
    q: torch.Tensor,  # [N, num_heads, D]
    keys: torch.Tensor,  # [rows, num_kv_heads, D]
    values: torch.Tensor,  # [rows, num_kv_heads, D]
    pages: torch.Tensor,  # [N, P]; pages and counts as for mla_paged
    counts: torch.Tensor,  # [N]
    page_size: int,
    scale: float,
) -> torch.Tensor:  # [N, num_heads, D] in q's dtype
    """Grouped-query attention where each query reads the whole of its own paged context."""
    if (gpu := _triton("gqa_paged", q, keys)) is not None:
        out: torch.Tensor = gpu.gqa_paged(q, keys, values, pages, counts, page_size, scale)
        return out
    return gqa_rows(q, keys, values, _rows_of(pages, page_size), counts, scale)


def gqa_causal(
    q: torch.Tensor,  # [M, num_heads, D]
    keys: torch.Tensor,  # [rows, num_kv_heads, D]
    values: torch.Tensor,  # [rows, num_kv_heads, D]
    pages: torch.Tensor,  # [P]; pages and start as for mla_causal
    start: int,
    page_size: int,
    scale: float,
) -> torch.Tensor:  # [M, num_heads, D] in q's dtype
    """Grouped-query attention of one request's queries at start, start + 1, ...: each sees the
    whole context up to itself."""
    if (gpu := _triton("gqa_causal", q, keys)) is not None:
        found: torch.Tensor = gpu.gqa_causal(q, keys, values, pages, start, page_size, scale)
        return found
    num, num_heads, dim = q.shape
    num_kv = keys.shape[1]
    rows = _rows_of(pages, page_size)[: start + num]
    k, v = keys[rows].transpose(0, 1), values[rows].transpose(0, 1)  # [num_kv_heads, L, D]
    group = num_heads // num_kv
    grouped = q.reshape(num, num_kv, group, dim).transpose(0, 1).flatten(1, 2)
    out = _attend_causal(grouped, group, k, v, start, scale)  # [num_kv_heads, M · group, D]
    out = out.view(num_kv, num, group, dim).transpose(0, 1)
    return out.reshape(num, num_heads, dim).to(q.dtype)


def values_of(latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Weighted latents [T, H, kv_lora_rank] through w_uv [H, V, kv_lora_rank] -> [T, H, V]."""
    wide = torch.promote_types(latent.dtype, w_uv.dtype)
    by_head = latent.transpose(0, 1).to(wide)
    return torch.bmm(by_head, w_uv.to(wide).transpose(1, 2)).transpose(0, 1)


def _attend_causal(
    q: torch.Tensor,  # [G, M · heads, D], query-major
    heads: int,
    k: torch.Tensor,  # [G, start + M, D]
    v: torch.Tensor,  # [G, start + M, V]
    start: int,
    scale: float,
) -> torch.Tensor:  # [G, M · heads, V] float32
    """Queries in slices, so that neither scores above the diagonal nor all at once are computed."""
    parts = []
    for a in range(0, k.shape[1] - start, _SLICE_QUERIES):
        b = min(a + _SLICE_QUERIES, k.shape[1] - start)
        tail = causal(b - a, b - a, 0, 1, q.device)
        own, seen = q[:, a * heads : b * heads], start + b
        parts.append(attend(own, k[:, :seen], v[:, :seen], tail, scale).out)
    return torch.cat(parts, dim=1)


def _rows_of(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Row pages [.., P] -> rows by position [.., P · page_size] int64."""
    inside = torch.arange(page_size, device=pages.device)
    return (pages.long().unsqueeze(-1) * page_size + inside).flatten(-2)


def _within(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """bool [N, 1, K]"""
    columns = torch.arange(rows.shape[1], device=rows.device)
    return (columns < counts.unsqueeze(1)).unsqueeze(1)


def _compiled(q: torch.Tensor, cache: torch.Tensor) -> ModuleType | None:
    """kernels.cpu.attention where it can take the call."""
    if cpu_kernels(q, cache) is None or not q.dtype == cache.dtype == torch.float32:
        return None
    from kernels.cpu import attention

    return attention


def _triton(
    port: str,
    q: torch.Tensor,
    cache: torch.Tensor,
    latent_dim: int | None = None,
    widths: tuple[int, ...] = (),
) -> ModuleType | None:
    """kernels.gpu.attention where it can take the call."""
    if not gpu_kernels(q, cache):
        return None
    from kernels.gpu import attention

    if (why := attention.declines(q, cache, latent_dim, widths)) is not None:
        fall_back(port, why)
        return None
    return attention
