"""What lies between the engine and the client, measured: time added to each token, and the tokens a
front end can stream.

    python -m benchmarks.control_plane [--json FILE]

1. One greedy request through `plait serve`, colocated and handed over: what a client waits for each
   token beyond the time in which the worker computes it (its own plait_step_seconds of the same
   run); the answers must equal those of an engine in this process.
2. `plait frontend` on one core with a worker that says tokens as fast as they can be taken, and
   clients that only read: streamed tokens a second, for steps of different batch sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from engine.channel import Channel
from engine.messages import Abort, Heartbeat, Hello, Outputs, Register, Submit
from engine.pull.cache import default_model_path
from engine.types import Load, ModelId, TokenOut
from server.tokenizer import Tokenizer
from tests.engine.client import Client
from tests.served import Served, serving
from tests.tiny import save_dsa_chat

NUM_TOKENS = 200
NUM_RUNS = 5
TEXT_TOKENS = range(500, 900)  # words of the default model's vocabulary


def in_process(model: Path, prompt: list[int]) -> list[int]:
    client = Client(model, max_total_tokens=8192)
    client.submit("r", prompt, max_tokens=NUM_TOKENS, temperature=0.0)
    client.run()
    return client.tokens["r"]


async def through(url: str, prompt: list[int]) -> tuple[str, float]:
    """The text, and the mean time between chunks after the second one."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    arrivals, text = [], ""
    async with (
        httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                arrivals.append(time.perf_counter())
    return text, (arrivals[-1] - arrivals[2]) / (len(arrivals) - 3)


def step_seconds(served: Served, role: str) -> tuple[float, float]:
    """Seconds in steps and their number, of the worker that decodes."""
    seen = served.metrics()
    where = f'role="{role}"'
    return seen("plait_step_seconds_sum", where), seen("plait_step_requests_count", where)


def added_latency() -> dict[str, float]:
    prompt = [(7 * i * i + 13 * i) % 190 + 300 for i in range(300)]
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = save_dsa_chat(Path(scratch) / "tiny", default_model_path())
        expected = Tokenizer.from_folder(model).decode(in_process(model, prompt))
        for name, role, flags in (
            ("colocated", "colocated", ["--colocated"]),
            ("fleet", "decode", []),
        ):
            with serving(model, *flags) as served:
                served.wait_ready()
                runs = []
                asyncio.run(through(served.url, prompt))
                for _ in range(NUM_RUNS):
                    served.until(lambda: served.metrics()("plait_requests_running") == 0)
                    seconds, steps = step_seconds(served, role)
                    text, gap = asyncio.run(through(served.url, prompt))
                    served.until(lambda: served.metrics()("plait_requests_running") == 0)
                    after_s, after = step_seconds(served, role)
                    step = (after_s - seconds) / (after - steps)
                    runs.append((gap - step, gap, step))
                    if text != expected:
                        raise SystemExit("the answers differ: no figures")
                served.stop()
            added, gap, step = sorted(runs)[NUM_RUNS // 2]
            found |= {f"{name}_token_ms": 1e3 * gap, f"{name}_step_ms": 1e3 * step}
            found[f"{name}_added_ms"] = 1e3 * added
    return found


def talk(address: str, vocab_size: int, num_tokens: int) -> None:
    """A worker that says `num_tokens` tokens of each request, one of each a step."""
    channel = Channel("worker", "talker", bind=address)
    hello = Hello(
        instance_id="talker", role="colocated", pid=os.getpid(), host="", model="",
        vocab_size=vocab_size, context_length=8192, page_size=64, total_pages=100_000,
        model_id=ModelId(fingerprint="", dtype=""),
    )  # fmt: skip
    live: dict[str, int] = {}
    waiting: list[str] = []
    front = ""
    while True:
        for peer, message in channel.receive(0.0 if live else 0.05):
            match message:
                case Register():
                    front = peer
                    channel.send(front, hello)
                case Submit(request=request):
                    waiting.append(request.rid)
                case Abort(rid=rid):
                    live.pop(rid, None)
        if front:
            channel.send(front, Heartbeat(Load(num_running=len(live))))
        if waiting and not live:  # all at once, when the whole batch is here
            time.sleep(0.2)
            for _, message in channel.receive(0.0):
                if isinstance(message, Submit):
                    waiting.append(message.request.rid)
            live, waiting = dict.fromkeys(waiting, 0), []
        outs = []
        for rid, index in list(live.items()):
            is_last = index == num_tokens - 1
            token = TEXT_TOKENS[index % len(TEXT_TOKENS)]
            outs.append(
                TokenOut(
                    rid=rid, index=index, ids=[token], finish_reason="length" if is_last else None
                )
            )
            live[rid] += 1
            if is_last:
                del live[rid]
        if outs:
            channel.send(front, Outputs(outs))


async def read_stream(host: str, port: int, num_tokens: int) -> int:
    """Bytes read; the stream is not parsed, so that the client does not set the pace."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
    body = json.dumps(
        {"model": "smollm2-135m-dsv32", "prompt": "hi", "max_tokens": num_tokens, "stream": True}
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    num_bytes, tail = 0, b""
    while b"data: [DONE]" not in tail:
        data = await reader.read(1 << 20)
        if not data:
            raise SystemExit("a stream broke: no figures")
        num_bytes += len(data)
        tail = (tail + data)[-64:]
    writer.close()
    return num_bytes


def frontend_rate(batch: int, num_tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        address = f"ipc://{scratch}/w"
        worker = multiprocessing.get_context("spawn").Process(
            target=talk, args=(address, 49152, num_tokens), daemon=True
        )
        worker.start()
        command = [sys.executable, "-m", "server", "frontend", "--workers", address, "--port", "0"]
        front = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        cores = sorted(os.sched_getaffinity(0))
        try:
            assert front.stdout is not None
            url = next(m[1] for line in front.stdout if (m := re.search(r"(http://\S+)", line)))
            os.sched_setaffinity(front.pid, {cores[0]})
            for thread in Path(f"/proc/{front.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {cores[0]})
            if worker.pid is not None and len(cores) > 1:
                os.sched_setaffinity(worker.pid, set(cores[1:]))
                os.sched_setaffinity(0, set(cores[1:]))
            host, port = url.removeprefix("http://").split(":")

            async def read_all() -> list[int]:
                return await asyncio.gather(
                    *(read_stream(host, int(port), num_tokens) for _ in range(batch))
                )

            started = time.perf_counter()
            asyncio.run(read_all())
            seconds = time.perf_counter() - started - 0.2  # the talker's wait for the batch
        finally:
            os.sched_setaffinity(0, set(cores))
            front.send_signal(signal.SIGTERM)
            front.wait()
            worker.kill()
            worker.join()
    return {
        "streams": batch,
        "tokens": batch * num_tokens,
        "tokens_per_s": batch * num_tokens / seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(width=110, highlight=False)
    found: dict[str, Any] = {"latency": added_latency()}
    table = Table("time per output token", "ms", title="a small model, one request")
    for name, value in found["latency"].items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    found["frontend"] = [frontend_rate(batch, 400) for batch in (1, 8, 64, 256)]
    table = Table(*found["frontend"][0], title="one front end on one core")
    for row in found["frontend"]:
        table.add_row(*(f"{value:,.0f}" for value in row.values()))
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
