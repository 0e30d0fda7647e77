"""From requests' times to the numbers of a report: percentiles, rates, a table and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from server.bench.client import RequestResult


class Spread(msgspec.Struct, frozen=True):
    """How one quantity is spread, in seconds; percentiles interpolate linearly."""

    mean: float
    p50: float
    p90: float
    p99: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one run. Spreads and rates count finished requests only; None: no sample."""

    num_requests: int
    num_failed: int
    errors: dict[str, int]
    duration_s: float  # first request sent to last answer ended
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    cached_share: float  # of the prompt tokens
    ttft_s: Spread | None  # time to the first text
    itl_s: Spread | None  # gap between two pieces of text, over all requests
    tpot_s: Spread | None  # a request's mean time an output token after its first
    e2e_s: Spread | None


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return Spread(float(np.mean(values)), float(p50), float(p90), float(p99))


def summarise(results: Sequence[RequestResult]) -> Summary:
    """Raises ValueError for no result at all."""
    if not results:
        raise ValueError("no results to summarise; expected one or more")
    done = [r for r in results if r.error is None]
    duration_s = max(r.end_s for r in results) - min(r.start_s for r in results)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    prompt_tokens = sum(r.prompt_tokens for r in done)
    cached_tokens = sum(r.cached_tokens for r in done)
    output_tokens = sum(r.output_tokens for r in done)
    return Summary(
        num_requests=len(results),
        num_failed=len(results) - len(done),
        errors=dict(Counter(r.error for r in results if r.error is not None)),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(done) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        cached_share=cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        ttft_s=spread([r.ttft_s for r in done if r.ttft_s is not None]),
        itl_s=spread([b - a for r in done for a, b in pairwise(r.chunk_times_s)]),
        tpot_s=spread([r.tpot_s for r in done if r.tpot_s is not None]),
        e2e_s=spread([r.e2e_s for r in done]),
    )


def latency_table(summary: Summary) -> Table:
    table = Table(title="latency, ms")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    rows = {
        "TTFT": summary.ttft_s,
        "ITL": summary.itl_s,
        "TPOT": summary.tpot_s,
        "e2e": summary.e2e_s,
    }
    for name, values in rows.items():
        if values is None:
            table.add_row(name, "–", "–", "–", "–")
        else:
            cells = (values.mean, values.p50, values.p90, values.p99)
            table.add_row(name, *(f"{cell * 1000:.1f}" for cell in cells))
    return table


def totals_table(summary: Summary) -> Table:
    table = Table(title="totals", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    finished = summary.num_requests - summary.num_failed
    table.add_row("requests finished", f"{finished} of {summary.num_requests}")
    for error, count in sorted(summary.errors.items()):
        table.add_row(f"  failed: {error}", str(count))
    table.add_row("duration", f"{summary.duration_s:.2f} s")
    table.add_row("requests/s", f"{summary.requests_per_s:.2f}")
    table.add_row("output tokens/s", f"{summary.output_tokens_per_s:.1f}")
    table.add_row("prompt tokens", str(summary.prompt_tokens))
    table.add_row("output tokens", str(summary.output_tokens))
    table.add_row("prompt tokens from the cache", f"{summary.cached_share:.1%}")
    return table


def to_json(
    summary: Summary, results: Sequence[RequestResult], run: dict[str, Any]
) -> dict[str, Any]:
    """What --json writes: the run's options, its numbers, and each request's times."""
    return {
        "run": run,
        "summary": msgspec.to_builtins(summary),
        "requests": [msgspec.to_builtins(result) for result in results],
    }
