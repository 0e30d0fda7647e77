"""The dashboards of KV memory: the pool and the host tier."""

from __future__ import annotations

from scripts.dashboards.board import Dashboard, Panel
from scripts.dashboards.promql import (
    ANSWERS,
    PROMPTS,
    RANK,
    WORKER,
    Series,
    each,
    gauge,
    rate,
    total,
)

_COMPUTED = total(each(rate("plait_computed_tokens_total", phase="prefill", role=PROMPTS)))
_HITS = total(each(rate("plait_prefix_cache_hit_tokens_total", role=PROMPTS)))
_HOST_HITS = total(each(rate("plait_host_hit_tokens_total", role=PROMPTS)))


POOL = Dashboard(
    "pool",
    "Shared KV pool",
    (
        Panel(
            "Pages by state, prompts",
            "short",
            (
                Series(
                    WORKER + " {{state}}", each(gauge("plait_pool_pages", role=PROMPTS), "state")
                ),
            ),
            text="free; evictable: cached; locked: cached and in use; held by requests; fenced: "
            "given up, but bytes may still come.",
            is_stacked=True,
        ),
        Panel(
            "Pages by state, answers",
            "short",
            (
                Series(
                    WORKER + " {{state}}", each(gauge("plait_pool_pages", role=ANSWERS), "state")
                ),
            ),
            is_stacked=True,
        ),
        Panel(
            "Share of the pool",
            "percentunit",
            tuple(
                Series(
                    WORKER + f" {name}",
                    total(each(gauge("plait_pool_pages", state=states), "state"), "role", "worker")
                    + " / "
                    + total(each(gauge("plait_pool_pages"), "state"), "role", "worker"),
                )
                for name, states in (
                    ("used", "evictable|locked|held|fenced"),
                    ("locked", "locked|held"),
                )
            ),
            text="Used is near 100 % where a cache is warm; what counts is the room that cannot be "
            "had: locked.",
        ),
        Panel(
            "Tokens that the pool holds",
            "short",
            (Series(WORKER + " {{kind}}", each(gauge("plait_pool_tokens"), "kind")),),
            text="logical: the group. physical: one rank. Their ratio is how often the pool was "
            "multiplied.",
        ),
        Panel(
            "Pages in use, by rank",
            "short",
            (Series(RANK, each(gauge("plait_pool_used_pages"), "rank")),),
        ),
        Panel(
            "Where prompt tokens came from",
            "percentunit",
            (
                Series(
                    "device",
                    f"({_HITS} - ({_HOST_HITS} or {_HITS} * 0)) / ({_HITS} + {_COMPUTED})",
                ),
                Series("host", f"{_HOST_HITS} / ({_HITS} + {_COMPUTED})"),
                Series("computed", f"{_COMPUTED} / ({_HITS} + {_COMPUTED})"),
            ),
            text="Hit share by tier, of workers that compute prompts.",
            is_stacked=True,
        ),
    ),
)


_COPIED = rate("plait_host_copied_bytes_total")
_COPYING = rate("plait_host_copy_seconds_total")

HOST = Dashboard(
    "host-tier",
    "Host tier",
    (
        Panel(
            "Copied bytes a second",
            "Bps",
            (Series(RANK + " {{direction}}", each(_COPIED, "rank", "direction")),),
        ),
        Panel(
            "Bytes a second of copying",
            "Bps",
            (
                Series(
                    RANK + " {{direction}}",
                    f"{each(_COPIED, 'rank', 'direction')} / "
                    f"({each(_COPYING, 'rank', 'direction')} > 0)",
                ),
            ),
            text="While copies run, what one of them sees.",
        ),
        Panel(
            "Forwards that wait for load-backs, share of time",
            "percentunit",
            (Series(RANK, each(rate("plait_load_back_wait_seconds_total"), "rank")),),
            text="0 on a GPU, where the stream waits.",
        ),
        Panel(
            "Copies",
            "ops",
            tuple(
                Series(
                    f"{what} {{{{role}}}} {{{{direction}}}}",
                    total(
                        each(rate(f"plait_host_copies_{what}_total"), "direction"),
                        "role",
                        "direction",
                    ),
                )
                for what in ("started", "finished")
            ),
        ),
        Panel("Copies under way", "short", (Series(WORKER, each(gauge("plait_host_copies"))),)),
        Panel(
            "Copies not made",
            "ops",
            (
                Series(
                    "{{role}} {{direction}} {{reason}}",
                    total(
                        each(rate("plait_host_copies_skipped_total"), "direction", "reason"),
                        "role",
                        "direction",
                        "reason",
                    ),
                ),
            ),
            text="The request computes that part. no_host_pages: the tier is too small.",
        ),
        Panel(
            "Host pages",
            "short",
            (Series(WORKER + " {{state}}", each(gauge("plait_host_pages"), "state")),),
            is_stacked=True,
        ),
        Panel(
            "Held by tier",
            "bytes",
            (Series(WORKER + " {{tier}}", each(gauge("plait_tier_held_bytes"), "tier")),),
        ),
        Panel(
            "Tokens loaded back a second",
            "short",
            (Series(WORKER, each(rate("plait_host_hit_tokens_total"))),),
        ),
        Panel(
            "Pages evicted a second",
            "short",
            (
                Series(WORKER + " {{tier}}", each(rate("plait_evicted_pages_total"), "tier")),
                Series(WORKER + " dropped", each(rate("plait_dropped_pages_total"))),
            ),
            text="dropped: evicted from the device while the host did not have them.",
        ),
    ),
)
