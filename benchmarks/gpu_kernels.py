"""The index, top-k, expert and small kernels on one CUDA device: right first, then how fast.

    python -m benchmarks.gpu_kernels --output benchmarks/results/gpu_kernels.json

Shapes are DeepSeek-V3.2's. Every figure is the median of replays of a CUDA graph of many calls. The
figures that ours are compared with were measured on a card of the same model earlier: DeepGEMM (in
fp8, whose keys are half as wide as ours in bf16) and vLLM 0.26.0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import torch

from kernels.gpu import index_logits, index_topk, moe, norm, rope, route, sampling, store, swiglu
from kernels.gpu.topk import select
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
    keys: torch.Tensor  # [rows, DIM]
    pages: torch.Tensor  # [contexts, P]

    @classmethod
    def draw(cls, queries: int, contexts: int, length: int) -> Index:
        num_pages = length // PAGE
        pages = 1 + torch.randperm(contexts * num_pages, device="cuda").int()
        keys = draw((contexts * num_pages + 1) * PAGE, DIM)
        q = draw(queries, HEADS, DIM) * DIM**-0.5
        weights = draw(queries, HEADS, dtype=torch.float32)
        return cls(q, weights, keys, pages.view(contexts, num_pages))

    def rows(self, context: int) -> torch.Tensor:
        inside = torch.arange(PAGE, device="cuda")
        return (self.pages[context].long()[:, None] * PAGE + inside).flatten()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def gate() -> None:
    """Ends the program where a kernel is wrong."""
    wrong = []
    index = Index.draw(24, 1, 16384)
    start = 16384 - 24
    out = torch.full((24, 16384), torch.nan, device="cuda")
    index_logits.causal(index.q, index.weights, index.keys, index.pages[0], start, PAGE, out)
    want = scores_of(index.q, index.weights, index.keys[index.rows(0)])
    seen = torch.arange(16384, device="cuda") <= torch.arange(start, 16384, device="cuda")[:, None]
    if not error(out[seen], want[seen]) < 1e-5:
        wrong.append("index scores")
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


def prefill(flops_ceiling: float) -> list[Row]:
    rows = []
    for length in (8192, 32768, 131072):
        index = Index.draw(4096, 1, length)
        start, flops = length - 4096, 2 * HEADS * DIM * 4096 * (length - 2048)
        step = 4096 if length < 131072 else 512
        out = torch.empty((step, length), device="cuda")

        def scored(index: Index = index, start: int = start, out: torch.Tensor = out) -> None:
            for a in range(0, 4096, len(out)):
                own = slice(a, a + len(out))
                index_logits.causal(
                    index.q[own], index.weights[own], index.keys, index.pages[0],
                    start + a, PAGE, out,
                )  # fmt: skip

        took = timed([scored] * 2)
        peer = ("DeepGEMM fp8", DEEPGEMM[length])
        rate = flops / took / 1e6
        shape = f"4096 x {length // 1024}k"
        rows.append(Row("index scores", shape, took, rate, None, rate / flops_ceiling, *peer))
        chosen = partial(
            index_topk.causal, index.q, index.weights, index.keys, index.pages[0], start, PAGE, TOPK
        )
        took = timed([chosen] * 2)
        both = DEEPGEMM[length] + VLLM_TOPK[4096, length]
        rows.append(Row("scores + top-k", shape, took, peer="the two", peer_microseconds=both))
    return rows


def decode(bytes_ceiling: float) -> list[Row]:
    rows, length = [], 32768
    for num in (1, 16, 64, 128):
        index = Index.draw(num, num, length)
        counts = _lengths(num, length)
        out = torch.empty((num, length), device="cuda")
        own = index.q, index.weights, index.keys, index.pages, counts, PAGE
        programs = index_topk.num_programs(out.device)
        took = timed([partial(index_logits.paged, *own, out, programs)] * 10)
        rate = num * length * (DIM * 2 + 4) / took / 1e6
        shape, peer = f"{num} x 32k", ("DeepGEMM fp8", DEEPGEMM_PAGED[num])
        rows.append(Row("paged scores", shape, took, None, rate, rate / bytes_ceiling, *peer))
        took = timed([partial(index_topk.paged, *own, TOPK)] * 5)
        rows.append(Row("scores + top-k", shape, took))
    return rows


def topk(bytes_ceiling: float) -> list[Row]:
    rows = []
    for (num, length), peer in VLLM_TOPK.items():
        copies = max(1, min(8, 2 * L2_BYTES // (num * length * 4)))
        scores = [draw(num, length, dtype=torch.float32) for _ in range(copies)]
        counts, out = _lengths(num, length), scores[0].new_empty((num, TOPK), dtype=torch.int32)
        calls = [partial(select, each, counts, TOPK, out) for each in scores]
        took = timed(calls * (1 if num == 4096 else 4))
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
        gate_up, parts = draw(tokens, 2 * INNER), (x[:, :512], x[:, 512:576])
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "rms norm": (partial(norm.rms_norm, x, weight, 1e-6), 2 * x.nbytes),
            "rope": (partial(rope.rope_leading, q, angles, angles, False), 2 * q.nbytes),
            "gate": (partial(route.gate, logits, bias, 8, 8, 4, True, 2.5), logits.nbytes),
            "store": (partial(store.store_rows, cache, where, None, *parts), 2 * tokens * 1152),
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


def ceilings() -> tuple[float, float]:
    """TFLOP/s of a bf16 product, TB/s of a copy, of this card."""
    a = draw(8192, 8192)
    flops = 2 * 8192**3 / timed([lambda: a @ a] * 4) / 1e6
    big = torch.empty(1 << 30, dtype=torch.int8, device="cuda").random_()
    other = torch.empty_like(big)
    return flops, 2 * big.nbytes / timed([lambda: other.copy_(big)] * 4) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(1)
    gate()
    flops, bandwidth = ceilings()
    print(f"{torch.cuda.get_device_name()}: {flops:.0f} TFLOP/s bf16, {bandwidth:.2f} TB/s")
    rows: list[Row] = []
    for part in (
        lambda: prefill(flops),
        lambda: decode(bandwidth),
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
            "ceilings": {"bf16_tflops": flops, "copy_tb_per_s": bandwidth},
            "rows": [asdict(row) for row in rows],
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
