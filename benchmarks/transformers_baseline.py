"""Decode speed of transformers' generate, one request at a time: what a newcomer compares with.

    python benchmarks/transformers_baseline.py --dtype bfloat16

Greedy, fixed output length, on the same converted model that plait serves. Prints a table and, with
--json, writes the numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.pull.cache import default_model_path


@dataclass(frozen=True, slots=True)
class Baseline:
    dtype: str
    num_threads: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float
    output_tokens_per_s: float  # prefill included, as the server's number includes it
    decode_tokens_per_s: float  # tokens after the first over the time after the first


def measure(
    folder: Path, dtype: str, prompts: Sequence[str], output_tokens: int, num_warmup: int = 1
) -> Baseline:
    """Generate `output_tokens` for each prompt, the first `num_warmup` of them unmeasured."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    total_s = first_s = 0.0
    num_prompt_tokens = 0
    for index, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        started_s = time.perf_counter()
        _generate(model, ids, 1)
        until_first_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        _generate(model, ids, output_tokens)
        duration_s = time.perf_counter() - started_s
        if index >= num_warmup:
            total_s += duration_s
            first_s += until_first_s
            num_prompt_tokens += ids.shape[1]
    num_requests = len(prompts) - num_warmup
    num_tokens = num_requests * output_tokens
    return Baseline(
        dtype=dtype,
        num_threads=torch.get_num_threads(),
        num_requests=num_requests,
        prompt_tokens=num_prompt_tokens,
        output_tokens=num_tokens,
        duration_s=total_s,
        output_tokens_per_s=num_tokens / total_s,
        decode_tokens_per_s=(num_tokens - num_requests) / (total_s - first_s),
    )


@torch.inference_mode()
def _generate(model: torch.nn.Module, ids: torch.Tensor, num_tokens: int) -> None:
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
    )
    assert out.shape[1] == ids.shape[1] + num_tokens


def table_of(baseline: Baseline) -> Table:
    table = Table(title=f"transformers generate, {baseline.dtype}", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in asdict(baseline).items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=default_model_path())
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--num-requests", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from server.bench.workload import corpus

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(corpus(), add_special_tokens=False)["input_ids"]
    length = args.prompt_tokens
    prompts = [
        tokenizer.decode(ids[i * length : (i + 1) * length]) for i in range(args.num_requests + 1)
    ]
    baseline = measure(args.model, args.dtype, prompts, args.output_tokens)
    Console().print(table_of(baseline))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(asdict(baseline), indent=1) + "\n")


if __name__ == "__main__":
    main()
