"""All that is measured and tested on GPUs, in one command: parts in order, each with a time limit.

    python -m benchmarks.gpu_suite [--parts tests-gpu,kernels] [--limit-s 1500] [--out FOLDER]

Each part is a process of its own; one that fails or is ended does not stop the next. FOLDER gets
suite.log, what the parts printed, and suite.json, how they ended and what they found, both kept up
to date. Exits with 1 where a part did not pass or was not reached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.process import unwind_when_asked

_TAIL_LINES = 15  # of a part that did not pass


@dataclass(frozen=True, slots=True)
class Part:
    """`arguments` are python's; {json} stands for a file that the part writes its results to."""

    name: str
    arguments: str
    limit_s: float
    num_gpus: int = 1
    kernels: str = ""  # compiled ones are kept under this name, not where they are else


def _engine_parts(model: str) -> list[Part]:
    engine = f"-m benchmarks.gpu_engine --model {model} --json {{json}}"
    ready = f"{engine} --no-gate --prefill --decode"
    cases = "--prefill 8192 32768 --decode 1x1024 32x8192 128x1024 128x8192"
    return [
        Part(f"ready-cold-{model}", ready, 240, kernels=model),
        Part(f"ready-cached-{model}", ready, 180, kernels=model),
        Part(f"engine-{model}", f"{engine} {cases}", 540, kernels=model),
    ]


_PYTEST = "-m pytest -c tests/gpu/pytest.ini"
PARTS = [
    Part("tests-kernels", f"{_PYTEST} tests/kernels/gpu", 480),
    Part("tests-gpu", f"{_PYTEST} tests/gpu", 600),
    Part("default-model", "-m benchmarks.gpu_default_model --json {json}", 600),
    Part("serve", "-m benchmarks.gpu_serve --split --dtype auto float32 --json {json}", 480),
    Part("kernels", "-m benchmarks.gpu_kernels --output {json}", 300),
    Part("attention", "-m benchmarks.gpu_attention --json {json}", 300),
    *_engine_parts("dsv32-5l"),
    Part("fp8-weights", "-m benchmarks.gpu_fp8_weights --output {json}", 300),
    *_engine_parts("dsv32-5l-fp8"),
    *_engine_parts("llama-1b"),
    Part("host-tier-copies", "-m benchmarks.host_tier_copies --json {json}", 300),
    Part("cp", "-m benchmarks.cp_gpu --json {json}", 480, num_gpus=2),
    Part("handoff", f"{_PYTEST} tests/gpu/test_handoff.py", 300, num_gpus=2),
]


@dataclass(frozen=True, slots=True)
class Ended:
    part: str
    rc: int | None  # None: ended at its limit
    seconds: float
    result: Any = None  # its JSON

    @property
    def outcome(self) -> str:
        if self.rc is None:
            return "ended at its limit"
        return "passed" if self.rc == 0 else f"failed, {self.rc}"


def run_part(part: Part, extra: list[str], limit_s: float, scratch: Path, log: Path) -> Ended:
    """What the part prints is added to `log`; at its limit it and what it started are ended."""
    out = scratch / f"{part.name}.json"
    arguments = [word.replace("{json}", str(out)) for word in part.arguments.split()]
    env = dict(os.environ)
    if part.kernels:
        env["TRITON_CACHE_DIR"] = str(scratch / part.kernels)
    rc: int | None = None
    began = time.monotonic()
    with log.open("a") as stream:
        stream.write(f"\n=== {part.name}: python {' '.join(arguments + extra)}\n")
        stream.flush()
        process = subprocess.Popen(
            [sys.executable, "-u", *arguments, *extra],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            rc = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            stream.write(f"=== {part.name}: ended after {limit_s:.0f} s\n")
        finally:
            _end_session(process)
    seconds = time.monotonic() - began
    return Ended(part.name, rc, seconds, json.loads(out.read_text()) if out.exists() else None)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def choose(names: str | None, num_gpus: int) -> list[Part]:
    """The parts that are asked for, in the suite's order; without names, all that the GPUs suffice
    for. Raises ValueError for a name that is none, or one whose part needs more GPUs."""
    if names is None:
        return [part for part in PARTS if part.num_gpus <= num_gpus]
    wanted = names.split(",")
    accepted = [part.name for part in PARTS]
    for name in wanted:
        if name not in accepted:
            raise ValueError(f"--parts {name}: accepted are {', '.join(accepted)}")
    chosen = [part for part in PARTS if part.name in wanted]
    for part in chosen:
        if part.num_gpus > num_gpus:
            raise ValueError(
                f"--parts {part.name}: needs {part.num_gpus} GPUs, here are {num_gpus}"
            )
    return chosen


def run_parts(
    parts: list[Part], extra: dict[str, list[str]], limit_s: float, out: Path, about: dict[str, Any]
) -> list[Ended]:
    """Those that were reached within the limit. `extra`: arguments more, by part."""
    console, ended = Console(), []
    out.mkdir(parents=True, exist_ok=True)
    log = out / "suite.log"
    log.write_text("")
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TimeElapsedColumn())
    deadline = time.monotonic() + limit_s
    with (
        tempfile.TemporaryDirectory() as scratch,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("", total=len(parts))
        for part in parts:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            progress.update(task, description=part.name)
            begin = log.stat().st_size
            limit = min(part.limit_s, left_s)
            ended.append(run_part(part, extra.get(part.name, []), limit, Path(scratch), log))
            last = ended[-1]
            console.print(f"{last.part}: {last.outcome}, {last.seconds:.0f} s", highlight=False)
            if last.rc != 0:
                said = log.read_bytes()[begin:].decode(errors="replace").splitlines()
                console.print("\n".join(said[-_TAIL_LINES:]), markup=False, highlight=False)
            rows = {e.part: {"rc": e.rc, "seconds": e.seconds, "result": e.result} for e in ended}
            (out / "suite.json").write_text(json.dumps(about | {"parts": rows}, indent=1) + "\n")
            progress.advance(task)
    table = Table("part", "rc", "seconds", "outcome")
    for e in ended:
        table.add_row(e.part, "" if e.rc is None else str(e.rc), f"{e.seconds:.0f}", e.outcome)
    for part in parts[len(ended) :]:
        table.add_row(part.name, "", "", "not reached")
    console.print(table)
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument(
        "--parts", help=f"some of: {names} (default: all that the GPUs suffice for)"
    )
    parser.add_argument("--limit-s", type=float, default=3600, help="of the whole (default: 3600)")
    parser.add_argument("--out", type=Path, default=Path("dist/gpu-suite"), metavar="FOLDER")
    parser.add_argument(
        "--source", type=Path, help="of the default model, as for python -m engine.pull"
    )
    parser.add_argument("--commit", default="", help="for the JSON: what was measured")
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    try:
        parts = choose(args.parts, num_gpus)
    except ValueError as error:
        parser.error(str(error))
    if not parts:
        parser.error("torch finds no CUDA device; every part needs one")
    unwind_when_asked()  # the part ends, too
    about = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": args.commit,
        "cards": [torch.cuda.get_device_name(i) for i in range(num_gpus)],
        "torch": torch.__version__,
    }
    source = ["--source", str(args.source)] if args.source else []
    extra = {"default-model": source, "serve": source}
    ended = run_parts(parts, extra, args.limit_s, args.out, about)
    return 0 if len(ended) == len(parts) and all(e.rc == 0 for e in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
