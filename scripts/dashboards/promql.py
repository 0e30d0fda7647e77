"""PromQL over plait's metrics, put together from typed parts. Knows no panel."""

from __future__ import annotations

from dataclasses import dataclass

JOB = 'job=~"$job"'  # every dashboard's variable: which scrape jobs are plait's
INTERVAL = "$__rate_interval"  # Grafana's: some four scrapes, more where a panel is zoomed out
TYPICAL_TO_WORST = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
WORKER = "{{role}} {{worker}}"  # legends
RANK = "{{role}} {{worker}} rank {{rank}}"
PROMPTS = "prefill|colocated"  # the roles that compute prompts
ANSWERS = "decode|colocated"  # and those that generate


@dataclass(frozen=True, slots=True)
class Series:
    """One query; `legend` may name labels as {{rank}}."""

    legend: str
    expr: str


def gauge(name: str, **matchers: str) -> str:
    """A matcher's value is a regular expression, as `role="prefill|colocated"`."""
    return f"{name}{{{_selector(matchers)}}}"


def rate(name: str, **matchers: str) -> str:
    """A counter's growth a second."""
    return f"rate({name}{{{_selector(matchers)}}}[{INTERVAL}])"


def total(expr: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) ({expr})" if by else f"sum({expr})"


def each(expr: str, *labels: str) -> str:
    """One value for each worker (and label): every front end tells of every worker, so the same
    number may be there several times."""
    return f"max by ({', '.join(('role', 'worker', *labels))}) ({expr})"


def quantile(share: float, histogram: str, *by: str, **matchers: str) -> str:
    """Of a histogram's observations; several front ends that tell of one worker change nothing."""
    return (
        f"histogram_quantile({share}, {total(rate(f'{histogram}_bucket', **matchers), 'le', *by)})"
    )


def mean(histogram: str, *by: str, **matchers: str) -> str:
    parts = (total(rate(f"{histogram}_{part}", **matchers), *by) for part in ("sum", "count"))
    return " / ".join(parts)


def spread(histogram: str, **matchers: str) -> tuple[Series, ...]:
    return tuple(
        Series(name, quantile(share, histogram, **matchers))
        for name, share in TYPICAL_TO_WORST.items()
    )


def _selector(matchers: dict[str, str]) -> str:
    return ",".join([JOB, *(f'{label}=~"{value}"' for label, value in matchers.items())])
