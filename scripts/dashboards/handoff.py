"""The dashboard of the way from prefill to decode."""

from __future__ import annotations

from scripts.dashboards.board import Dashboard, Panel
from scripts.dashboards.promql import RANK, WORKER, Series, each, gauge, rate, spread, total

_SENT = each(rate("plait_handoff_bytes_sent_total"), "rank")
_WRITING = each(rate("plait_handoff_write_seconds_total"), "rank")

HANDOFF = Dashboard(
    "handoff",
    "Hand-off",
    (
        Panel(
            "First token until all pages are there",
            "s",
            spread("plait_handoff_tail_seconds"),
            text="What of a transfer is not hidden under the prefill.",
        ),
        Panel(
            "Reservation until all KV is there",
            "s",
            spread("plait_handoff_wait_seconds"),
            text="Queue, prefill and transfer together, as the decode worker sees them.",
        ),
        Panel(
            "Queue of hand-offs at the prefill side",
            "s",
            spread("plait_handoff_queue_seconds"),
            text="Long: too little prefill.",
        ),
        Panel("Bytes sent a second", "Bps", (Series(RANK, _SENT),)),
        Panel(
            "Bytes a second of writing",
            "Bps",
            (Series(RANK, f"{_SENT} / ({_WRITING} > 0)"),),
            text="What one request sees while a rank writes for it.",
        ),
        Panel(
            "Pages sent a second",
            "short",
            (Series(RANK, each(rate("plait_handoff_pages_sent_total"), "rank")),),
            text="Grows on every rank of a healthy group.",
        ),
        Panel(
            "Transfer time that hides under compute",
            "percentunit",
            (
                Series(
                    "hidden",
                    "1 - "
                    + total(each(rate("plait_handoff_tail_seconds_sum")))
                    + f" / sum(avg by (role, worker) ({_WRITING}))",
                ),
            ),
            text="About. Prompts of one chunk have nothing to hide under.",
        ),
        Panel(
            "Failures",
            "ops",
            (
                Series(
                    "write failures rank {{rank}}",
                    total(each(rate("plait_handoff_write_failures_total"), "rank"), "rank"),
                ),
                Series(
                    "hand-offs failed, {{role}}",
                    total(
                        each(rate("plait_scheduler_events_total", event="handoffs_failed")), "role"
                    ),
                ),
            ),
            text="Such requests are replayed elsewhere.",
        ),
        Panel(
            "Hand-offs done",
            "ops",
            (
                Series(
                    WORKER,
                    each(rate("plait_scheduler_events_total", event="handed_over", role="prefill")),
                ),
            ),
        ),
        Panel("Rooms open", "short", (Series(WORKER, each(gauge("plait_handoff_rooms"))),)),
        Panel(
            "Fenced pages",
            "short",
            (Series(WORKER, each(gauge("plait_pool_pages", state="fenced"))),),
            text="Given up, but bytes may still come into them: back after seconds.",
        ),
        Panel(
            "Messages refused",
            "ops",
            (
                Series(
                    "{{role}} {{reason}}",
                    total(each(rate("plait_refused_messages_total"), "reason"), "role", "reason"),
                ),
                Series(
                    "{{role}} malformed",
                    total(each(rate("plait_malformed_messages_total")), "role"),
                ),
            ),
        ),
    ),
)
