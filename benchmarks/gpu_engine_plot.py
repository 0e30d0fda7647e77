"""What benchmarks/gpu_engine.py measured, beside vLLM's figures for the same work:

python -m benchmarks.gpu_engine_plot benchmarks/results/gpu_engine_*.json --png gpu_engine.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def draw(ax: Axes, run: dict[str, Any], keys: list[str], unit: str, label: str) -> None:
    """One group of bars for each of `keys`; a peer that has no figure for one has no bar there."""
    ours = [run["found"][key][unit] for key in keys]
    peers = [run["vllm"].get(key, 0) for key in keys]
    at = range(len(keys))
    ax.bar([x - 0.2 for x in at], ours, 0.4, label=f"plait, {run['dtype']}")
    ax.bar([x + 0.2 for x in at], peers, 0.4, label="vLLM 0.26.0, same card model")
    for x, value in zip(at, ours, strict=True):
        ax.annotate(f"{value:,.4g}", (x - 0.2, value), ha="center", va="bottom", fontsize=7)
    ax.set_xticks(list(at), keys)
    ax.set_ylabel(label)
    ax.set_title(run["model"])
    ax.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--png", type=Path, required=True)
    args = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in args.runs]
    figure = Figure(figsize=(9, 3.2 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), 2, squeeze=False)
    for (left, right), run in zip(grid, runs, strict=True):
        prefills = [key for key in run["found"] if key.startswith("prefill")]
        decodes = [key for key in run["found"] if not key.startswith("prefill")]
        draw(left, run, prefills, "tokens_per_s", "prompt tokens/s")
        draw(right, run, decodes, "step_ms", "ms a decode step (contexts)")
    figure.savefig(args.png, dpi=120)


if __name__ == "__main__":
    main()
