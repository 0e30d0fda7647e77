"""Dashboards as pictures: their panels' numbers of one run, drawn without a Grafana."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.dashboards.asked import STEP_S, filled_in, load
from scripts.dashboards.build import DASHBOARDS
from scripts.dashboards.monitors import Monitors

COLUMNS = 3


def draw_all(monitors: Monitors, folder: Path, start_s: float, end_s: float) -> None:
    """One PNG a dashboard."""
    folder.mkdir(parents=True, exist_ok=True)
    for board in DASHBOARDS:
        dashboard = load(board.name)
        panels = dashboard["panels"]
        num_rows = -(-len(panels) // COLUMNS)
        figure = Figure(figsize=(5 * COLUMNS, 3 * num_rows), layout="constrained")
        figure.suptitle(dashboard["title"])
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(num_rows, COLUMNS, i + 1)
            _draw(axes, monitors, panel, start_s, end_s)
        figure.savefig(folder / f"{board.name}.png", dpi=80)


def _draw(
    axes: Axes, monitors: Monitors, panel: dict[str, Any], start_s: float, end_s: float
) -> None:
    axes.set_title(f"{panel['title']} ({panel['fieldConfig']['defaults']['unit']})", fontsize=9)
    for target in panel["targets"]:
        for series in monitors.query_range(filled_in(target["expr"]), start_s, end_s, STEP_S):
            times = [at - start_s for at, _ in series["values"]]
            values = [float(value) for _, value in series["values"]]
            legend = _filled_in(target["legendFormat"], series["metric"])
            axes.plot(times, values, linewidth=1, label=legend)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, loc="upper right")


def _filled_in(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)
