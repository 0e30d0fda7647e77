"""Writes every dashboard to helm/dashboards: `python -m scripts.dashboards.build`."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.dashboards.board import Dashboard
from scripts.dashboards.handoff import HANDOFF
from scripts.dashboards.memory import HOST, POOL
from scripts.dashboards.queues import QUEUE, ROUTER
from scripts.dashboards.requests import SLO, TRAFFIC
from scripts.dashboards.steps import DECODE, GPU, PREFILL

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "helm" / "dashboards"
RULES = ROOT / "helm" / "alerts" / "plait.yaml"
RULE_TESTS = ROOT / "tests" / "helm" / "alerts.test.yaml"
DASHBOARDS = (SLO, TRAFFIC, QUEUE, PREFILL, POOL, HOST, HANDOFF, DECODE, ROUTER, GPU)


def text_of(dashboard: Dashboard) -> str:
    return json.dumps(dashboard.to_json(), indent=1) + "\n"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(text_of(dashboard), encoding="utf-8")
    print(f"wrote {len(DASHBOARDS)} dashboards to {FOLDER}")


if __name__ == "__main__":
    main()
