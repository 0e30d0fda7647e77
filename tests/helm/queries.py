"""What can be said of a PromQL query without a Prometheus: does it fit the metrics there are?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser

from scripts.dashboards.asked import filled_in

GROWTH = {"rate", "increase"}
ADDED = {"job", "role", "worker", "le"}  # labels that the tables of metrics leave out


@dataclass(frozen=True)
class Known:
    """The metrics there are, by name (a counter's without _total), with type and labels; and names
    that rules record."""

    metrics: Mapping[str, tuple[str, frozenset[str]]]
    recorded: frozenset[str] = frozenset()


def faults(expr: str, known: Known) -> list[str]:
    """Unknown metrics and labels, counters without rate, gauges under it, and histograms asked for
    quantiles in another way than by their buckets. Raises ValueError for what is no PromQL."""
    return [
        fault
        for path in _selectors(promql_parser.parse(filled_in(expr)), ())
        for fault in _of(path, known)
    ]


def _selectors(node: Any, calls: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Every selector, with the functions around it, the outermost first."""
    if isinstance(node, promql_parser.Call):
        calls = (*calls, node.func.name)
        children = node.args
    elif isinstance(node, promql_parser.BinaryExpr):
        children = [node.lhs, node.rhs]
    elif isinstance(node, promql_parser.MatrixSelector):
        children = [node.vector_selector]
    elif isinstance(node, promql_parser.VectorSelector):
        yield node, calls
        return
    else:
        children = [node.expr] if hasattr(node, "expr") else []
    for child in children:
        yield from _selectors(child, calls)


def _of(path: tuple[Any, tuple[str, ...]], known: Known) -> Iterator[str]:
    selector, calls = path
    name = selector.name
    if name in known.recorded:
        return
    matched = {matcher.name for matcher in selector.matchers.matchers}
    for suffix, kinds in (
        ("", ("gauge",)),
        ("_total", ("counter",)),
        ("_bucket", ("histogram",)),
        ("_sum", ("histogram",)),
        ("_count", ("histogram",)),
    ):
        kind, labels = known.metrics.get(name.removesuffix(suffix), ("", frozenset()))
        if name.endswith(suffix) and kind in kinds:
            break
    else:
        if known.metrics.get(name, ("",))[0] != "counter":  # an exporter's that has no _total
            yield f"{name}: there is no such metric"
            return
        kind, labels = known.metrics[name]
    grows = bool(GROWTH & set(calls))
    if kind == "gauge" and grows:
        yield f"{name}: a gauge under {calls[-1]}"
    if kind != "gauge" and not grows:
        yield f"{name}: a {kind} without rate"
    is_bucket = kind == "histogram" and name.endswith("_bucket")
    if "histogram_quantile" in calls and not is_bucket:
        yield f"{name}: a quantile of what is no bucket"
    if is_bucket and "histogram_quantile" not in calls and "le" not in matched:
        yield f"{name}: buckets added up"
    for label in matched - labels - ADDED:
        yield f"{name}: no label {label}"
