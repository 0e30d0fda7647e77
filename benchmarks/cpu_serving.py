"""plait beside transformers on one CPU, in one run: same weights, dtype, prompts and lengths.

    python benchmarks/cpu_serving.py

First the correctness gate: greedy tokens of the server equal those of transformers in float32, or
there is no report. Then `plait serve` under `plait bench` at each concurrency, then transformers
one request at a time. Prints the ratios and writes benchmarks/results/cpu_serving.{json,png}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table
from transformers_baseline import Baseline, measure

from engine.pull.cache import default_model_path
from server.bench import plot, runner, workload
from server.bench.client import RequestResult
from server.bench.options import BenchOptions, Span
from server.bench.summary import Summary, summarise

RESULTS = Path(__file__).parent / "results"
GATE_TOKENS = 32
GATE_PROMPT = "The capital of France is"


@contextlib.contextmanager
def serving(model: Path, dtype: str) -> Iterator[str]:
    """The base URL of a `plait serve` of its own."""
    argv = [sys.executable, "-m", "server", "serve", "--port", "0", "--dtype", dtype]
    process = subprocess.Popen(
        [*argv, "--device", "cpu", "--model", str(model)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if match := re.search(r"ready after .*(http://\S+)", line):
                yield match[1]
                return
        raise SystemExit("plait serve ended before it was ready")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def check_tokens(model: Path) -> None:
    """The gate: float32 greedy text of both, or exit."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = tokenizer(GATE_PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=GATE_TOKENS,
            max_new_tokens=GATE_TOKENS,
        )
    expected = tokenizer.decode(out[0, ids.shape[1] :])
    body = {
        "model": model.name,
        "prompt": GATE_PROMPT,
        "max_tokens": GATE_TOKENS,
        "min_tokens": GATE_TOKENS,
        "temperature": 0,
    }
    with serving(model, "float32") as url:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    got = answer.json()["choices"][0]["text"]
    if got != expected:
        raise SystemExit(f"greedy text differs, no report.\n  expected {expected!r}\n  got {got!r}")


async def make_jobs(options: BenchOptions) -> list[workload.Job]:
    async with runner.connect(options) as http:
        text = workload.corpus()
        cutter = workload.TextCutter(http, await runner.first_model(http), text)
        return await workload.make_jobs(options, cutter, text)


async def send(options: BenchOptions, jobs: Sequence[workload.Job]) -> list[RequestResult]:
    async with runner.connect(options) as http:
        return await runner.measure(options, http, await runner.first_model(http), jobs)


def report(baseline: Baseline, summaries: dict[int, Summary]) -> Table:
    table = Table(title=f"{baseline.dtype}, {baseline.num_threads} threads")
    for name in ("", "output tokens/s", "ratio", "TTFT p50, ms", "TPOT p50, ms"):
        table.add_column(name, justify="left" if not name else "right")
    base = baseline.output_tokens_per_s
    table.add_row("transformers, one at a time", f"{base:.1f}", "1.00", "", "")
    for concurrency, summary in summaries.items():
        rate = summary.output_tokens_per_s
        times = [summary.ttft_s, summary.tpot_s]
        cells = [f"{spread.p50 * 1000:.1f}" if spread else "–" for spread in times]
        name = f"plait, concurrency {concurrency}"
        table.add_row(name, f"{rate:.1f}", f"{rate / base:.2f}", *cells)
    return table


def machine() -> dict[str, Any]:
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=default_model_path())
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--num-requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--baseline-requests", type=int, default=3, help="transformers takes minutes for one"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()

    check_tokens(args.model)
    options = BenchOptions(
        num_requests=args.num_requests,
        num_warmup=1,
        prompt_tokens=Span(args.prompt_tokens, args.prompt_tokens),
        output_tokens=Span(args.output_tokens, args.output_tokens),
        ignore_eos=True,
    )
    jobs: list[workload.Job] = []
    results: dict[int, list[RequestResult]] = {}
    # A new server each time: no prompt is answered from an earlier one's prefix cache.
    for concurrency in args.concurrency:
        with serving(args.model, args.dtype) as url:
            own = dataclasses.replace(options, base_url=url, concurrency=concurrency)
            jobs = jobs or asyncio.run(make_jobs(own))
            results[concurrency] = asyncio.run(send(own, jobs))
    prompts = [job.prompt for job in jobs][: args.baseline_requests + 1]  # one is a warm-up
    baseline = measure(args.model, args.dtype, prompts, args.output_tokens)
    summaries = {concurrency: summarise(done) for concurrency, done in results.items()}
    Console().print(report(baseline, summaries))
    _write(baseline, summaries, results)
    if any(summary.num_failed for summary in summaries.values()):
        raise SystemExit("some requests failed; the numbers above do not count")


def _write(
    baseline: Baseline, summaries: dict[int, Summary], results: dict[int, list[RequestResult]]
) -> None:
    RESULTS.mkdir(exist_ok=True)
    content = {
        "machine": machine(),
        "transformers": dataclasses.asdict(baseline),
        "plait": {
            f"concurrency {concurrency}": msgspec.to_builtins(summary)
            | {"ratio": summary.output_tokens_per_s / baseline.output_tokens_per_s}
            for concurrency, summary in summaries.items()
        },
    }
    (RESULTS / "cpu_serving.json").write_text(json.dumps(content, indent=1) + "\n")
    most = max(results)
    title = f"plait on a CPU, concurrency {most}, {baseline.dtype}"
    plot.draw(results[most], title, RESULTS / "cpu_serving.png")


if __name__ == "__main__":
    main()
