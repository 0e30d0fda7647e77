"""Speed of the attention kernels on a GPU: a table, and JSON with --json PATH.

    python -m benchmarks.gpu_attention --json benchmarks/results/gpu_attention_h200.json

Every case is checked against softmax in float64 first, on sampled queries with fresh random inputs;
a wrong kernel gets no figures. Then it is timed: many calls in one CUDA graph, over sets of inputs
that leave the L2 cache, the median of several replays. FlashMLA's figures were measured on the same
card model (one H200) before, with the same shapes; they are constants here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.gpu import attention

PAGE = 64
LATENT, WIDTH = 512, 576
TOLERANCE = 5e-3  # relative error, bfloat16
L2_BYTES = 256 << 20  # of inputs that are rotated through
FLASH_MLA_PREFILL = {  # TFLOP/s by heads and kv length
    128: {8: 629, 32: 559, 128: 519},
    64: {8: 555, 32: 536, 128: 463},
}
FLASH_MLA_PADDED_US = {8: 2105, 32: 2522}  # 16 heads, which it pads to 64
FLASH_MLA_DECODE_US = {  # its bf16 kernel, by heads and batch
    128: {1: 61, 16: 63, 64: 72, 128: 142},
    64: {1: 61, 16: 65, 64: 71, 128: 87},
}
FLASH_MLA_DENSE_US = {  # batch 128, by heads and kv length
    128: {8: 497, 32: 1813, 128: 8013},
    16: {8: 290, 32: 1112, 128: 4473},
}
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    """One set of inputs: the call, its inputs' bytes, and what sampled queries must give."""

    call: Call
    num_bytes: int
    expected: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]  # of call's last result


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    make: Callable[[], Work]
    flops: float
    read_bytes: float | None = None  # from memory, at least; None: not what bounds it
    peer_us: float | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--commit", default=None, help="where this is no git checkout")
    options = parser.parse_args()
    chosen = [case for case in cases() if options.only in case.name]
    wrong = [case.name for case in chosen if not is_right(case)]
    if wrong:
        print(f"wrong results, so no figures: {wrong}")
        return 1
    print(f"{'case':<44}{'us':>10}{'TFLOP/s':>9}{'TB/s':>7}{'FlashMLA us':>13}{'ratio':>7}")
    table = [measure(case) for case in chosen]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(machine(options.commit) | {"table": table}, indent=1))
    return 0


def cases() -> Iterator[Case]:
    for heads in (128, 64, 16):
        for kv in (8, 32, 128):
            flops = 4096 * heads * 2048 * 2 * (WIDTH + LATENT)
            peer = None
            if heads in FLASH_MLA_PREFILL:
                peer = flops / FLASH_MLA_PREFILL[heads][kv] / 1e6
            elif kv in FLASH_MLA_PADDED_US:
                peer = FLASH_MLA_PADDED_US[kv]
            make = sparse(4096, heads, kv << 10)
            yield Case(f"sparse MLA prefill, {heads} heads, kv {kv}k", make, flops, None, peer)
    for heads in (128, 64, 16):
        for num in (1, 16, 64, 128):
            flops = num * heads * 2048 * 2 * (WIDTH + LATENT)
            peer = FLASH_MLA_DECODE_US.get(heads, {}).get(num)
            make, read = sparse(num, heads, 128 << 10), num * 2048 * WIDTH * 2
            yield Case(f"sparse MLA decode, {heads} heads, batch {num}", make, flops, read, peer)
    for heads in (128, 16):
        for kv in (8, 32, 128):
            pairs = 128 * (kv << 10)
            flops, read = pairs * heads * 2 * (WIDTH + LATENT), pairs * WIDTH * 2
            peer = FLASH_MLA_DENSE_US[heads][kv]
            make = dense_mla([kv << 10] * 128, heads)
            yield Case(f"MLA decode, {heads} heads, 128 x {kv}k", make, flops, read, peer)
    uneven = [1024 * (1 + i % 32) for i in range(64)]
    for name, contexts, dim in (
        ("32 x 8k", [8192] * 32, 64),
        ("128 x 1k", [1024] * 128, 64),
        ("64 x 1k..32k", uneven, 64),
        ("32 x 8k", [8192] * 32, 128),
        ("64 x 1k..32k", uneven, 128),
    ):
        pairs = sum(contexts)
        flops, read = pairs * 32 * 4 * dim, pairs * 8 * 4 * dim
        make = gqa_decode(contexts, 32, 8, dim)
        yield Case(f"GQA decode, 32/8 heads of {dim}, {name}", make, flops, read)
    for dim in (64, 128):
        for start in (0, 24576):
            flops = 32 * 8192 * (start + 4096) * 4 * dim
            name = f"GQA prefill, 32/8 heads of {dim}, 8k after {start >> 10}k"
            yield Case(name, gqa_prefill(8192, start, 32, 8, dim), flops)
    flops = 128 * 4096 * (4096 + 2048) * 2 * (192 + 128) + 8192 * 128 * 512 * 2 * 256
    yield Case("MLA prefill, 128 heads, 4k after 4k", mla_prefill(4096, 4096, 128), flops)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def sampled(num: int) -> list[int]:
    return sorted({0, num // 3, num - 1})


def latents(q: torch.Tensor, own: torch.Tensor, scale: float) -> torch.Tensor:
    """q [H, WIDTH] over cache rows [L, WIDTH] -> [H, LATENT] float64"""
    return (q.double() @ own.double().t() * scale).softmax(-1) @ own[:, :LATENT].double()


def rows_of(pages: torch.Tensor, count: int) -> torch.Tensor:
    inside = torch.arange(PAGE, device=pages.device)
    return (pages.long().unsqueeze(-1) * PAGE + inside).flatten()[:count]


class Kept:
    """A call that keeps its last result for the check, in memory that the one before had."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.out = torch.empty(0)

    def __call__(self) -> torch.Tensor:
        self.out = torch.empty(0)
        self.out = self._call()
        return self.out


def sparse(num: int, heads: int, kv: int) -> Callable[[], Work]:
    def make() -> Work:
        q, cache = draw(num, heads, WIDTH), draw(kv, WIDTH)
        rows = torch.randint(0, kv, (num, 2048), device="cuda", dtype=torch.int32)
        counts = torch.full((num,), 2048, device="cuda", dtype=torch.int32)
        call = Kept(lambda: attention.mla_latents(q, cache, rows, counts, 0, LATENT, WIDTH**-0.5))

        def expected() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for n in sampled(num):
                yield call.out[n], latents(q[n], cache[rows[n].long()], WIDTH**-0.5)

        return Work(call, q.nbytes + min(cache.nbytes, rows.numel() * WIDTH * 2), expected)

    return make


def page_tables(contexts: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tables of distinct pages in random order, contexts, and how many rows that takes."""
    needed = [-(-c // PAGE) for c in contexts]
    order = torch.randperm(sum(needed), device="cuda").int()
    pages = torch.zeros(len(contexts), max(needed), device="cuda", dtype=torch.int32)
    for own, part in zip(pages, order.split(needed), strict=True):
        own[: len(part)] = part
    counts = torch.tensor(contexts, device="cuda", dtype=torch.int32)
    return pages, counts, sum(needed) * PAGE


def dense_mla(contexts: list[int], heads: int) -> Callable[[], Work]:
    def make() -> Work:
        pages, counts, num_rows = page_tables(contexts)
        q, cache = draw(len(contexts), heads, WIDTH), draw(num_rows, WIDTH)
        call = Kept(
            lambda: attention.mla_latents(q, cache, pages, counts, PAGE, LATENT, WIDTH**-0.5)
        )

        def expected() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for n in sampled(len(contexts)):
                own = cache[rows_of(pages[n], contexts[n])]
                yield call.out[n], latents(q[n], own, WIDTH**-0.5)

        return Work(call, cache.nbytes, expected)

    return make


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [Hq, D] over k, v [L, Hkv, D] -> [Hq, D] float64"""
    own = q.double().view(k.shape[1], -1, q.shape[1])
    scores = own @ k.double().permute(1, 2, 0) * q.shape[1] ** -0.5
    return (scores.softmax(-1) @ v.double().transpose(0, 1)).flatten(0, 1)


def gqa_decode(contexts: list[int], heads: int, kv_heads: int, dim: int) -> Callable[[], Work]:
    def make() -> Work:
        pages, counts, num_rows = page_tables(contexts)
        q, k, v = draw(len(contexts), heads, dim), *(draw(num_rows, kv_heads, dim) for _ in "kv")
        call = Kept(lambda: attention.gqa_paged(q, k, v, pages, counts, PAGE, dim**-0.5))

        def expected() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for n in sampled(len(contexts)):
                own = rows_of(pages[n], contexts[n])
                yield call.out[n], grouped(q[n], k[own], v[own])

        return Work(call, k.nbytes + v.nbytes, expected)

    return make


def gqa_prefill(num: int, start: int, heads: int, kv_heads: int, dim: int) -> Callable[[], Work]:
    def make() -> Work:
        pages, _, num_rows = page_tables([start + num])
        q, k, v = draw(num, heads, dim), *(draw(num_rows, kv_heads, dim) for _ in "kv")
        call = Kept(lambda: attention.gqa_causal(q, k, v, pages[0], start, PAGE, dim**-0.5))

        def expected() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for n in sampled(num):
                own = rows_of(pages[0], start + n + 1)
                yield call.out[n], grouped(q[n], k[own], v[own])

        return Work(call, q.nbytes + k.nbytes + v.nbytes, expected)

    return make


def mla_prefill(num: int, start: int, heads: int) -> Callable[[], Work]:
    def make() -> Work:
        pages, _, num_rows = page_tables([start + num])
        cache, q_nope, q_pe = draw(num_rows, WIDTH), draw(num, heads, 128), draw(num, heads, 64)
        w_uk, w_uv = (draw(heads, 128, LATENT) * LATENT**-0.5 for _ in "kv")
        scale = 192**-0.5
        call = Kept(
            lambda: attention.mla_causal(
                q_nope, q_pe, cache, pages[0], start, PAGE, w_uk, w_uv, scale
            )
        )

        def expected() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for n in sampled(num):
                own = cache[rows_of(pages[0], start + n + 1)].double()
                q_latent = torch.einsum("hd,hdl->hl", q_nope[n].double(), w_uk.double())
                q = torch.cat((q_latent, q_pe[n].double()), dim=-1)
                mixed = latents(q, own, scale)
                yield call.out[n], torch.einsum("hl,hvl->hv", mixed, w_uv.double())

        return Work(call, q_nope.nbytes + q_pe.nbytes + cache.nbytes, expected)

    return make


def is_right(case: Case) -> bool:
    work = case.make()
    work.call().fill_(torch.nan)
    work.call()
    errors = [float((got.double() - want).norm() / want.norm()) for got, want in work.expected()]
    right = all(error < TOLERANCE for error in errors)
    if not right:
        print(f"{case.name}: relative errors {errors}")
    return right


def measure(case: Case) -> dict[str, Any]:
    works = [case.make()]
    while sum(work.num_bytes for work in works) < L2_BYTES and len(works) < 16:
        works.append(case.make())
    us = time_us([work.call for work in works])
    row: dict[str, Any] = {"case": case.name, "us": round(us, 1)}
    row["tflop_per_s"] = round(case.flops / us / 1e6, 1)
    memory = peer = ratio = ""
    if case.read_bytes is not None:
        row["tb_per_s"] = round(case.read_bytes / us / 1e6, 2)
        memory = f"{row['tb_per_s']:.2f}"
    if case.peer_us is not None:
        row["flash_mla_us"], row["ratio"] = round(case.peer_us, 1), round(case.peer_us / us, 2)
        peer, ratio = f"{case.peer_us:.0f}", f"{row['ratio']:.2f}"
    figures = f"{us:>10.1f}{row['tflop_per_s']:>9.1f}{memory:>7}{peer:>13}{ratio:>7}"
    print(f"{case.name:<44}{figures}", flush=True)
    return row


def time_us(calls: list[Call], rounds: int = 5) -> float:
    """Microseconds of one call."""
    for call in calls:
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    calls[0]()
    end.record()
    torch.cuda.synchronize()
    num_calls = max(len(calls), min(64, int(20 / max(begin.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            calls[i % len(calls)]()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / num_calls)
    return statistics.median(times)


def machine(commit: str | None) -> dict[str, Any]:
    if commit is None:
        asked = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit,
        "ceilings": {"bf16 TFLOP/s, 8192^3 matmul": 753, "TB/s, read": 4.46},
    }


if __name__ == "__main__":
    sys.exit(main())
