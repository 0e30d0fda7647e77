"""The dashboards of computing: prefill groups, decode workers, GPUs."""

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
    mean,
    quantile,
    rate,
    spread,
)


def step_times(role: str) -> tuple[Panel, ...]:
    return tuple(
        Panel(
            f"Step time by phase, {name}",
            "s",
            (Series("{{phase}}", quantile(share, "plait_step_seconds", "phase", role=role)),),
        )
        for name, share in (("p50", 0.5), ("p99", 0.99))
    )


_USED = gauge("plait_pool_used_pages", role=PROMPTS)

PREFILL = Dashboard(
    "prefill",
    "Prefill and context parallelism",
    (
        *step_times(PROMPTS),
        Panel(
            "Prompt tokens computed a second",
            "short",
            (
                Series(
                    WORKER, each(rate("plait_computed_tokens_total", phase="prefill", role=PROMPTS))
                ),
            ),
        ),
        Panel("First step to first token", "s", spread("plait_prefill_seconds")),
        Panel(
            "Bytes gathered from other ranks",
            "Bps",
            (Series(RANK, each(rate("plait_cp_gathered_bytes_total", role=PROMPTS), "rank")),),
        ),
        Panel(
            "Waiting for gathers, share of time",
            "percentunit",
            (Series(RANK, each(rate("plait_cp_gather_wait_seconds_total", role=PROMPTS), "rank")),),
            text="Of the process; on a GPU the stream waits instead.",
        ),
        Panel(
            "Page skew between ranks",
            "short",
            (
                Series(
                    WORKER,
                    f"max by (role, worker) ({_USED}) / avg by (role, worker) ({_USED} > 0)",
                ),
            ),
            text="Pages in use on the fullest rank over the mean of those in use. 1: evenly dealt.",
        ),
        Panel(
            "Ranks of the group",
            "short",
            (Series(WORKER, each(gauge("plait_cp_size", role=PROMPTS))),),
        ),
        Panel(
            "Workspace of streamed reads, a rank",
            "bytes",
            (Series(WORKER, each(gauge("plait_cp_stream_workspace_bytes", role=PROMPTS))),),
        ),
    ),
)


DECODE = Dashboard(
    "decode",
    "Decode",
    (
        *step_times(ANSWERS),
        Panel(
            "Output tokens computed a second",
            "short",
            (
                Series(
                    WORKER, each(rate("plait_computed_tokens_total", phase="decode", role=ANSWERS))
                ),
            ),
        ),
        Panel("Time between tokens", "s", spread("plait_itl_seconds")),
        Panel(
            "Requests computed in one step",
            "short",
            (Series(WORKER, mean("plait_step_requests", "role", "worker", role=ANSWERS)),),
        ),
        Panel(
            "Running requests",
            "short",
            (Series(WORKER, each(gauge("plait_worker_running_requests", role=ANSWERS))),),
        ),
        Panel(
            "Waiting for pages",
            "short",
            (Series(WORKER, each(gauge("plait_worker_waiting_requests", role=ANSWERS))),),
        ),
        Panel(
            "Retracted a second",
            "ops",
            (
                Series(
                    WORKER,
                    each(rate("plait_scheduler_events_total", event="retracted", role=ANSWERS)),
                ),
            ),
            text="Pages were taken back from a running request: the pool is too small.",
        ),
    ),
)


GPU_LABELS = "{{Hostname}} GPU {{gpu}}"


def _gpu(expr: str) -> str:
    return f"max by (Hostname, gpu) ({expr})"


GPU = Dashboard(
    "gpu",
    "GPUs (dcgm-exporter)",
    (
        Panel("Busy", "percent", (Series(GPU_LABELS, _gpu("DCGM_FI_DEV_GPU_UTIL")),)),
        Panel(
            "Memory interface busy",
            "percent",
            (Series(GPU_LABELS, _gpu("DCGM_FI_DEV_MEM_COPY_UTIL")),),
        ),
        Panel(
            "Memory used",
            "bytes",
            (Series(GPU_LABELS, _gpu("DCGM_FI_DEV_FB_USED * 1048576")),),
        ),
        Panel("Memory free", "bytes", (Series(GPU_LABELS, _gpu("DCGM_FI_DEV_FB_FREE * 1048576")),)),
        Panel("Power", "watt", (Series(GPU_LABELS, _gpu("DCGM_FI_DEV_POWER_USAGE")),)),
        Panel(
            "Temperature",
            "celsius",
            (
                Series(GPU_LABELS, _gpu("DCGM_FI_DEV_GPU_TEMP")),
                Series(GPU_LABELS + " memory", _gpu("DCGM_FI_DEV_MEMORY_TEMP")),
            ),
        ),
        Panel("SM clock", "megahertz", (Series(GPU_LABELS, _gpu("DCGM_FI_DEV_SM_CLOCK")),)),
        Panel(
            "Last XID error",
            "short",
            (Series(GPU_LABELS, _gpu("DCGM_FI_DEV_XID_ERRORS")),),
            text="0: none. Other numbers are NVIDIA's XID codes.",
        ),
        Panel(
            "PCIe replays",
            "ops",
            (Series(GPU_LABELS, _gpu("rate(DCGM_FI_DEV_PCIE_REPLAY_COUNTER[$__rate_interval])")),),
        ),
    ),
    has_job=False,
)
