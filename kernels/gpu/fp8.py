"""Index keys and queries in fp8: quantised by integer arithmetic, which every card has, into the
bytes of e4m3. The specification is kernels.fp8_keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fp8_keys import E4M3, LEAST, Fp8Keys

_ELEMENTS = 2048  # of a program
_LEAST = tl.constexpr(LEAST)


@triton.jit
def _quantise(x):  # [ROWS, DIM] float32 -> bytes [ROWS, DIM] int32, scales [ROWS]
    most = tl.maximum(tl.max(tl.abs(x), axis=1), _LEAST).to(tl.int32, bitcast=True)
    exponent = ((most + 0x1FFFFF) & 0x7F800000) - 0x04000000
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    y = x * inverse[:, None]
    bits = y.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # To the nearest, ties to even: of the three digits kept where the number is normal in e4m3,
    # below 2**-6 of a step of 2**-9, which is one of 2**14's.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, small, normal)
    code = tl.where(bits > 0x43E80000, 0x7F, code)  # what is no number, as nothing exceeds 448
    return sign | code, exponent.to(tl.float32, bitcast=True)


@triton.jit
def decode(code):  # uint8 -> float16, exactly; not for what is no number
    wide = code.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0  # the exponents' biases differ by 8


@triton.jit(do_not_specialize=["num"])
def _store_keys(
    codes,  # bytes: row r at (r // PAGE) · page_stride + (r % PAGE) · dim
    scales,  # float32: row r's at (r // PAGE) · scale_stride + r % PAGE
    rows,  # [N]
    tokens,  # [N]; read where HAS_TOKENS
    keys,  # [T, dim]
    num,  # N
    dim,
    page_stride,
    scale_stride,
    key_stride,
    HAS_TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    real = n < num
    token = n.to(tl.int64)
    if HAS_TOKENS:
        token = tl.load(tokens + n, mask=real, other=0).to(tl.int64)
    mask = real[:, None] & (d < dim)[None, :]
    x = tl.load(keys + token[:, None] * key_stride + d[None, :], mask=mask, other=0.0)
    code, scale = _quantise(x.to(tl.float32))
    row = tl.load(rows + n, mask=real, other=0).to(tl.int64)
    page, place = row // PAGE, row % PAGE
    target = codes + (page * page_stride + place * dim)[:, None] + d[None, :]
    tl.store(target, code.to(tl.uint8), mask=mask)
    tl.store(scales + page * scale_stride + place, scale, mask=real)


def store_keys(
    cache: Fp8Keys,
    rows: torch.Tensor,  # [N]
    tokens: torch.Tensor | None,  # [N]
    keys: torch.Tensor,  # [T, dim]
) -> None:
    if len(rows) == 0:
        return
    if keys.stride(1) != 1:
        keys = keys.contiguous()
    codes, scales = cache.codes, cache.scales
    some, wide = _block(cache.dim)
    _store_keys[(triton.cdiv(len(rows), some),)](
        codes, scales, rows, rows if tokens is None else tokens, keys, len(rows), cache.dim,
        codes.stride(0), scales.stride(0), keys.stride(0), HAS_TOKENS=tokens is not None,
        PAGE=cache.page_size, ROWS=some, DIM=wide, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num"])
def _quantise_queries(
    q,  # [N, heads, dim], any strides but the last
    weights,  # [N, heads] float32
    codes,  # [N, heads, dim] bytes
    scaled,  # [N, heads] float32
    num,  # N · heads
    heads,
    dim,
    q_stride,
    q_head_stride,
    w_stride,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, DIM)
    real = n < num
    query, head = n // heads, n % heads
    mask = real[:, None] & (d < dim)[None, :]
    source = q + (query * q_stride + head * q_head_stride)[:, None] + d[None, :]
    code, scale = _quantise(tl.load(source, mask=mask, other=0.0).to(tl.float32))
    tl.store(codes + n[:, None] * dim + d[None, :], code.to(tl.uint8), mask=mask)
    w = tl.load(weights + query * w_stride + head, mask=real, other=0.0)
    tl.store(scaled + n, w * scale, mask=real)


def quantise_queries(
    q: torch.Tensor,  # [N, H, D], the last dimension contiguous
    weights: torch.Tensor,  # [N, H] float32, the last dimension contiguous
) -> tuple[torch.Tensor, torch.Tensor]:  # [N, H, D] e4m3, [N, H] float32
    num, heads, dim = q.shape
    codes = torch.empty(q.shape, dtype=torch.uint8, device=q.device)
    scaled = torch.empty((num, heads), dtype=torch.float32, device=q.device)
    some, wide = _block(dim)
    _quantise_queries[(triton.cdiv(num * heads, some),)](
        q, weights, codes, scaled, num * heads, heads, dim, q.stride(0), q.stride(1),
        weights.stride(0), ROWS=some, DIM=wide, num_warps=4,
    )  # fmt: skip
    return codes.view(E4M3), scaled


def _block(dim: int) -> tuple[int, int]:
    """Rows of a program, and their padded width."""
    wide = triton.next_power_of_2(dim)
    return max(1, _ELEMENTS // wide), wide
