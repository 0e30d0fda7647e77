"""The default model on one GPU beside the CPU: float32 tokens equal, bfloat16's divergence small.

    python -m benchmarks.gpu_default_model [--source FILE] [--json FILE]

Three cases side by side, each in a process of its own: the CPU in float32, the GPU in float32 and
in bfloat16. Ten prompts, 64 greedy tokens each, must be equal token for token in float32; a
difference is reported with the margin that both sides saw there. Divergence is over the whole
vocabulary, at every position of one long prompt, from the CPU's float32. With --device cpu the
GPU's places are taken by the CPU, batched otherwise and with 16-bit weights: that shows that this
script works.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import engine.runner
from engine.pull.cache import default_home
from engine.pull.default_model import ensure_default_model
from tests.engine.client import Client
from tests.engine.pull import oracle

# One token, a page of 64 and its borders, the top-k of 512 and its borders, beyond it.
LENGTHS = (1, 2, 17, 63, 64, 65, 130, 511, 513, 700)
NUM_TOKENS = 64
SCORED_TOKENS = 700  # of the text; the first 256 are those of benchmarks/default_model.py
NUM_FIRST = 256
MAX_DIVERGENCE = 0.003  # nats, mean, of 16 bits


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    device: str
    dtype: str
    max_running: int = 16
    chunk: int = 512


@dataclass(frozen=True, slots=True)
class Found:
    tokens: list[list[int]]  # by prompt
    margins: list[list[float]]  # of each token: by how much it was likelier than the next
    log_probs: torch.Tensor  # [SCORED_TOKENS - 1, vocab_size] float32
    seconds: dict[str, float]


def cases_of(device: str) -> list[Case]:
    first = Case("cpu float32", "cpu", "float32")
    if device == "cpu":
        other = Case("cpu float32, batched otherwise", "cpu", "float32", max_running=3, chunk=100)
        return [first, other, Case("cpu bfloat16 weights", "cpu", "bfloat16")]
    return [
        first,
        Case(f"{device} float32", device, "float32"),
        Case(f"{device} bfloat16", device, "bfloat16"),
    ]


def texts_of(folder: Path, lengths: tuple[int, ...]) -> tuple[list[list[int]], list[int]]:
    """Prompts of these lengths, each from a place of its own in one text; the text's beginning."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(oracle.prose(10_000)).ids
    return [ids[97 * i : 97 * i + n] for i, n in enumerate(lengths)], ids[:SCORED_TOKENS]


def compute(case: Case, folder: Path, prompts: list[list[int]], scored: list[int]) -> Found:
    """What one engine finds: greedy tokens first, batched together, then scores."""
    began = time.perf_counter()
    client = Client(
        folder,
        device=case.device,
        dtype=case.dtype,
        context_length=2048,
        max_total_tokens=16384,
        max_running_requests=case.max_running,
        chunked_prefill_size=case.chunk,
    )
    seconds = {"ready": time.perf_counter() - began}
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        client.submit(f"t{i}", prompt, max_tokens=NUM_TOKENS, temperature=0.0)
    client.run()
    tokens = [client.tokens[f"t{i}"] for i in range(len(prompts))]
    seconds["tokens"] = time.perf_counter() - began
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        client.submit(f"m{i}", prompt + tokens[i], max_tokens=0, prompt_logprobs=2)
    client.run()
    margins = [
        [_margin(at.top) for at in client.prompt_logprobs[f"m{i}"][len(prompt) :]]
        for i, prompt in enumerate(prompts)
    ]
    log_probs = _score(client, scored)
    seconds["scores"] = time.perf_counter() - began
    client.close()
    return Found(tokens, margins, log_probs, seconds)


def _margin(top: list[tuple[int, float]]) -> float:
    best, second = sorted((logprob for _, logprob in top), reverse=True)[:2]
    return best - second


def _score(client: Client, prompt: list[int]) -> torch.Tensor:
    """[T - 1, vocab_size]: the engine's log-probabilities after each token but the last."""
    rows: list[torch.Tensor] = []
    report = engine.runner.score

    def keep(logits: torch.Tensor, requests: Any) -> Any:
        if requests:
            rows.append(logits[: len(requests)].log_softmax(-1).cpu())
        return report(logits, requests)

    engine.runner.score = keep
    try:
        client.submit("scored", prompt, max_tokens=0, prompt_logprobs=0)
        client.run()
    finally:
        engine.runner.score = report
    return torch.cat(rows)


def case_main(
    case: Case, folder: Path, prompts: list[list[int]], scored: list[int], out: Path
) -> None:
    found = compute(case, folder, prompts, scored)
    torch.save([found.tokens, found.margins, found.log_probs, found.seconds], out)
    print(f"{case.name}: {found.seconds}", flush=True)


def run_cases(
    cases: list[Case],
    limits_s: dict[str, float],
    folder: Path,
    prompts: list[list[int]],
    scored: list[int],
) -> list[Found | str]:
    """What each case found, or why it found nothing; a case beyond its limit is ended."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        outs = [Path(scratch) / f"{i}.pt" for i in range(len(cases))]
        processes = [
            context.Process(target=case_main, args=(case, folder, prompts, scored, out))
            for case, out in zip(cases, outs, strict=True)
        ]
        for process in processes:
            process.start()
        found: list[Found | str] = []
        for case, process, out in zip(cases, processes, outs, strict=True):
            limit_s = limits_s[torch.device(case.device).type]
            process.join(max(0.0, began + limit_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
                found.append(f"ended after {limit_s:.0f} s, its limit")
            elif process.exitcode:
                found.append(f"failed with exit code {process.exitcode}; its output says why")
            else:
                found.append(Found(*torch.load(out)))
        return found


@dataclass(frozen=True, slots=True)
class Difference:
    prompt: int
    token: int
    expected: int
    got: int
    margins: tuple[float, float]  # of the CPU's float32, of the other

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt} differs at token {self.token}: {self.got}, not {self.expected}; "
            f"margins there {self.margins[1]:.2g} and {self.margins[0]:.2g} nats"
        )


def differences(expected: Found, other: Found) -> list[Difference]:
    """The first difference of each prompt whose tokens are not equal."""
    found = []
    for prompt, (a, b) in enumerate(zip(expected.tokens, other.tokens, strict=True)):
        if a != b:
            at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            margins = (expected.margins[prompt][at], other.margins[prompt][at])
            found.append(Difference(prompt, at, a[at], b[at], margins))
    return found


def compare(expected: Found, other: Found) -> dict[str, Any]:
    per_token = oracle.divergences(expected.log_probs, other.log_probs)
    return {
        "equal_prompts": len(expected.tokens) - len(differences(expected, other)),
        "differences": [str(difference) for difference in differences(expected, other)],
        "divergence_mean": float(per_token.mean()),
        "divergence_mean_first_256": float(per_token[:NUM_FIRST].mean()),
        "divergence_max": float(per_token.max()),
        "agreement": oracle.agreement(expected.log_probs, other.log_probs),
    }


def is_right(case: Case, row: dict[str, Any]) -> bool:
    """NaN is not."""
    if case.dtype == "float32" and row["differences"]:
        return False
    return bool(row["divergence_mean"] <= MAX_DIVERGENCE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="of the two other cases (default: cuda)")
    parser.add_argument(
        "--home", type=Path, default=default_home(), help="the model cache's folder"
    )
    parser.add_argument(
        "--source", type=Path, help="a local copy of the source, as for python -m engine.pull"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of the prompts")
    parser.add_argument("--cpu-limit-s", type=float, default=400, help="of a case on the CPU")
    parser.add_argument("--gpu-limit-s", type=float, default=240, help="of a case on the GPU")
    parser.add_argument("--json", type=Path, help="write the results here; refused on a CPU")
    args = parser.parse_args()
    kind = torch.device(args.device).type
    if args.json and kind == "cpu":
        parser.error("--json: results of --device cpu are no GPU's; accepted with --device cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no CUDA device; accepted here is cpu")
    folder = ensure_default_model(args.home, given=args.source)
    prompts, scored = texts_of(folder, tuple(args.lengths))
    cases = cases_of(args.device)
    limits_s = {"cpu": args.cpu_limit_s, "cuda": args.gpu_limit_s}
    found = run_cases(cases, limits_s, folder, prompts, scored)
    rows: dict[str, Any] = {}
    console, red = Console(), []
    table = Table("case", "equal", "KL mean", "first 256", "KL max", "agreement", "seconds")
    for case, result in zip(cases, found, strict=True):
        if isinstance(result, str) or isinstance(found[0], str):
            red.append(
                f"{case.name}: {result if isinstance(result, str) else 'compared with none'}"
            )
            continue
        rows[case.name] = row = compare(found[0], result) | {"seconds": result.seconds}
        table.add_row(
            case.name,
            f"{row['equal_prompts']} of {len(prompts)}",
            *(
                f"{row[name]:.2e}"
                for name in ("divergence_mean", "divergence_mean_first_256", "divergence_max")
            ),
            f"{row['agreement']:.4f}",
            ", ".join(f"{name} {value:.1f}" for name, value in result.seconds.items()),
        )
        if not is_right(case, row):
            red.append(f"{case.name}: tokens differ or the mean divergence exceeds the limit")
        if case.dtype == "float32":
            red += [f"{case.name}: {text}" for text in row["differences"]]
    console.print(table)
    for line in red:
        console.print(line, markup=False, soft_wrap=True)
    if args.json and rows:
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "card": torch.cuda.get_device_name(args.device),
            "torch": torch.__version__,
            "prompt_tokens": list(args.lengths),
            "greedy_tokens": NUM_TOKENS,
            "scored_tokens": len(scored),
            "is_right": not red,
        }
        args.json.write_text(json.dumps(about | {"cases": rows}, indent=1) + "\n")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
