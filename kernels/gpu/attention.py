"""The attention ports on a GPU: which kernel takes a call, and what is prepared for it. The
specification is kernels.attention, which also says the shapes."""

from __future__ import annotations

import torch

from kernels.attention import Partial, values_of
from kernels.gpu import causal, gqa, mla, mla_hopper
from kernels.gpu.card import card_of
from kernels.gpu.shares import MAX_QUERIES

_WIDEST_LATENT = 1023  # what one program's accumulators hold
_NARROWEST_LATENT = 16  # what one product of a tensor core takes
_WIDEST_HEAD = 256
_ALIGNMENT = 16  # bytes, of the copies to shared memory
_EXPANDED_BYTES = 256 << 20  # of keys and values by head that exist at a time
_FEW_QUERIES = 16  # of a prefill, so few that each reads the context for itself


def declines(
    q: torch.Tensor,
    cache: torch.Tensor,
    latent_dim: int | None = None,
    widths: tuple[int, ...] = (),  # of what is made of the cache's rows, by head
) -> str | None:
    """Why a call is not for these kernels, in words; None: it is."""
    if q.dtype != cache.dtype:
        return f"queries are {q.dtype} and the cache {cache.dtype}; they must be equal"
    if latent_dim is not None and not _NARROWEST_LATENT <= latent_dim <= _WIDEST_LATENT:
        return f"latents are {latent_dim} wide; {_NARROWEST_LATENT} to {_WIDEST_LATENT} are taken"
    if latent_dim is None and q.shape[-1] > _WIDEST_HEAD:
        return f"heads are {q.shape[-1]} wide; at most {_WIDEST_HEAD} are taken"
    for width in (*cache.stride()[:-1], *widths):
        if width * cache.itemsize % _ALIGNMENT:
            return f"rows lie {width * cache.itemsize} bytes apart, not a multiple of {_ALIGNMENT}"
    return None


def mla_latents(
    q: torch.Tensor,
    cache: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    page_size: int,  # 0: the index holds rows, else pages
    latent_dim: int,
    scale: float,
) -> torch.Tensor:  # [N, H, latent_dim] in q's dtype
    """Weighted latents of each query over its own rows or pages."""
    card = card_of(q.device)
    if card.capability == 9 and mla_hopper.takes(q, cache, latent_dim):
        num_processors = card.num_processors
        return mla_hopper.mla_latents(q, cache, index, counts, page_size, scale, num_processors)
    return mla.mla_latents(q, cache, index, counts, page_size, latent_dim, scale, card)


def gqa_paged(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    counts: torch.Tensor,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    card = card_of(q.device)
    parts = [
        gqa.gqa_paged(
            q[a : a + MAX_QUERIES], keys, values, pages[a : a + MAX_QUERIES],
            counts[a : a + MAX_QUERIES], page_size, scale, card,
        )
        for a in range(0, len(q), MAX_QUERIES)
    ]  # fmt: skip
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gqa_causal(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    num = len(q)
    if num <= _FEW_QUERIES:
        shared, counts = _each_for_itself(pages, start, num)
        return gqa_paged(q, keys, values, shared, counts, page_size, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    part = causal.Keys(keys, values, pages=pages, page_size=page_size)
    causal.attend_causal(q, part, start + num, start, 1, scale, out)
    return out


def mla_causal(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    page_size: int,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Absorbed, where all heads read the latent rows themselves, or expanded to keys and values by
    head: whichever needs fewer multiplications."""
    num, _, rope = q_pe.shape
    nope, (value, rank) = w_uk.shape[1], w_uv.shape[1:]
    context = start + num
    expanding = context * rank * (nope + value) + num * context * (nope + rope + value)
    scored = rank + rope if nope else rope
    absorbing = num * rank * (nope + value) + num * context * (scored + rank)
    if expanding < absorbing:
        q = torch.cat((q_nope, q_pe), dim=-1)
        return _expanded(q, cache, pages, start, page_size, w_uk, w_uv, scale)
    q = q_pe
    if nope:
        by_head = torch.bmm(q_nope.transpose(0, 1), w_uk.to(q_nope.dtype))  # [H, M, rank]
        q = torch.cat((by_head.transpose(0, 1), q_pe), dim=-1)
    shared, counts = _each_for_itself(pages, start, num)
    latent = mla_latents(q, cache, shared, counts, page_size, rank, scale)
    return values_of(latent, w_uv).to(q_pe.dtype)


def _expanded(
    q: torch.Tensor,  # [M, H, nope + rope]
    cache: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    page_size: int,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    scale: float,
) -> torch.Tensor:  # [M, H, V]
    """Keys and values by head are made of the latents of some pages at a time."""
    num, num_heads, _ = q.shape
    value, rank = w_uv.shape[1:]
    context = start + num
    per_token = num_heads * (w_uk.shape[1] + value) * q.itemsize
    step = max(1, _EXPANDED_BYTES // (per_token * page_size))  # pages
    num_pages = -(-context // page_size)
    parts = range(0, num_pages, step)
    out = torch.empty(num, num_heads, value, dtype=q.dtype, device=q.device)
    lse = None
    if len(parts) > 1:
        out = out.float()
        lse = torch.empty(num, num_heads, dtype=torch.float32, device=q.device)
    by_page = cache.view(-1, page_size, cache.shape[1])
    up_k, up_v = w_uk.to(q.dtype).reshape(-1, rank).t(), w_uv.to(q.dtype).reshape(-1, rank).t()
    for a in parts:
        rows = by_page[pages[a : min(a + step, num_pages)].long()].flatten(0, 1)
        latent, ropes = rows[:, :rank], rows[:, rank:]
        keys = (latent @ up_k).view(len(rows), num_heads, w_uk.shape[1])
        values = (latent @ up_v).view(len(rows), num_heads, value)
        first = start - a * page_size  # of this part's keys, that query 0 sees last
        most = min(len(rows), first + num)
        part = causal.Keys(keys, values, ropes)
        causal.attend_causal(q, part, most, first, 1, scale, out, lse, merges=a > 0)
    return out.to(q.dtype)


def attend_causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    stride: int,
    scale: float,
    earlier: Partial | None,
) -> Partial:
    """As kernels.streamed.attend_causal."""
    num, num_heads, _ = q.shape
    part = earlier
    if part is None:
        out = torch.empty(num, num_heads, v.shape[2], dtype=torch.float32, device=q.device)
        lse = torch.empty(num, num_heads, 1, dtype=torch.float32, device=q.device)
        part = Partial(out, lse)
    keys, dim = causal.Keys(k, v), k.shape[2]
    if dim > 64 and dim & (dim - 1):  # in two parts, which padding makes less wide than one
        cut = 1 << (dim.bit_length() - 1)
        keys = causal.Keys(k[..., :cut], v, k[..., cut:])
    merges = earlier is not None
    causal.attend_causal(q, keys, len(k), first, stride, scale, part.out, part.lse, merges)
    return part


def mla_rows_part(
    q: torch.Tensor,
    cache: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    latent_dim: int,
    scale: float,
) -> Partial:
    """As kernels.streamed.mla_rows_part."""
    num, num_heads, _ = q.shape
    out = torch.empty(num, num_heads, latent_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num, num_heads, 1, dtype=torch.float32, device=q.device)
    card = card_of(q.device)
    if card.capability == 9 and mla_hopper.takes(q, cache, latent_dim):
        mla_hopper.mla_part(q, cache, rows, counts, scale, card.num_processors, out, lse)
    else:
        mla.mla_part(q, cache, rows, counts, latent_dim, scale, card, out, lse)
    return Partial(out, lse)


def _each_for_itself(
    pages: torch.Tensor, start: int, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A prefill's queries as if each were a request: pages [num, P] (not copied), counts [num]."""
    counts = torch.arange(start + 1, start + num + 1, dtype=torch.int32, device=pages.device)
    return pages.expand(num, -1), counts
