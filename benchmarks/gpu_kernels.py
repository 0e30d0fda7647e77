"""The index, top-k, expert and small kernels on one CUDA device: right first, then how fast.

    python -m benchmarks.gpu_kernels --output benchmarks/results/gpu_kernels.json
    python -m benchmarks.gpu_kernels --tiles scores

Shapes are DeepSeek-V3.2's. Every figure is the median of replays of a CUDA graph of many calls. The
figures that ours are compared with were measured on a card of the same model earlier: DeepGEMM (in
fp8; ours are in bf16, whose keys are twice as wide, and in fp8) and vLLM 0.26.0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import product, starmap
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from triton.runtime.errors import OutOfResources

from kernels.fp8_keys import E4M3, Fp8Keys, IndexKeys
from kernels.gpu import (
    fp8,
    index_logits,
    index_tiles,
    index_topk,
    moe,
    norm,
    rope,
    route,
    sampling,
    store,
    swiglu,
)
from kernels.gpu.card import card_of
from kernels.gpu.topk import Tile, select, tile_for
from kernels.index_logits import index_logits as scores_of
from kernels.moe import moe_reference
from kernels.sampling import Draw, mix

HEADS, DIM, PAGE, TOPK = 64, 128, 64, 2048
EXPERTS, HIDDEN, INNER, CHOICES = 64, 7168, 2048, 8
L2_BYTES = 60 << 20
# µs, by what is measured
DEEPGEMM = {8192: 387, 32768: 1817, 131072: 8613}
DEEPGEMM_PAGED = {1: 4.7, 16: 21.7, 64: 73, 128: 143}
VLLM_TOPK = {
    (4096, 8192): 104, (4096, 32768): 330, (4096, 131072): 1259,
    (16, 8192): 4.9, (16, 32768): 11.2, (16, 131072): 17.2,
    (128, 8192): 5.4, (128, 32768): 15.6, (128, 131072): 62,
}  # fmt: skip

Cut = TypeVar("Cut")  # a way to cut a kernel's work


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    shape: str
    microseconds: float
    tflops: float | None = None
    tb_per_s: float | None = None
    of_ceiling: float | None = None
    peer: str = ""
    peer_microseconds: float | None = None

    def __str__(self) -> str:
        text = f"{self.what:<16}{self.shape:<22}{self.microseconds:>10.1f} µs"
        text += f"{self.tflops:>8.0f} TFLOP/s" if self.tflops else " " * 16
        text += f"{self.tb_per_s:>6.2f} TB/s" if self.tb_per_s else " " * 11
        text += f"{100 * self.of_ceiling:>5.0f} % of ceiling" if self.of_ceiling else " " * 18
        if self.peer_microseconds:
            ratio = self.peer_microseconds / self.microseconds
            text += f"   {self.peer} {self.peer_microseconds} µs: {ratio:.2f} x"
        return text


def timed(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """µs a call, of calls that together outgrow the cache."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1000 / len(calls))
    return median(taken)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@dataclass(frozen=True, slots=True)
class Index:
    q: torch.Tensor  # [N, HEADS, DIM]
    weights: torch.Tensor  # [N, HEADS]
    keys: IndexKeys  # [rows, DIM]
    pages: torch.Tensor  # [contexts, P]

    @classmethod
    def draw(cls, queries: int, contexts: int, length: int, is_fp8: bool = False) -> Index:
        num_pages = length // PAGE
        pages = 1 + torch.randperm(contexts * num_pages, device="cuda").int()
        keys: IndexKeys = draw((contexts * num_pages + 1) * PAGE, DIM)
        if is_fp8:
            keys = in_fp8(keys)
        q = draw(queries, HEADS, DIM) * DIM**-0.5
        weights = draw(queries, HEADS, dtype=torch.float32)
        return cls(q, weights, keys, pages.view(contexts, num_pages))

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and weights as the scores' kernels take them beside such keys."""
        if isinstance(self.keys, Fp8Keys):
            return fp8.quantise_queries(self.q, self.weights)
        return self.q, self.weights

    def rows(self, context: int) -> torch.Tensor:
        inside = torch.arange(PAGE, device="cuda")
        return (self.pages[context].long()[:, None] * PAGE + inside).flatten()


def in_fp8(keys: torch.Tensor) -> Fp8Keys:
    pages = keys.new_empty((len(keys) // PAGE, PAGE * (DIM + 4)), dtype=torch.uint8)
    held = Fp8Keys(pages, PAGE)
    fp8.store_keys(held, torch.arange(len(keys), device=keys.device), None, keys)
    return held


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def gate() -> None:
    """Ends the program where a kernel is wrong."""
    wrong = []
    start = 16384 - 24
    seen = torch.arange(16384, device="cuda") <= torch.arange(start, 16384, device="cuda")[:, None]
    # Tensor cores add products of e4m3 with 13 binary digits after the point.
    for is_fp8, limit in ((False, 1e-5), (True, 1e-3)):
        index = Index.draw(24, 1, 16384, is_fp8)
        out = torch.full((24, 16384), torch.nan, device="cuda")
        index_logits.causal(*index.operands, index.keys, index.pages[0], start, PAGE, out)
        want = scores_of(index.q, index.weights, index.keys[index.rows(0)])
        if not error(out[seen], want[seen]) < limit:
            wrong.append(f"index scores{' in fp8' if is_fp8 else ''}")
        out.fill_(torch.nan)
        pages, counts = index.pages.expand(24, -1).contiguous(), _lengths(24, 16384)
        programs = index_topk.num_programs(out.device)
        index_logits.paged(*index.operands, index.keys, pages, counts, PAGE, out, programs)
        if not error(out, want) < limit:
            wrong.append(f"paged scores{' in fp8' if is_fp8 else ''}")
    for kind in ("random", "tied"):
        for num_rows, width in ((16, 8192), (16, 131072), (300, 32768)):
            scores = draw(num_rows, width, dtype=torch.float32)
            scores = scores if kind == "random" else (scores * 3).round()
            order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :TOPK]
            chosen = torch.full((num_rows, TOPK), -9, dtype=torch.int32, device="cuda")
            select(scores, _lengths(num_rows, width), TOPK, chosen)
            if not torch.equal(chosen.long(), order.sort(-1).values):
                wrong.append(f"top-k of {num_rows} {kind} rows of {width}")
    w13, w2 = draw(8, 2 * 512, 1024) / 32, draw(8, 1024, 512) / 22
    for tokens in (3, 500):
        x, ids = draw(tokens, 1024), torch.rand(tokens, 8, device="cuda").topk(3).indices
        weights = torch.rand(tokens, 3, device="cuda")
        want = moe_reference(x.double(), w13.double(), w2.double(), ids, weights.double())
        got = torch.full_like(x, torch.nan)
        moe.add_moe_(got, x, w13, w2, ids, weights, None, adds=False)
        if not error(got, want) < 1e-2:
            wrong.append(f"experts for {tokens} tokens")
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}; no figures of what is wrong")


def _lengths(num: int, length: int) -> torch.Tensor:
    return torch.full((num,), length, dtype=torch.int32, device="cuda")


def prefill(flops_ceiling: float, is_fp8: bool = False) -> list[Row]:
    rows, kind = [], " fp8" if is_fp8 else ""
    for length in (8192, 32768, 131072):
        index = Index.draw(4096, 1, length, is_fp8)
        q, weights = index.operands
        start, flops = length - 4096, 2 * HEADS * DIM * 4096 * (length - 2048)
        step = 4096 if length < 131072 else 512
        out = torch.empty((step, length), device="cuda")

        def scored(
            q: torch.Tensor = q,
            weights: torch.Tensor = weights,
            index: Index = index,
            start: int = start,
            out: torch.Tensor = out,
        ) -> None:
            for a in range(0, 4096, len(out)):
                own = slice(a, a + len(out))
                index_logits.causal(
                    q[own], weights[own], index.keys, index.pages[0], start + a, PAGE, out
                )

        took = timed([scored] * 2)
        peer = ("DeepGEMM fp8", DEEPGEMM[length])
        rate = flops / took / 1e6
        shape = f"4096 x {length // 1024}k"
        rows.append(
            Row(f"index scores{kind}", shape, took, rate, None, rate / flops_ceiling, *peer)
        )
        chosen = partial(
            index_topk.causal, index.q, index.weights, index.keys, index.pages[0], start, PAGE, TOPK
        )
        took = timed([chosen] * 2)
        both = DEEPGEMM[length] + VLLM_TOPK[4096, length]
        what = f"scores + top-k{kind}"
        rows.append(Row(what, shape, took, peer="the two", peer_microseconds=both))
    return rows


def decode(bytes_ceiling: float, is_fp8: bool = False) -> list[Row]:
    rows, length, kind = [], 32768, " fp8" if is_fp8 else ""
    for num in (1, 16, 64, 128):
        index = Index.draw(num, num, length, is_fp8)
        counts = _lengths(num, length)
        out = torch.empty((num, length), device="cuda")
        own = index.keys, index.pages, counts, PAGE
        programs = index_topk.num_programs(out.device)
        took = timed([partial(index_logits.paged, *index.operands, *own, out, programs)] * 10)
        key_bytes = DIM + 4 if is_fp8 else DIM * 2
        rate = num * length * (key_bytes + 4) / took / 1e6
        shape, peer = f"{num} x 32k", ("DeepGEMM fp8", DEEPGEMM_PAGED[num])
        rows.append(
            Row(f"paged scores{kind}", shape, took, None, rate, rate / bytes_ceiling, *peer)
        )
        chosen = partial(index_topk.paged, index.q, index.weights, *own, TOPK)
        rows.append(Row(f"scores + top-k{kind}", shape, timed([chosen] * 5)))
    return rows


def tiles() -> None:
    """Which ways to cut the fp8 scores are fast: the fastest of many, for a prefill and for
    decodes, beside what kernels.gpu.index_logits takes by itself."""
    length = 32768
    index = Index.draw(4096, 1, length, is_fp8=True)
    out = torch.empty((4096, length), device="cuda")
    own = *index.operands, index.keys, index.pages[0], length - 4096, PAGE, out
    usual = index_tiles.causal_tile(HEADS, DIM, E4M3, card_of(out.device))
    cuts = product((1, 2, 4), (64, 128), (2048, 4096, 8192), (4, 8), (2, 3, 4))
    prefilled = [partial(index_logits.causal, *own)] * 2
    _fastest("prefill, 4096 x 32k", usual, starmap(index_tiles.Tile, cuts), prefilled)
    for num in (1, 16, 64):
        index, counts = Index.draw(num, num, length, is_fp8=True), _lengths(num, length)
        out = torch.empty((num, length), device="cuda")
        programs = index_topk.num_programs(out.device)
        paged = partial(
            index_logits.paged,
            *index.operands,
            index.keys,
            index.pages,
            counts,
            PAGE,
            out,
            programs,
        )
        usual = index_tiles.paged_tile(num, HEADS, DIM, E4M3, card_of(out.device))
        cuts = product((1,), (32, 64, 128), (128, 256, 512, 1024), (2, 4, 8), (2, 3, 4, 6, 8))
        _fastest(f"decodes, {num} x 32k", usual, starmap(index_tiles.Tile, cuts), [paged] * 10)


def topk_tiles() -> None:
    """The same for the top-k, beside what kernels.gpu.topk takes by itself, which may be others
    for what is kept of a row than for the row."""
    cuts = (
        (8, 8, 64),
        (8, 8, 80),
        (4, 16, 48),
        (8, 16, 64),
        (4, 32, 64),
        (8, 32, 64),
        (16, 16, 128),
    )
    for num, length in VLLM_TOPK:
        usual = tile_for(num, length)
        what = f"top-k, {num} x {length // 1024}k"
        _fastest(what, usual, starmap(Tile, cuts), _topk_calls(num, length))


def _fastest(
    what: str, usual: Cut, cuts: Iterable[Cut], calls: Sequence[Callable[..., object]]
) -> None:
    took: list[tuple[float, Cut]] = []
    for cut in cuts:
        try:
            took.append((timed([partial(call, tile=cut) for call in calls], repeats=3), cut))
        except OutOfResources:
            continue
    print(f"{what}: {timed([partial(call, tile=usual) for call in calls]):.1f} µs with {usual}")
    for microseconds, cut in sorted(took, key=lambda pair: pair[0])[:5]:
        print(f"  {microseconds:.1f} µs with {cut}", flush=True)


def _topk_calls(num: int, length: int) -> list[Callable[..., None]]:
    copies = max(1, min(8, 2 * L2_BYTES // (num * length * 4)))
    scores = [draw(num, length, dtype=torch.float32) for _ in range(copies)]
    counts, out = _lengths(num, length), scores[0].new_empty((num, TOPK), dtype=torch.int32)
    return [partial(select, each, counts, TOPK, out) for each in scores] * (1 if num == 4096 else 4)


def topk(bytes_ceiling: float) -> list[Row]:
    rows = []
    for (num, length), peer in VLLM_TOPK.items():
        took = timed(_topk_calls(num, length))
        rate = num * length * 4 / took / 1e6
        shape = f"{num} x {length // 1024}k"
        rows.append(Row("top-2048", shape, took, None, rate, rate / bytes_ceiling, "vLLM", peer))
    return rows


def experts(flops_ceiling: float, bytes_ceiling: float) -> list[Row]:
    w13 = draw(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5
    w2 = draw(EXPERTS, HIDDEN, INNER) * INNER**-0.5
    rows = []
    for tokens in (1, 16, 32, 128, 1024, 8192):
        x = draw(tokens, HIDDEN)
        ids = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOICES).indices
        weights, out = torch.rand(tokens, CHOICES, device="cuda"), torch.empty_like(x)
        call = partial(moe.add_moe_, out, x, w13, w2, ids, weights, None, adds=False)
        took = timed([call] * 3)
        tflops = tokens * CHOICES * 3 * 2 * HIDDEN * INNER / took / 1e6
        rate = len(ids.unique()) * 3 * HIDDEN * INNER * 2 / took / 1e6
        ceiling = max(tflops / flops_ceiling, rate / bytes_ceiling)
        rows.append(Row("experts", f"{tokens} tokens", took, tflops, rate, ceiling))
    return rows


def small(bytes_ceiling: float) -> list[Row]:
    rows = []
    for tokens in (1, 128, 8192):
        x, weight = draw(tokens, HIDDEN), draw(HIDDEN)
        q, angles = draw(tokens, HEADS, DIM), draw(tokens, 32, dtype=torch.float32)
        logits, bias = (draw(*s, 256, dtype=torch.float32) for s in ((tokens,), ()))
        cache, where = draw(tokens + 64, 576), torch.randperm(tokens, device="cuda")
        key, w = draw(tokens, DIM), draw(tokens, HEADS, dtype=torch.float32)
        held = in_fp8(draw((tokens // PAGE + 1) * PAGE, DIM))
        gate_up, parts = draw(tokens, 2 * INNER), (x[:, :512], x[:, 512:576])
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "rms norm": (partial(norm.rms_norm, x, weight, 1e-6), 2 * x.nbytes),
            "rope": (partial(rope.rope_leading, q, angles, angles, False), 2 * q.nbytes),
            "gate": (partial(route.gate, logits, bias, 8, 8, 4, True, 2.5), logits.nbytes),
            "store": (partial(store.store_rows, cache, where, None, *parts), 2 * tokens * 1152),
            "store fp8": (partial(fp8.store_keys, held, where, None, key), tokens * (3 * DIM + 4)),
            "queries to fp8": (partial(fp8.quantise_queries, q, w), q.nbytes * 3 // 2),
            "silu * up": (partial(swiglu.silu_mul, gate_up), gate_up.nbytes * 3 // 2),
        }
        for name, (call, num_bytes) in calls.items():
            took = timed([call] * 20)
            rate = num_bytes / took / 1e6
            share = rate / bytes_ceiling if tokens == 8192 else None
            rows.append(Row(name, f"{tokens} tokens", took, None, rate, share))
    return rows


def draws() -> list[Row]:
    """Not in a graph: what a step pays, its one copy up included."""
    rows = []
    for num in (1, 128):
        logits = 3 * draw(num, 129280, dtype=torch.float32)
        for name, how in (
            ("greedy", {}),
            ("temperature", {"temperature": 1.0}),
            ("top_p 0.9", {"temperature": 1.0, "top_p": 0.9}),
            ("top_k 50", {"temperature": 1.0, "top_k": 50, "top_p": 0.95}),
        ):
            asked = [Draw(mix(i), **how) for i in range(num)]
            sampling.draw(logits, asked)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                sampling.draw(logits, asked)
            end.record()
            torch.cuda.synchronize()
            took = begin.elapsed_time(end) * 100
            rows.append(Row("draw", f"{num} {name}", took))
    return rows


def ceilings() -> tuple[float, float, float]:
    """TFLOP/s of products in bf16 and in fp8, TB/s of a copy, of this card."""
    a, one = draw(8192, 8192), torch.ones((), device="cuda")
    flops = 2 * 8192**3 / timed([lambda: a @ a] * 4) / 1e6
    b = a.to(E4M3)
    call = partial(torch._scaled_mm, b, b.t(), one, one, out_dtype=torch.bfloat16)
    fp8_flops = 2 * 8192**3 / timed([call] * 4) / 1e6
    big = torch.empty(1 << 30, dtype=torch.int8, device="cuda").random_()
    other = torch.empty_like(big)
    return flops, fp8_flops, 2 * big.nbytes / timed([lambda: other.copy_(big)] * 4) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--tiles", choices=("scores", "topk"), help="try tilings of the fp8 scores, or of the top-k"
    )
    args = parser.parse_args()
    torch.manual_seed(1)
    gate()
    if args.tiles:
        (tiles if args.tiles == "scores" else topk_tiles)()
        return
    flops, fp8_flops, bandwidth = ceilings()
    print(
        f"{torch.cuda.get_device_name()}: {flops:.0f} TFLOP/s bf16, {fp8_flops:.0f} TFLOP/s fp8, "
        f"{bandwidth:.2f} TB/s"
    )
    rows: list[Row] = []
    for part in (
        lambda: prefill(flops),
        lambda: prefill(fp8_flops, is_fp8=True),
        lambda: decode(bandwidth),
        lambda: decode(bandwidth, is_fp8=True),
        lambda: topk(bandwidth),
        lambda: experts(flops, bandwidth),
        lambda: small(bandwidth),
        draws,
    ):
        found = part()
        print("\n".join(map(str, found)), flush=True)
        rows += found
        torch.cuda.empty_cache()
    if args.output:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        result = {
            "date": date.today().isoformat(),
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": commit,
            "ceilings": {
                "bf16_tflops": flops,
                "fp8_tflops": fp8_flops,
                "copy_tb_per_s": bandwidth,
            },
            "rows": [asdict(row) for row in rows],
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
