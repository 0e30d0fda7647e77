"""The engine on one GPU, with random weights: prefill tokens/s, decode step, host time of a step.

    python -m benchmarks.gpu_engine --model dsv32-5l --json out.json

dsv32-5l-fp8 is the same model with its weights in block fp8, as it is published.

The correctness gate comes first: small models of the same builds, in float32, must answer as they
do on the CPU, token for token, near ties between choices decided the same way (gpu_choices.py), and
figures are refused where they do not. Prefill: one prompt, one
token, median of 3, nothing cached. Decode: 64 steps of N requests that all decode.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_choices import recording, taking_over
from benchmarks.random_models import CONFIGS, build_weights
from engine.config import WorkerConfig
from engine.engine import Engine, Mailbox
from engine.loading import build_engine
from engine.parallel.group import Group
from engine.types import Request, SamplingParams

GATES = {
    "dsv32-5l": ["dsv32-small", "default-small"],
    "dsv32-5l-fp8": ["dsv32-small-fp8"],
    "llama-1b": ["llama-small"],
}
NUM_STEPS = 64
# vLLM 0.26.0 measured on the same card model: fp8 weights and KV (dsv32-5l), bf16 (llama-1b).
VLLM: dict[str, dict[str, float]] = {
    "dsv32-5l": {
        "prefill 8k": 73700,
        "prefill 32k": 66000,
        "1 x 1k": 2.5,
        "32 x 8k": 4.74,
        "128 x 1k": 7.0,
    },
    "llama-1b": {"prefill 8k": 206000, "prefill 32k": 124000, "32 x 8k": 3.80, "128 x 1k": 5.66},
}


@dataclass
class Bench:
    engine: Engine
    num_submitted: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    host_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def submit(self, prompt: list[int], max_tokens: int, temperature: float = 0.0) -> str:
        rid = f"r{self.num_submitted}"
        self.num_submitted += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
        request = Request(rid=rid, token_ids=prompt, sampling=sampling)
        refused = self.engine.scheduler.submit(request, [])
        assert not refused, refused
        return rid

    def step(self) -> bool:
        """One step; its wall time, and that less the time in which the tokens are waited for."""
        scheduler = self.engine.scheduler
        began = time.perf_counter()
        plan = scheduler.plan()
        if plan is None:
            return False
        result = self.engine.execute(plan)
        for out in scheduler.update(plan, result):
            assert out.finish_reason != "error", out.error
            self.tokens.setdefault(out.rid, []).extend(out.ids)
        ended = time.perf_counter()
        self.step_s.append(ended - began)
        waits = result.seconds["sample"]
        self.host_s.append(ended - began - waits)
        return True

    def run(self) -> None:
        while self.step():
            pass

    def prompt(self, length: int) -> list[int]:
        generator = torch.Generator().manual_seed(7919 * self.num_submitted + length)
        drawn: list[int] = torch.randint(
            3, self.engine.vocab_size, (length,), generator=generator
        ).tolist()
        return drawn

    def prefill(self, length: int) -> float:
        """Seconds for one prompt."""
        self.submit(self.prompt(length), 1)
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.run()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def decode(self, batch: int, length: int) -> dict[str, float]:
        """A step of `batch` requests with contexts from `length` on."""
        for _ in range(batch):
            self.submit(self.prompt(length), 2 * NUM_STEPS)
        while self.engine.scheduler.load.num_waiting or not self._all_decode():
            self.step()
        for _ in range(4):
            self.step()
        first = len(self.step_s)
        began = time.perf_counter()
        for _ in range(NUM_STEPS):
            self.step()
        seconds = time.perf_counter() - began
        self.run()
        return {
            "step_ms": 1e3 * seconds / NUM_STEPS,
            "host_ms": 1e3 * statistics.median(self.host_s[first : first + NUM_STEPS]),
            "tokens_per_s": batch * NUM_STEPS / seconds,
        }

    def _all_decode(self) -> bool:
        return all(req.is_decoding for req in self.engine.scheduler._running)


def build(name: str, args: argparse.Namespace, **changes: Any) -> Bench:
    options: dict[str, Any] = {
        "model": name,
        "listen_address": "",
        "device": args.device,
        "dtype": args.dtype,
        "max_running_requests": args.max_running,
        "cuda_graphs": args.graphs,
        "index_cache_dtype": args.index_cache_dtype,
    } | changes
    config = WorkerConfig(**options)
    device = torch.device(config.device)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    is_small = "small" in name
    weights = build_weights(
        name,
        device,
        dtype,
        config.context_length,
        std=0.08 if is_small else 0.02,
        draws_on_cpu=is_small,
        index_cache_dtype=config.index_cache_dtype,
    )
    mailbox = Mailbox()
    return Bench(build_engine(config, weights, Group(config, mailbox.put), mailbox))


def gate(name: str, args: argparse.Namespace) -> bool:
    """Whether 10 prompts get the same 64 greedy tokens on the GPU as on the CPU, in float32, where
    the CPU takes over what the GPU chose, and finds each of these choices right."""
    config = CONFIGS[name][1]
    recorded = recording(
        torch.device(args.device),
        config.get("index_topk", 0),
        config.get("num_experts_per_tok", 0),
        num_layers=config["num_hidden_layers"],
        most_tokens=1024,
    )
    with recorded as choices:
        found = gate_tokens(name, args, args.device)
    with taking_over(choices) as verdict:
        expected = gate_tokens(name, args, "cpu")
    equal = sum(a == b for a, b in zip(expected, found, strict=True))
    print(
        f"gate {name}: {equal} of 10 prompts have equal tokens, float32, 64 greedy; {verdict}",
        flush=True,
    )
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a != b:
            same = next(at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            print(f"  prompt {i} is equal up to token {same}", flush=True)
    return equal == 10 and verdict.is_right


def gate_tokens(name: str, args: argparse.Namespace, device: str) -> list[list[int]]:
    bench = build(
        name,
        args,
        device=device,
        dtype="float32",
        index_cache_dtype="auto",
        context_length=4096,
        max_total_tokens=64 * 64,
        max_running_requests=8,
        chunked_prefill_size=200,
    )
    rids = [bench.submit(bench.prompt(5 + 53 * i), 64) for i in range(10)]
    bench.run()
    return [bench.tokens[rid] for rid in rids]


def profile(bench: Bench, args: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity, profile

    def show(title: str, what: Any) -> None:
        print(f"--- {title}", flush=True)
        for table in (
            what.key_averages()
            .table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60)
            .splitlines()
        ):
            print(table[:190])

    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    bench.prefill(args.profile)
    with profile(activities=kinds) as prefill:
        bench.prefill(args.profile)
    show(f"prefill of {args.profile}", prefill)
    for _ in range(args.profile_batch):
        bench.submit(bench.prompt(4000), 24)
    while bench.engine.scheduler.load.num_waiting or not bench._all_decode():
        bench.step()
    for _ in range(4):
        bench.step()
    with profile(activities=kinds) as decode:
        for _ in range(4):
            bench.step()
    show(f"4 decode steps of {args.profile_batch} requests of 4000", decode)
    bench.run()


def measure(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cited = VLLM.get(args.model.removesuffix("-fp8"), {})
    for length in args.prefill:
        bench.prefill(length)
        seconds = statistics.median(bench.prefill(length) for _ in range(3))
        key = f"prefill {length // 1024}k"
        found[key] = {"tokens_per_s": length / seconds, "seconds": seconds}
        ratio = f", {length / seconds / cited[key]:.2f} of vLLM's" if key in cited else ""
        print(f"{args.model} {key}: {length / seconds:,.0f} tokens/s{ratio}", flush=True)
    for case in args.decode:
        batch, length = (int(part) for part in case.split("x"))
        key = f"{batch} x {length // 1024}k"
        found[key] = row = bench.decode(batch, length)
        ratio = (
            f", vLLM {cited[key]} ms ({cited[key] / row['step_ms']:.2f} x)" if key in cited else ""
        )
        print(
            f"{args.model} decode {key}: {row['step_ms']:.2f} ms a step, host {row['host_ms']:.2f} "
            f"ms, {row['tokens_per_s']:,.0f} tokens/s{ratio}",
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dsv32-5l")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--index-cache-dtype", choices=["auto", "fp8_e4m3"], default="auto")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--gate", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--max-running", type=int, default=128)
    parser.add_argument("--context-length", type=int, default=40960)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--decode", nargs="*", default=["1x1024", "32x8192", "128x1024"])
    parser.add_argument("--profile", type=int, help="profile a prefill of so many tokens instead")
    parser.add_argument("--profile-batch", type=int, default=8)
    parser.add_argument("--json")
    parser.add_argument("--commit", default="", help="for the JSON: what was measured")
    args = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(relativeCreated)d ms %(name)s: %(message)s")
    if args.gate and not all(gate(name, args) for name in GATES.get(args.model, [])):
        print("the gate is red: nothing is measured")
        return 1
    began = time.perf_counter()
    bench = build(
        args.model,
        args,
        context_length=args.context_length,
        chunked_prefill_size=args.chunk,
    )
    ready_s = time.perf_counter() - began
    print(f"{args.model}: ready in {ready_s:.1f} s, graphs {args.graphs}", flush=True)
    if args.profile:
        profile(bench, args)
        return 0
    found = measure(bench, args)
    if args.json:
        about = {
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "commit": args.commit,
            "card": torch.cuda.get_device_name(bench.engine.leader.mesh.device),
            "torch": torch.__version__,
            "model": args.model,
            "dtype": args.dtype,
            "index_cache_dtype": args.index_cache_dtype,
            "graphs": args.graphs,
            "ready_s": ready_s,
            "vllm": VLLM.get(args.model.removesuffix("-fp8"), {}),
        }
        Path(args.json).write_text(json.dumps(about | {"found": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
