"""The dashboards of what waits where, and what the router makes of it."""

from __future__ import annotations

from scripts.dashboards.board import Dashboard, Panel
from scripts.dashboards.promql import (
    ANSWERS,
    PROMPTS,
    Series,
    each,
    gauge,
    mean,
    rate,
    spread,
    total,
)

QUEUE = Dashboard(
    "queue",
    "Queue and admission",
    (
        Panel(
            "Requests",
            "short",
            (
                Series("running", f"max({gauge('plait_requests_running')})"),
                Series("waiting", f"max({gauge('plait_requests_waiting')})"),
            ),
            text="Over all workers. Waiting without end: too few workers, or pools too small.",
        ),
        Panel(
            "Waiting, by worker",
            "short",
            (Series("{{role}} {{worker}}", each(gauge("plait_worker_waiting_requests"))),),
        ),
        Panel(
            "Waiting tokens, by worker",
            "short",
            (Series("{{role}} {{worker}}", each(gauge("plait_worker_waiting_tokens"))),),
        ),
        Panel("Queue: arrival to first step", "s", spread("plait_queue_seconds")),
        Panel(
            "Reserve: arrival to reservation",
            "s",
            spread("plait_handoff_reserve_wait_seconds"),
            text="Of decode workers. Long: their pools are too small for what is decoded.",
        ),
        Panel(
            "Admission, events a second",
            "ops",
            (
                Series(
                    "{{role}} {{event}}",
                    total(
                        each(
                            rate(
                                "plait_scheduler_events_total",
                                event="admitted|retracted|refused|failed|aborted",
                            ),
                            "event",
                        ),
                        "role",
                        "event",
                    ),
                ),
            ),
            text="Retracted: pages were taken back from a running request, which waits again.",
        ),
        Panel(
            "Requests computed in one step",
            "short",
            (Series("{{role}}", mean("plait_step_requests", "role")),),
        ),
        Panel(
            "Pages that requests hold, share of the pool",
            "percentunit",
            (
                Series(
                    "{{role}} {{worker}}",
                    total(
                        each(gauge("plait_pool_pages", state="held|locked"), "state"),
                        "role",
                        "worker",
                    )
                    + " / "
                    + total(each(gauge("plait_pool_pages"), "state"), "role", "worker"),
                ),
            ),
            text="At 100 % nothing more is admitted until a request ends.",
        ),
    ),
)


ROUTER = Dashboard(
    "router",
    "Router and fleet",
    (
        Panel(
            "Cached prompt tokens: estimate and truth",
            "short",
            (
                Series("the router's estimate", total(rate("plait_router_matched_tokens_total"))),
                Series("found by workers", total(rate("plait_cached_tokens_total"))),
            ),
        ),
        Panel(
            "Truth / estimate",
            "short",
            (
                Series(
                    "found / estimated",
                    total(rate("plait_cached_tokens_total"))
                    + " / "
                    + total(rate("plait_router_matched_tokens_total")),
                ),
            ),
            text="Near 1 where the index is right. Below: pages were evicted before the request "
            "came. Above: they were stored after it was sent.",
        ),
        Panel(
            "Prompt tokens from caches",
            "percentunit",
            (
                Series(
                    "cached",
                    total(rate("plait_cached_tokens_total"))
                    + " / "
                    + total(rate("plait_prompt_tokens_total")),
                ),
            ),
        ),
        Panel(
            "Choices of a worker",
            "reqps",
            (Series("{{role}}", total(rate("plait_router_choices_total"), "role")),),
        ),
        Panel(
            "Running requests, by worker",
            "short",
            (Series("{{role}} {{worker}}", each(gauge("plait_worker_running_requests"))),),
        ),
        Panel(
            "Prompt tokens computed a second, by worker",
            "short",
            (
                Series(
                    "{{role}} {{worker}}",
                    each(rate("plait_computed_tokens_total", phase="prefill", role=PROMPTS)),
                ),
            ),
            text="Unequal lines: the router favours a worker, or its prefixes are asked for most.",
        ),
        Panel(
            "Output tokens computed a second, by worker",
            "short",
            (
                Series(
                    "{{role}} {{worker}}",
                    each(rate("plait_computed_tokens_total", phase="decode", role=ANSWERS)),
                ),
            ),
        ),
        Panel(
            "Workers that serve",
            "short",
            (
                Series("{{role}}", f"min by (role) ({gauge('plait_workers_ready')})"),
                Series("{{role}} refused", f"max by (role) ({gauge('plait_workers_refused')})"),
            ),
            text="As the front end sees them that sees fewest. Refused: they hold another model.",
        ),
        Panel(
            "Workers lost",
            "ops",
            (
                Series(
                    "{{role}} {{reason}}",
                    f"max by (role, reason) ({rate('plait_workers_lost_total')})",
                ),
            ),
            text="All but ended and removed are failures.",
        ),
        Panel(
            "Replays",
            "ops",
            (Series("{{reason}}", total(rate("plait_replays_total"), "reason")),),
            text="Choices that went on on other workers. Clients notice nothing.",
        ),
    ),
)
