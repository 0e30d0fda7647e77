"""The default model on one GPU beside the CPU: float32 tokens equal, bfloat16's divergence small.

    python -m benchmarks.gpu_default_model [--source FILE] [--json FILE]

Three cases side by side, each in a process of its own: the CPU in float32, the GPU in float32 and
in bfloat16. Ten prompts, 64 greedy tokens each, must be equal token for token in float32; a
difference is reported with the margin that both sides saw there, and passes only where the CPU,
taking over what the GPU chose, finds these choices right and the same tokens (gpu_choices.py).
Divergence is over the whole vocabulary, at every position of one long prompt, from the CPU's
float32. With --device cpu the GPU's places are taken by the CPU, reading KV and batching otherwise
and with 16-bit weights: that shows that this script works.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import engine.loading
import engine.runner
from benchmarks.gpu_choices import Choices, recording, taking_over
from engine.attention.tables import TableAttention
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
    records: bool = False  # what it chooses
    reads_tables: bool = False  # on a CPU: KV as on a GPU, in the torch forms of its kernels


@dataclass(frozen=True, slots=True)
class Found:
    tokens: list[list[int]]  # by prompt
    margins: list[list[float]]  # of each token: by how much it was likelier than the next
    log_probs: torch.Tensor  # [SCORED_TOKENS - 1, vocab_size] float32
    seconds: dict[str, float]
    choices: Choices | None = None


def cases_of(device: str) -> list[Case]:
    first = Case("cpu float32", "cpu", "float32")
    if device == "cpu":
        other = Case("cpu float32, otherwise", "cpu", "float32", 3, 100, True, reads_tables=True)
        return [first, other, Case("cpu bfloat16 weights", "cpu", "bfloat16")]
    return [
        first,
        Case(f"{device} float32", device, "float32", records=True),
        Case(f"{device} bfloat16", device, "bfloat16"),
    ]


def texts_of(folder: Path, lengths: tuple[int, ...]) -> tuple[list[list[int]], list[int]]:
    """Prompts of these lengths, each from a place of its own in one text; the text's beginning."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(oracle.prose(10_000)).ids
    return [ids[97 * i : 97 * i + n] for i, n in enumerate(lengths)], ids[:SCORED_TOKENS]


def start(case: Case, folder: Path) -> Client:
    return Client(
        folder,
        device=case.device,
        dtype=case.dtype,
        context_length=2048,
        max_total_tokens=16384,
        max_running_requests=case.max_running,
        chunked_prefill_size=case.chunk,
    )


def greedy(client: Client, prompts: list[list[int]]) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        client.submit(f"t{i}", prompt, max_tokens=NUM_TOKENS, temperature=0.0)
    client.run()
    return [client.tokens[f"t{i}"] for i in range(len(prompts))]


def compute(case: Case, folder: Path, prompts: list[list[int]], scored: list[int]) -> Found:
    """What one engine finds: greedy tokens first, batched together, then scores."""
    times = [time.perf_counter()]
    client = start(case, folder)
    times.append(time.perf_counter())
    tokens = greedy(client, prompts)
    times.append(time.perf_counter())
    for i, prompt in enumerate(prompts):
        client.submit(f"m{i}", prompt + tokens[i], max_tokens=0, prompt_logprobs=2)
    client.run()
    margins = [
        [_margin(at.top) for at in client.prompt_logprobs[f"m{i}"][len(prompt) :]]
        for i, prompt in enumerate(prompts)
    ]
    log_probs = _score(client, scored)
    times.append(time.perf_counter())
    client.close()
    names = ("ready", "tokens", "scores")
    seconds = {name: b - a for name, a, b in zip(names, times, times[1:], strict=False)}
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


def compute_recording(
    case: Case, folder: Path, prompts: list[list[int]], scored: list[int]
) -> Found:
    config = json.loads((folder / "config.json").read_text())
    recorded = recording(
        torch.device(case.device),
        config["index_topk"],
        config["num_experts_per_tok"],
        num_layers=config["num_hidden_layers"],
        most_tokens=1024,
    )
    with recorded as choices:
        found = compute(case, folder, prompts, scored)
    asked = {tuple(prompt) for prompt in prompts}
    for kind in (choices.selected, choices.experts):
        for place in [place for place in kind if place[0] not in asked]:
            del kind[place]
    return replace(found, choices=choices)


def case_main(case: Case, out: Path, *what: Any) -> None:
    if case.reads_tables:
        engine.loading.local_attention = TableAttention  # type: ignore[assignment]
    found = (compute_recording if case.records else compute)(case, *what)
    out.write_bytes(pickle.dumps(found))
    print(f"{case.name}: {_seconds(found.seconds)}", flush=True)


def take_over_main(
    case: Case, out: Path, folder: Path, prompts: list[list[int]], choices: bytes
) -> None:
    """Writes tokens, whether the choices are right, and how they are in words. The choices come
    pickled: as they are, each of their tensors would travel in shared memory of its own."""
    with taking_over(pickle.loads(choices)) as verdict:
        tokens = greedy(start(case, folder), prompts)
    out.write_bytes(pickle.dumps((tokens, verdict.is_right, str(verdict))))


def _seconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())


def run_processes(
    targets: list[tuple[Callable[..., None], Case, tuple[Any, ...], float]],
) -> list[Any]:
    """What each of (function, case, arguments, limit in seconds) wrote, or in words why it wrote
    nothing, all at once in processes of their own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        outs = [Path(scratch) / str(i) for i in range(len(targets))]
        processes = [
            context.Process(target=main, args=(case, out, *arguments))
            for (main, case, arguments, _), out in zip(targets, outs, strict=True)
        ]
        for process in processes:
            process.start()
        found: list[Any] = []
        for (*_, limit_s), process, out in zip(targets, processes, outs, strict=True):
            process.join(max(0.0, began + limit_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
                found.append(f"ended after {limit_s:.0f} s, its limit")
            elif process.exitcode:
                found.append(f"failed with exit code {process.exitcode}; its output says why")
            else:
                found.append(pickle.loads(out.read_bytes()))
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
    found = differences(expected, other)
    per_token = oracle.divergences(expected.log_probs, other.log_probs)
    return {
        "equal_prompts": len(expected.tokens) - len(found),
        "differences": [str(difference) for difference in found],
        "divergence_mean": float(per_token.mean()),
        "divergence_mean_first_256": float(per_token[:NUM_FIRST].mean()),
        "divergence_max": float(per_token.max()),
        "agreement": oracle.agreement(expected.log_probs, other.log_probs),
    }


def is_right(case: Case, row: dict[str, Any]) -> bool:
    """NaN is not."""
    if case.dtype == "float32" and row["differences"] and not row.get("choices_explain"):
        return False
    return bool(row["divergence_mean"] <= MAX_DIVERGENCE)


def table_of(rows: dict[str, Any], num_prompts: int) -> Table:
    table = Table("case", "equal", "KL mean", "first 256", "KL max", "agreement")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['equal_prompts']} of {num_prompts}",
            f"{row['divergence_mean']:.2e}",
            f"{row['divergence_mean_first_256']:.2e}",
            f"{row['divergence_max']:.2e}",
            f"{row['agreement']:.4f}",
        )
    return table


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
    parser.add_argument(
        "--take-over", action="store_true", help="choices, also where no token differs"
    )
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
    found = run_processes(
        [
            (case_main, case, (folder, prompts, scored), limits_s[torch.device(case.device).type])
            for case in cases
        ]
    )
    rows: dict[str, Any] = {}
    red: list[str] = []
    for case, result in zip(cases, found, strict=True):
        if isinstance(result, str) or isinstance(found[0], str):
            red.append(f"{case.name}: {result if isinstance(result, str) else 'nothing beside it'}")
            continue
        rows[case.name] = row = compare(found[0], result) | {"seconds": result.seconds}
        if result.choices is not None and (row["differences"] or args.take_over):
            what = (folder, prompts, pickle.dumps(result.choices))
            (taken,) = run_processes([(take_over_main, cases[0], what, limits_s["cpu"])])
            is_same = not isinstance(taken, str) and taken[0] == result.tokens
            row["choices_explain"] = is_same and taken[1]
            row["choices"] = taken if isinstance(taken, str) else taken[2]
            print(f"{case.name}, its choices taken over: tokens equal {is_same}; {row['choices']}")
            if not row["choices_explain"]:
                red.append(f"{case.name}: choices taken over do not lead to the same tokens")
        if not is_right(case, row):
            red.append(f"{case.name}: tokens differ or the mean divergence exceeds the limit")
        if case.dtype == "float32":
            for text in row["differences"]:
                print(f"{case.name}: {text}")
    console = Console()
    console.print(table_of(rows, len(prompts)))
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
