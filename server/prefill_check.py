"""`plait prefill-check`: one prompt through a prefill group, without HTTP, and what it took.

Prints the distribution of the next token, the greedy continuation, the group's capacities, the
pages on each rank, and what the ranks gathered. The same numbers for one rank and for several show
that the group computes what one rank does.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.channel import Channel, Event
from engine.messages import Drain, Heartbeat, Hello, Outputs, Submit
from engine.process import unwind_when_asked
from engine.types import MetricFamily, Request, SamplingParams, TokenOut
from server import logs, model_source
from server.bench.workload import corpus
from server.launcher import socket_folder
from server.options.config import ConfigError, ServeConfig
from server.options.loading import load
from server.supervisor import KILL_AFTER_S, PACKAGE_ROOT, worker_command
from server.tokenizer import Tokenizer, TokenizerError
from server.topology import worker_config

NUM_SHOWN = 5  # likeliest next tokens
MAX_PROMPT_TOKENS = 10_000_000  # of --prompt-tokens: what fits a message
_POLL_S = 0.2


class PrefillCheckError(Exception):
    """The check could not be made; the worker's own error is on stderr."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one check found. Sizes are of the whole check, the greedy tokens included."""

    model: str
    cp_size: int
    prompt_tokens: int
    cached_tokens: int
    prefill_s: float  # until the first token
    greedy: list[int]
    text: str
    next_token: list[tuple[int, str, float]]  # token id, text, log-probability; likeliest first
    logical_tokens: int
    physical_tokens_per_rank: int
    used_pages_by_rank: list[int]
    stream_workspace_bytes: int
    gathered_bytes_by_rank: list[int]
    gather_wait_s_by_rank: list[float]


def main(args: dict[str, object]) -> int:
    """Exit code 0, or 1 where the check could not be made. ConfigError for a bad option."""
    own = {name: args.pop(name) for name in ("prompt", "prompt_file", "prompt_tokens", "tokens")}
    json_file = args.pop("json")
    config_file = args.pop("config", None)
    options = load(args, None if config_file is None else str(config_file))
    logs.configure(options.log_level)
    if json_file is not None and not Path(str(json_file)).parent.is_dir():
        raise ConfigError(f"--json {json_file}: expected a file in a folder that exists")
    unwind_when_asked()  # the worker and the folder of its socket go as well
    try:
        folder = model_source.resolve(options.model)
        tokenizer = Tokenizer.from_folder(folder)
        report = check(options, folder, tokenizer, _prompt_ids(own, tokenizer), _count(own))
    except (
        PrefillCheckError,
        model_source.ModelSourceError,
        TokenizerError,
        OSError,
        subprocess.TimeoutExpired,
    ) as error:
        print(f"plait prefill-check: {error}", file=sys.stderr)
        return 1
    _print(report)
    if json_file is not None:
        Path(str(json_file)).write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 0


def check(
    options: ServeConfig,
    folder: Path,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    num_tokens: int,
) -> Report:
    """Start a group, prefill, decode greedily, end the group. Raises PrefillCheckError."""
    with socket_folder() as private:
        address = f"ipc://{private.path}/worker"
        channel = Channel("frontend")
        channel.dial(address)
        told = worker_config(
            options,
            "colocated",
            0,
            model_path=folder,
            listen_address=address,
            cp_size=options.prefill_cp_size or 1,
            parent_pid=os.getpid(),
        )
        process = subprocess.Popen(worker_command(told), cwd=PACKAGE_ROOT)
        try:
            report = _Session(channel, process).check(options, tokenizer, prompt_ids, num_tokens)
            process.wait(KILL_AFTER_S)
            return report
        finally:
            process.kill()  # where it is still there: nobody waits for its answer any more
            process.wait()
            channel.close()


class _Session:
    """The talk with one worker."""

    def __init__(self, channel: Channel, process: subprocess.Popen[bytes]) -> None:
        self._channel = channel
        self._process = process
        self._worker = ""
        self._hello: Hello | None = None
        self._outs: list[TokenOut] = []
        self._families: list[MetricFamily] = []
        self._num_beats = 0

    def check(
        self,
        options: ServeConfig,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        num_tokens: int,
    ) -> Report:
        while self._hello is None:
            self._receive()
        if len(prompt_ids) + num_tokens > self._hello.context_length:
            raise PrefillCheckError(  # before it is sent: what no message holds is not answered
                f"{len(prompt_ids)} prompt tokens and {num_tokens} more are over the context length"
                f" of {self._hello.context_length}"
            )
        request = Request(
            rid=secrets.token_hex(8),
            token_ids=list(prompt_ids),
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=NUM_SHOWN),
        )
        started = time.perf_counter()
        self._channel.post(self._worker, Submit(request))
        while not self._outs:
            self._receive()
        prefill_s = time.perf_counter() - started
        while self._outs[-1].finish_reason is None:
            self._receive()
        if self._outs[-1].finish_reason == "error":
            raise PrefillCheckError(self._outs[-1].error)
        num_beats = self._num_beats
        while self._num_beats == num_beats:  # the figures as they are after the last step
            self._receive()
        self._channel.post(self._worker, Drain())
        self._channel.receive(_POLL_S)
        greedy = [token for out in self._outs for token in out.ids]
        first = self._outs[0].logprobs[0] if self._outs[0].logprobs else None
        return Report(
            model=options.model_name,
            cp_size=options.prefill_cp_size or 1,
            prompt_tokens=len(prompt_ids),
            cached_tokens=self._outs[0].cached_tokens,
            prefill_s=prefill_s,
            greedy=greedy,
            text=tokenizer.decode(greedy),
            next_token=[
                (token, tokenizer.decode([token]), logprob)
                for token, logprob in (first.top if first else [])
            ],
            logical_tokens=int(self._value("plait_pool_tokens", kind="logical")),
            physical_tokens_per_rank=int(self._value("plait_pool_tokens", kind="physical")),
            used_pages_by_rank=[int(v) for v in self._by_rank("plait_pool_used_pages")],
            stream_workspace_bytes=int(self._value("plait_cp_stream_workspace_bytes")),
            gathered_bytes_by_rank=[int(v) for v in self._by_rank("plait_cp_gathered_bytes")],
            gather_wait_s_by_rank=self._by_rank("plait_cp_gather_wait_seconds"),
        )

    def _receive(self) -> None:
        if self._process.poll() is not None:
            code = self._process.returncode
            raise PrefillCheckError(f"the worker ended with exit code {code}; its error is above")
        for address, message in self._channel.receive(_POLL_S):
            self._take(address, message)

    def _take(self, address: str, message: Event) -> None:
        match message:
            case Hello():
                self._worker, self._hello = address, message
            case Outputs(outs=outs):
                self._outs += outs
            case Heartbeat(metrics=families):
                self._families = families
                self._num_beats += 1
            case _:
                pass

    def _samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        family = next(f for f in self._families if f.name == name)
        return [(s.labels, s.value) for s in family.samples if not s.name.endswith("_created")]

    def _value(self, name: str, **labels: str) -> float:
        return next(value for found, value in self._samples(name) if found == labels)

    def _by_rank(self, name: str) -> list[float]:
        return [v for _, v in sorted(self._samples(name), key=lambda s: int(s[0]["rank"]))]


def _prompt_ids(own: dict[str, object], tokenizer: Tokenizer) -> list[int]:
    if own["prompt_file"] is not None:
        text = _read(Path(str(own["prompt_file"])))
    else:
        text = corpus() if own["prompt"] is None else str(own["prompt"])
    ids = tokenizer.encode(text)
    if own["prompt"] is None and own["prompt_file"] is None:
        num = 700 if own["prompt_tokens"] is None else int(str(own["prompt_tokens"]))
        if not 1 <= num <= MAX_PROMPT_TOKENS:
            raise ConfigError(
                f"--prompt-tokens {num}: expected a whole number from 1 to {MAX_PROMPT_TOKENS}"
            )
        ids = (ids * math.ceil(num / len(ids)))[:num]
    if not ids:
        raise ConfigError("--prompt: expected text of at least one token")
    return ids


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {path}: {error}; expected UTF-8 text") from error


def _count(own: dict[str, object]) -> int:
    num = int(str(own["tokens"]))
    if num < 1:
        raise ConfigError(f"--tokens {num}: expected a whole number, 1 or more")
    return num


def _print(report: Report) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    table = Table("token", "text", "log-probability", title="next token", title_justify="left")
    for token, text, logprob in report.next_token:
        table.add_row(str(token), json.dumps(text, ensure_ascii=False), f"{logprob:.6f}")
    console.print(table)
    figures = Table("figure", "value", title=f"{report.model}, {report.cp_size} ranks")
    for name, value in asdict(report).items():
        if name not in ("next_token", "model", "cp_size"):
            shown = f"{value:.3f}" if isinstance(value, float) else str(value)
            figures.add_row(name, shown.replace(os.linesep, "⏎"))
    console.print(figures)
