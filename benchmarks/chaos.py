"""A fleet whose processes are killed and held up while clients stream: what the clients see of it.

    python -m benchmarks.chaos [--kills 20] [--stops 6] [--clients 32] [--json FILE]

Starts `plait serve` (a prefill group of two ranks, a decode worker) with a small random model and
strikes its processes in turn; each time one client leaves at random, and every stream that stays is
compared with its undisturbed run. Prints a table; exits with 1 where a stream differs, a page or a
room is left, or a process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.pull.cache import default_model_path
from tests.e2e.asking import Answer, chunks, client_of, tell, tell_one_at_a_time
from tests.e2e.test_fleet import Fleet, streams
from tests.served import serving
from tests.tiny import save_dsa_chat

STOP_S = 5.0
NUM_TOKENS = 80
TARGETS = ("decode", "rank", "leader")


@dataclass
class Row:
    strike: str
    at_chunk: int
    streams_equal: int
    streams: int
    replays: int
    longest_stream_s: float
    whole_again_s: float  # after the strike, until the fleet says ok and all is given back


async def streaming(
    fleet: Fleet, num: int, strike: str, at_chunk: int, leaves_at: int
) -> list[Answer]:
    """All streams; the strike comes with the at_chunk-th chunk of all together."""
    process = psutil.Process(fleet.pid(strike.split()[1]))
    seen = 0
    struck = asyncio.Event()

    def on_chunk() -> None:
        nonlocal seen
        seen += 1
        if seen == at_chunk:
            process.send_signal(signal.SIGKILL if strike.startswith("kill") else signal.SIGSTOP)
            struck.set()

    async def resume() -> None:
        await struck.wait()
        if strike.startswith("stop"):
            await asyncio.sleep(STOP_S)
            process.send_signal(signal.SIGCONT)

    async def leave() -> None:
        read = 0
        stream = chunks(http, streams(num, NUM_TOKENS)[0])
        async for _ in stream:
            read += 1
            if read > leaves_at:
                await stream.aclose()
                return

    async with client_of(fleet.served) as http:
        asks = streams(num, NUM_TOKENS)
        answers, *_ = await asyncio.gather(
            asyncio.gather(*(tell(http, ask, on_chunk) for ask in asks)), resume(), leave()
        )
    return list(answers)


def run(fleet: Fleet, strikes: list[str], num_clients: int) -> list[Row]:
    draw = random.Random(1)
    expected = asyncio.run(tell_one_at_a_time(fleet.served, streams(num_clients, NUM_TOKENS)))
    assert not any(answer.error for answer in expected), "the undisturbed run has errors"
    rows = []
    for strike in track(strikes, console=Console(stderr=True)):
        fleet.until_whole()
        replays = fleet.served.metrics()("plait_replays_total")
        at_chunk = draw.randrange(num_clients, num_clients * NUM_TOKENS * 3 // 4)
        started = time.monotonic()
        answers = asyncio.run(
            streaming(fleet, num_clients, strike, at_chunk, draw.randrange(NUM_TOKENS))
        )
        ended = time.monotonic()
        fleet.assert_all_given_back()
        rows.append(
            Row(
                strike,
                at_chunk,
                sum(got == want for got, want in zip(answers, expected, strict=True)),
                num_clients,
                int(fleet.served.metrics()("plait_replays_total") - replays),
                ended - started,
                time.monotonic() - ended,
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=6)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    strikes = [f"kill {TARGETS[i % 3]}" for i in range(args.kills)]
    strikes += [f"stop {TARGETS[i % 3]}" for i in range(args.stops)]
    flags = ["--prefill-max-total-tokens", "2048", "--decode-max-total-tokens", "8192"]
    with tempfile.TemporaryDirectory() as scratch:
        model = save_dsa_chat(Path(scratch) / "tiny", default_model_path())
        with serving(model, *flags, "--max-replays", "20") as served:
            served.wait_ready()
            rows = run(Fleet(served), strikes, args.clients)
            processes = served.workers()
            served.stop()
            left = [process for process in processes if process.is_running()]
    table = Table(*asdict(rows[0]))
    for row in rows:
        table.add_row(
            *(f"{v:.1f}" if isinstance(v, float) else str(v) for v in asdict(row).values())
        )
    Console(width=130, highlight=False).print(table)
    num_equal, num = sum(row.streams_equal for row in rows), sum(row.streams for row in rows)
    print(f"{num_equal} of {num} streams equal their undisturbed runs; {len(left)} processes left")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if num_equal == num and not left else 1


if __name__ == "__main__":
    sys.exit(main())
