"""Dashboards as typed values, and their JSON as Grafana 10 and later read it.

Knows Grafana's format and no metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scripts.dashboards.promql import Series

Unit = Literal[
    "short",
    "s",
    "bytes",
    "decbytes",
    "Bps",
    "reqps",
    "ops",
    "percent",
    "percentunit",
    "watt",
    "celsius",
    "megahertz",
]
TAG = "plait"
COLUMNS = 24  # Grafana's grid
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: Unit
    series: tuple[Series, ...]
    text: str = ""  # shown at the panel's corner: what it means, what is good
    is_stacked: bool = False
    columns: int = 8

    def to_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        custom = {
            "fillOpacity": 30 if self.is_stacked else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": {"group": "A", "mode": "normal" if self.is_stacked else "none"},
        }
        return {
            "id": number,
            "type": "timeseries",
            "title": self.title,
            "description": self.text,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.columns, "h": HEIGHT},
            "fieldConfig": {
                "defaults": {"unit": self.unit, "min": 0, "custom": custom},
                "overrides": [],
            },
            "options": {
                "legend": {
                    "displayMode": "list",
                    "placement": "bottom",
                    "showLegend": True,
                    "calcs": [],
                },
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "targets": [
                {
                    "refId": chr(ord("A") + i),
                    "datasource": SOURCE,
                    "editorMode": "code",
                    "range": True,
                    "expr": series.expr,
                    "legendFormat": series.legend,
                }
                for i, series in enumerate(self.series)
            ],
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """A variable that the reader picks from fixed values."""

    name: str
    label: str
    values: tuple[str, ...]
    default: str

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "custom",
            "name": self.name,
            "label": self.label,
            "query": ",".join(self.values),
            "options": [
                {"text": value, "value": value, "selected": value == self.default}
                for value in self.values
            ],
            "current": {"text": self.default, "value": self.default, "selected": True},
            "hide": 0,
            "includeAll": False,
            "multi": False,
        }


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`name` is the file's name and, after "plait-", the uid: links to it stay good."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    choices: tuple[Choice, ...] = ()
    has_job: bool = True  # its queries are of plait's scrape jobs

    def to_json(self) -> dict[str, Any]:
        variables = [_SOURCE_VARIABLE, *([_JOB_VARIABLE] if self.has_job else [])]
        return {
            "uid": f"plait-{self.name}",
            "title": f"plait / {self.title}",
            "tags": [TAG],
            "timezone": "browser",
            "schemaVersion": 39,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": [*variables, *(choice.to_json() for choice in self.choices)]},
            "annotations": {"list": []},
            "links": [
                {
                    "type": "dashboards",
                    "title": "plait",
                    "tags": [TAG],
                    "asDropdown": True,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "panels": _laid_out(self.panels),
        }


_SOURCE_VARIABLE = {
    "type": "datasource",
    "name": "datasource",
    "label": "Prometheus",
    "query": "prometheus",
    "hide": 0,
    "multi": False,
    "includeAll": False,
}
# Front ends and, where they are scraped themselves, workers.
_JOBS = 'label_values({__name__=~"plait_workers_ready|plait_worker_running_requests"}, job)'
_JOB_VARIABLE = {
    "type": "query",
    "name": "job",
    "label": "job",
    "datasource": SOURCE,
    "query": {"query": _JOBS, "refId": "job"},
    "refresh": 2,
    "sort": 1,
    "multi": True,
    "includeAll": True,
    "allValue": ".+",
    "current": {"text": ["All"], "value": ["$__all"], "selected": True},
    "hide": 0,
}


def _laid_out(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Left to right, a new line where one does not fit any more."""
    placed = []
    x = y = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.columns > COLUMNS:
            x, y = 0, y + HEIGHT
        placed.append(panel.to_json(number, x, y))
        x += panel.columns
    return placed
