"""The committed dashboards' queries as Prometheus is asked them, and whether anything comes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scripts.dashboards.build import FOLDER
from scripts.dashboards.monitors import Monitors

STEP_S = 5.0
# What Grafana puts in a query's place.
VARIABLES = {"$__rate_interval": "30s", "$job": "plait", "$ttft": "2.5", "$itl": "0.1"}


@dataclass(frozen=True, slots=True)
class Query:
    dashboard: str
    panel: str
    legend: str
    expr: str  # with its variables filled in


def filled_in(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def load(name: str) -> dict[str, Any]:
    """A dashboard as it is committed."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def queries_of(dashboard: dict[str, Any]) -> Iterator[Query]:
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield Query(
                dashboard["title"],
                panel["title"],
                target["legendFormat"],
                filled_in(target["expr"]),
            )


def num_numbers(monitors: Monitors, query: Query, start_s: float, end_s: float) -> int:
    """How many points a panel would draw; NaN is none."""
    series = monitors.query_range(query.expr, start_s, end_s, STEP_S)
    return sum(math.isfinite(float(value)) for one in series for _, value in one["values"])
