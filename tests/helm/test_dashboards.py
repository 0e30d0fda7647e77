"""The dashboards and alerts as they are committed: current, whole, and of metrics that there are.
That they show something and fire is tried by `python -m scripts.dashboards.check`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from scripts.dashboards import board, build
from scripts.dashboards.asked import Query, num_numbers
from scripts.dashboards.build import DASHBOARDS, FOLDER, text_of
from scripts.dashboards.monitors import Monitors
from tests.documented import DOCS, documented
from tests.helm.queries import Known, faults

GPU_PAGE = Path(build.__file__).parent / "dcgm.prom"
FILES = sorted(FOLDER.glob("*.json"))
RULES = [
    rule for group in yaml.safe_load(build.RULES.read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def known() -> Known:
    recorded = frozenset(rule["record"] for rule in RULES if "record" in rule)
    types = re.findall(r"^# TYPE (\w+) (\w+)$", GPU_PAGE.read_text(), re.MULTILINE)
    of_gpus = {name: (kind, frozenset[str]()) for name, kind in types}
    return Known(documented() | of_gpus, recorded)


def panels(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["panels"]
    return found


def test_the_committed_files_are_what_the_builders_make() -> None:
    made = {f"{dashboard.name}.json": text_of(dashboard) for dashboard in DASHBOARDS}
    assert {file.name: file.read_text() for file in FILES} == made, (
        "run python -m scripts.dashboards.build"
    )
    assert len({json.loads(text)["uid"] for text in made.values()}) == len(made) == 10


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_dashboard_is_whole(file: Path) -> None:
    ids = [panel["id"] for panel in panels(file)]
    titles = [panel["title"] for panel in panels(file)]
    assert len(set(ids)) == len(ids) and len(set(titles)) == len(titles)
    taken: set[tuple[int, int]] = set()
    for panel in panels(file):
        assert panel["fieldConfig"]["defaults"]["unit"] in get_args(board.Unit)
        assert panel["targets"] and all(target["legendFormat"] for target in panel["targets"])
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= board.COLUMNS
        taken |= cells


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_queries_fit_the_metrics(file: Path) -> None:
    exprs = [target["expr"] for panel in panels(file) for target in panel["targets"]]
    assert [fault for expr in exprs for fault in faults(expr, known())] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_fit_the_metrics(rule: dict[str, Any]) -> None:
    assert faults(rule["expr"], known()) == []


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("rate(plait_no_such_total[1m])", "there is no such metric"),
        ("plait_errors_total", "without rate"),
        ("sum(plait_ttft_seconds_sum)", "without rate"),
        ("rate(plait_requests_waiting[1m])", "a gauge under rate"),
        ("rate(plait_requests_waiting_total[1m])", "there is no such metric"),
        ("histogram_quantile(0.5, sum(rate(plait_ttft_seconds_count[1m])))", "no bucket"),
        ("sum(rate(plait_ttft_seconds_bucket[1m]))", "buckets added up"),
        ('rate(plait_errors_total{reason="x"}[1m]) / 2', "no label reason"),
        ("DCGM_FI_DEV_NO_SUCH", "there is no such metric"),
    ],
)
def test_a_query_that_fits_nothing_is_seen(expr: str, fault: str) -> None:
    (found,) = faults(expr, known())
    assert fault in found


def test_no_promql_is_seen() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        faults("sum(rate(plait_errors_total[1m])", known())


def test_every_alert_has_a_runbook_and_is_told_apart() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert set(re.findall(r"^#### (Plait\w+)$", text, re.MULTILINE)) == set(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/observe.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")
    cases = [
        case
        for test in yaml.safe_load(build.RULE_TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    does_not = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fires == does_not == set(ALERTS)


class _Answers(Monitors):
    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[Any]:
        values = {"nothing": [], "no_number": [[0, "NaN"]], "one": [[0, "NaN"], [5, "0"]]}[expr]
        return [{"metric": {}, "values": values}] if values else []


@pytest.mark.parametrize(("expr", "num"), [("nothing", 0), ("no_number", 0), ("one", 1)])
def test_an_empty_panel_is_seen(expr: str, num: int) -> None:
    query = Query("a dashboard", "a panel", "a line", expr)
    assert num_numbers(_Answers("", ""), query, 0, 10) == num
