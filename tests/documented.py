"""What docs/observe.md says of the metrics there are."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs" / "observe.md"
ROW = re.compile(r"^\| `(plait_\w+)(?:\{([\w,]+)\})?` \| (\w+) \|", re.MULTILINE)


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """By name, without a counter's _total: type and labels."""
    rows = ROW.findall(DOCS.read_text(encoding="utf-8"))
    found = {
        name.removesuffix("_total"): (kind, frozenset(labels.split(",")) - {""})
        for name, labels, kind in rows
    }
    assert len(found) == len(rows), "a metric is there twice"
    return found
