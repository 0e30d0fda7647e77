"""The dashboards of what clients see: latencies against targets, traffic."""

from __future__ import annotations

from scripts.dashboards.board import Choice, Dashboard, Panel
from scripts.dashboards.promql import INTERVAL, JOB, Series, rate, spread, total


def within(histogram: str, target: str) -> str:
    """Observations a second that were at most `target`, which must be a bucket's bound."""
    return f'sum(rate({histogram}_bucket{{{JOB},le="{target}"}}[{INTERVAL}]))'


def share_within(histogram: str, target: str) -> str:
    return f"{within(histogram, target)} / {total(rate(f'{histogram}_count'))}"


SLO = Dashboard(
    "slo",
    "SLO",
    (
        Panel("Time to first token", "s", spread("plait_ttft_seconds")),
        Panel("Time between tokens", "s", spread("plait_itl_seconds")),
        Panel("Submission to last token", "s", spread("plait_e2e_seconds")),
        Panel(
            "Goodput",
            "reqps",
            (
                Series("in time ($ttft s)", within("plait_ttft_seconds", "$ttft")),
                Series("all", total(rate("plait_ttft_seconds_count"))),
            ),
            text="Requests a second whose first token came within the target, beside all that got "
            "one.",
        ),
        Panel(
            "Share in time",
            "percentunit",
            (
                Series("first token ($ttft s)", share_within("plait_ttft_seconds", "$ttft")),
                Series("between tokens ($itl s)", share_within("plait_itl_seconds", "$itl")),
            ),
            text="Of first tokens, and of all others, those within their targets.",
        ),
        Panel(
            "Choices that ended with an error",
            "percentunit",
            (
                Series(
                    "error",
                    total(rate("plait_requests_total", finish_reason="error"))
                    + " / "
                    + total(rate("plait_requests_total")),
                ),
            ),
            text="Of those that were accepted; what was refused is on the dashboard of traffic.",
        ),
    ),
    choices=(
        Choice("ttft", "TTFT target, s", ("0.25", "0.5", "1.0", "2.5", "5.0", "10.0"), "2.5"),
        Choice("itl", "ITL target, s", ("0.02", "0.05", "0.1", "0.2", "0.5", "1.0"), "0.1"),
    ),
)


TRAFFIC = Dashboard(
    "traffic",
    "Traffic",
    (
        Panel(
            "Choices that ended, by route",
            "reqps",
            (Series("{{route}}", total(rate("plait_requests_total"), "route")),),
            is_stacked=True,
        ),
        Panel(
            "Choices that ended, by how",
            "reqps",
            (Series("{{finish_reason}}", total(rate("plait_requests_total"), "finish_reason")),),
            is_stacked=True,
        ),
        Panel("Choices whose client left", "reqps", (Series("left", rate("plait_aborts_total")),)),
        Panel(
            "Tokens a second",
            "short",
            (
                Series("prompt", total(rate("plait_prompt_tokens_total"))),
                Series("of those, cached", total(rate("plait_cached_tokens_total"))),
                Series("output", total(rate("plait_output_tokens_total"))),
            ),
        ),
        Panel(
            "Tokens a choice",
            "short",
            tuple(
                Series(
                    kind,
                    total(rate(f"plait_{kind}_tokens_total"))
                    + " / "
                    + total(rate("plait_requests_total")),
                )
                for kind in ("prompt", "output")
            ),
            text="Mean of what was submitted and generated, by the choices that ended meanwhile.",
        ),
        Panel(
            "Error answers, 4xx",
            "reqps",
            (
                Series(
                    "{{status}} {{kind}}",
                    total(rate("plait_errors_total", status="4.."), "status", "kind"),
                ),
            ),
            is_stacked=True,
        ),
        Panel(
            "Error answers, 5xx",
            "reqps",
            (
                Series(
                    "{{status}} {{kind}}",
                    total(rate("plait_errors_total", status="5.."), "status", "kind"),
                ),
            ),
            is_stacked=True,
        ),
        Panel(
            "Rejected",
            "reqps",
            (Series("{{kind}}", total(rate("plait_errors_total", status="503"), "kind")),),
            text="Answered 503 with Retry-After: the queue is full (overloaded) or nobody is there "
            "(unavailable).",
            is_stacked=True,
        ),
    ),
)
