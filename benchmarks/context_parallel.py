"""Context parallelism with real processes on a CPU: the same answers from N ranks as from one, what
the group holds, and what it gathers.

    python -m benchmarks.context_parallel [--sizes 2 4 8] [--default-model] [--json FILE]

Prints three tables. Exits with 1 where a token differs or an error is above the tolerance.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.pull.cache import default_model_path
from tests.engine.client import Client
from tests.tiny import save_dsa, save_llama, save_mla

PAGE = 64
TOLERANCE = 1e-3  # of log-probabilities, float32; the largest seen is printed
NUM_GREEDY = 32
MODES = ("in-seq-split", "round-robin-split")


@dataclass
class Equality:
    model: str
    size: int
    mode: str
    block_tokens: int | None
    max_abs_error: dict[str, float] = field(default_factory=dict)  # by scenario
    tokens_equal: bool = True


def prompt(num: int, seed: int, vocab_size: int = 190) -> list[int]:
    return [(7 * i * i + 13 * i + 31 * seed) % vocab_size + 3 for i in range(num)]


def ask(client: Client, rid: str, token_ids: list[int], num: int) -> None:
    client.submit(rid, token_ids, max_tokens=num, temperature=0.0, logprobs=20)


def scenarios(client: Client, size: int, long: int) -> dict[str, list[str]]:
    """Runs them all; the rids of each."""
    ask(client, "cold", prompt(long, 1), NUM_GREEDY)
    client.run()
    ask(client, "hit", [*prompt(long, 1)[: long - 30], 9, 8, 7], NUM_GREEDY)
    client.run()
    three = {"batch-a": 33, "batch-b": 101, "batch-c": long - 1}
    for seed, (rid, length) in enumerate(three.items(), 10):
        ask(client, rid, prompt(length, seed), 4)
    client.run()
    shorts = [f"short-{n}" for n in range(1, 2 * size + 2)]
    for n, rid in enumerate(shorts, 1):
        ask(client, rid, prompt(n, 50 + n), 2)
    client.run()
    again = prompt(77, 99)
    rids = []
    for i in range(NUM_GREEDY):  # each token by prefilling all before it
        ask(client, f"re-{i}", again, 1)
        client.run()
        again = again + client.tokens[f"re-{i}"]
        rids.append(f"re-{i}")
    return {
        "cold": ["cold"],
        "hit": ["hit"],
        "batch": list(three),
        "short": shorts,
        "re-prefill": rids,
    }


def compare(group: Client, alone: Client, names: dict[str, list[str]], row: Equality) -> None:
    for scenario, rids in names.items():
        worst = 0.0
        for rid in rids:
            row.tokens_equal &= group.tokens[rid] == alone.tokens[rid]
            for got, want in zip(group.logprobs[rid], alone.logprobs[rid], strict=True):
                a, b = dict(got.top), dict(want.top)
                worst = max([worst, *(abs(a[t] - b[t]) for t in a.keys() & b.keys())])
        row.max_abs_error[scenario] = worst


def equality(
    folders: dict[str, Path], sizes: list[int], quick: bool, context: int
) -> list[Equality]:
    rows = []
    for name, folder in folders.items():
        alone = Client(folder, max_total_tokens=64 * PAGE, chunked_prefill_size=4096)
        names = scenarios(alone, max(sizes), context)
        cases = [
            (size, mode, block)
            for size in sizes
            for mode in MODES
            for block in ((PAGE,) if quick else (PAGE, 3 * PAGE, 100_000))
            if size < 8 or (mode, block) == (MODES[0], 3 * PAGE)
        ]
        for size, mode, block in track(cases, description=name, console=Console(stderr=True)):
            group = Client(
                folder,
                max_total_tokens=64 * PAGE,
                chunked_prefill_size=117,  # a multiple of nothing here
                cp_size=size,
                cp_mode=mode,
                cp_stream_block_tokens=block,
            )
            row = Equality(name, size, mode, block)
            scenarios(group, max(sizes), context)
            compare(group, alone, names, row)
            group.close()
            rows.append(row)
    return rows


def capacity(folder: Path, sizes: list[int]) -> list[dict[str, object]]:
    """A prompt of 3.5 times what one rank holds; pool and workspace bytes."""
    rows = []
    for size in (1, *sizes):
        client = Client(
            folder,
            max_total_tokens=8 * PAGE,
            chunked_prefill_size=100,
            cp_size=size,
            cp_stream_block_tokens=4 * PAGE,
        )
        pool_bytes = client.engine.capacity.physical_tokens * client.engine.bytes_per_token
        long = int(3.5 * 8 * PAGE)
        served = size >= 4
        if served:
            ask(client, "long", prompt(long, 5), 2)
            client.run()
        rows.append(
            {
                "size": size,
                "physical_tokens_per_rank": client.engine.capacity.physical_tokens,
                "logical_tokens": client.engine.capacity.logical_tokens,
                "pool_bytes_per_rank": pool_bytes,
                "prompt_served": long if served else None,
                "workspace_bytes": client.engine.leader.stream_workspace_bytes,
            }
        )
        client.close()
    return rows


def gathering(folder: Path, size: int, contexts: list[int]) -> list[dict[str, object]]:
    """What one rank receives in a whole prefill against the least an all-gather can do."""
    rows = []
    chunk = 1024
    for context in contexts:
        for block in (1024, context):
            client = Client(
                folder,
                max_total_tokens=-(-(context + PAGE) // (size * PAGE)) * PAGE,
                chunked_prefill_size=chunk,
                cp_size=size,
                cp_stream_block_tokens=block,
                context_length=None,
            )
            ask(client, "r", prompt(context, 3), 1)
            client.run()
            received = client.engine.leader.mesh.gathered_bytes
            ends = [min(a + chunk, context) for a in range(0, context, chunk)]
            # Every step reads all rows up to its end, and a rank has 1/N of them.
            least = sum(ends) * client.engine.bytes_per_token * (size - 1) / size
            rows.append(
                {
                    "context": context,
                    "block_tokens": block,
                    "received_bytes": received,
                    "least_bytes": int(least),
                    "ratio": received / least,
                    "workspace_bytes": client.engine.leader.stream_workspace_bytes,
                }
            )
            client.close()
    return rows


def with_long_context(folder: Path) -> Path:
    """The model as if it had been trained on 32k tokens: for sizes, not for sense."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": 32_768}))
    return folder


def show(title: str, rows: list[dict[str, object]]) -> None:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(
            *(
                f"{v:.3g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v)
                for v in row.values()
            )
        )
    Console(width=150, highlight=False).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--models", nargs="+", default=["dsa", "mla", "gqa"], choices=["dsa", "mla", "gqa"]
    )
    parser.add_argument("--default-model", action="store_true", help="that one, not the small ones")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        kinds = {"dsa": save_dsa, "mla": save_mla, "gqa": save_llama}
        folders = {}
        for name, save in kinds.items():
            (Path(scratch) / name).mkdir()
            folders[name] = save(Path(scratch) / name)
        if args.default_model:
            rows = equality({"default": default_model_path()}, args.sizes, True, 150)
            found = {"equality": [asdict(row) for row in rows]}
        else:
            rows = equality({m: folders[m] for m in args.models}, args.sizes, False, 301)
            found = {"equality": [asdict(row) for row in rows]}
            found["capacity"] = capacity(folders["dsa"], [2, 4])
            found["gathering"] = gathering(with_long_context(folders["dsa"]), 2, [1024, 16_000])
    flat = [
        {
            **{k: v for k, v in asdict(row).items() if k not in ("max_abs_error", "tokens_equal")},
            **row.max_abs_error,
            "tokens": "equal" if row.tokens_equal else "DIFFER",
        }
        for row in rows
    ]
    show("max abs error of log-probabilities, N ranks against one", flat)
    for name in ("capacity", "gathering"):
        if name in found:
            show(name, found[name])
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    worst = max(max(row.max_abs_error.values()) for row in rows)
    return 0 if all(row.tokens_equal for row in rows) and worst < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
