"""The indexer's choice: scores into a workspace, then the top-k of it. The specification is
kernels.index_topk."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.fp8_keys import Fp8Keys, IndexKeys
from kernels.gpu import fp8, index_logits
from kernels.gpu.topk import kept_bytes, select

_WORKSPACE_BYTES: Final = 256 << 20  # of float32 scores, and what is kept of them, at a time


def causal(
    q: torch.Tensor,  # [M, H, D]
    weights: torch.Tensor,  # [M, H] float32
    keys: IndexKeys,  # [rows, D]
    pages: torch.Tensor,  # [P] int32
    start: int,
    page_size: int,
    topk: int,
    workspace_bytes: int = _WORKSPACE_BYTES,
) -> torch.Tensor:  # [M, topk] int32
    q, weights = _as_keys(q, weights, keys)
    num_queries = len(q)
    context = start + num_queries
    out = torch.empty((num_queries, topk), dtype=torch.int32, device=q.device)
    counts = torch.arange(start + 1, context + 1, dtype=torch.int32, device=q.device)
    width = triton.cdiv(context, 64) * 64  # rows begin at whole cache lines
    row_bytes = 4 * width + kept_bytes(num_queries, width, topk)
    step = max(1, min(num_queries, workspace_bytes // row_bytes))
    scores = torch.empty((step, width), dtype=torch.float32, device=q.device)
    for a in range(0, num_queries, step):
        b = min(a + step, num_queries)
        part = scores[: b - a]
        index_logits.causal(
            q[a:b], weights[a:b], keys, pages, start + a, page_size, part, least=topk
        )
        select(part[:, : start + b], counts[a:b], topk, out[a:b])
    return out


def paged(
    q: torch.Tensor,  # [N, H, D]
    weights: torch.Tensor,  # [N, H] float32
    keys: IndexKeys,  # [rows, D]
    pages: torch.Tensor,  # [N, P] int32
    counts: torch.Tensor,  # [N]
    page_size: int,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # [N, topk] int32, [N] as counts
    q, weights = _as_keys(q, weights, keys)
    num, width = len(q), pages.shape[1] * page_size
    out = torch.empty((num, topk), dtype=torch.int32, device=q.device)
    scores = torch.empty((num, width), dtype=torch.float32, device=q.device)
    index_logits.paged(
        q, weights, keys, pages, counts, page_size, scores, num_programs(q.device), least=topk
    )
    select(scores, counts, topk, out)
    return out, counts.clamp_max(topk)


def _as_keys(
    q: torch.Tensor, weights: torch.Tensor, keys: IndexKeys
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised where the keys are."""
    return fp8.quantise_queries(q, weights) if isinstance(keys, Fp8Keys) else (q, weights)


@triton.jit
def _rows_of(
    pages,  # [N, P] int32
    positions,  # [N, K] int32 or int64
    out,  # [N, K] int32
    size,  # K
    page_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    position = tl.load(positions + n * size + column, mask=inside, other=0).to(tl.int32)
    position = tl.maximum(position, 0)
    page = tl.load(pages + n * page_stride + position // PAGE, mask=inside, other=0).to(tl.int32)
    tl.store(out + n * size + column, page * PAGE + position % PAGE, mask=inside)


def rows_of(
    pages: torch.Tensor,  # [P] or [N, P] int32
    positions: torch.Tensor,  # [..., K]; [N, K] where pages have two dimensions
    page_size: int,
) -> torch.Tensor:  # int32, shaped like positions
    positions = positions.contiguous()
    out = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
    if out.numel() == 0:
        return out
    num, stride = (len(pages), pages.stride(0)) if pages.dim() == 2 else (1, 0)
    size = positions.numel() // num
    block = min(1024, triton.next_power_of_2(size))
    _rows_of[(num, triton.cdiv(size, block))](
        pages, positions, out, size, stride, PAGE=page_size, BLOCK=block, num_warps=4
    )
    return out


def num_programs(device: torch.device) -> int:
    """Enough for two waves of the programs that fit on a device at once."""
    if device.type != "cuda":
        return 3  # Triton's interpreter: each has several spans to do
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count
