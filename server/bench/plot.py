"""A run as one picture: distributions of TTFT, gaps and e2e, and when each token came."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from server.bench.client import RequestResult

BLUE = "#2a6f97"
ORANGE = "#e07a1f"


def draw(results: Sequence[RequestResult], title: str, path: Path) -> None:
    """Write the picture to `path`; its suffix chooses the format. Raises OSError, ValueError."""
    done = [r for r in results if r.error is None]
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(2, 3, height_ratios=(2, 3))
    ttft = [r.ttft_s for r in done if r.ttft_s is not None]
    gaps = [b - a for r in done for a, b in pairwise(r.chunk_times_s)]
    _histogram(figure.add_subplot(grid[0, 0]), ttft, "TTFT, ms")
    _histogram(figure.add_subplot(grid[0, 1]), gaps, "ITL, ms")
    _histogram(figure.add_subplot(grid[0, 2]), [r.e2e_s for r in done], "e2e, ms")
    _timeline(figure.add_subplot(grid[1, :]), results)
    figure.savefig(path, dpi=130)


def _histogram(axes: Axes, values_s: Sequence[float], label: str) -> None:
    axes.hist([value * 1000 for value in values_s], bins=30, color=BLUE)
    axes.set_xlabel(label)
    axes.set_ylabel("count")


def _timeline(axes: Axes, results: Sequence[RequestResult]) -> None:
    """One row a request in order of arrival: a line while it waits for text, a dot a piece."""
    times: list[float] = []
    rows: list[int] = []
    for row, result in enumerate(sorted(results, key=lambda r: r.start_s)):
        first_s = result.chunk_times_s[0] if result.chunk_times_s else result.end_s
        axes.plot([result.start_s, first_s], [row, row], color=ORANGE, linewidth=1)
        times += result.chunk_times_s
        rows += [row] * len(result.chunk_times_s)
    axes.scatter(times, rows, s=3, color=BLUE, linewidths=0)
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("request")
    axes.set_title("orange: waiting for the first text; blue: each piece of text", fontsize=9)
