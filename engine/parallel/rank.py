"""A rank that is not the leader: `python -m engine.parallel.rank CONFIG_JSON`.

Executes the plans it is sent and reports each; decides nothing. It ends with its leader.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading

import msgspec

from engine.config import RankConfig
from engine.messages import RankBeat, RankFailed, RankReady, RunStep, Setup, StepDone, Stop
from engine.pipe import plans_pipe, reports_pipe
from engine.process import BAD_OPTIONS, die_with_parent, leave, set_title

log = logging.getLogger("plait.rank")

BEAT_S = 0.5
_FOREVER_S = 3600.0


def serve(config: RankConfig) -> int:
    """Load, meet the others, execute plans until told to stop."""
    from engine.loading import build_rank, load_weights  # seconds: see main

    plans = plans_pipe(config.plans_address, is_leader=False)
    reports = reports_pipe(config.reports_address, is_leader=False)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(config, ended), daemon=True).start()
    weights = load_weights(config.worker, config.rank)
    built = None
    while True:
        message = plans.receive(_FOREVER_S)
        match message:
            case Setup():
                built = build_rank(config.worker, config.rank, weights, message, reports.send)
                reports.send(RankReady(config.rank))
            case RunStep(plan=plan) if built is not None:
                try:
                    built.execute(plan)
                except Exception as error:
                    log.exception("step %d failed on rank %d", plan.step, config.rank)
                    reason = f"step {plan.step}: {type(error).__name__}: {error}"
                    reports.send(RankFailed(config.rank, reason))
                    reports.close()
                    return 1
                reports.send(
                    StepDone(
                        rank=config.rank,
                        step=plan.step,
                        gathered_bytes=built.mesh.gathered_bytes,
                        gather_wait_s=built.mesh.wait_s,
                        load_back_wait_s=built.host.wait_s if built.host is not None else 0.0,
                    )
                )
            case Stop():
                ended.set()
                if built is not None:
                    built.close()
                return 0
            case None:
                pass
            case _:
                log.warning("a message that is no plan was dropped")


def _beat(config: RankConfig, ended: threading.Event) -> None:
    pipe = reports_pipe(config.reports_address, is_leader=False)
    while not ended.wait(BEAT_S):
        pipe.send(RankBeat(config.rank))


def main() -> int:
    config = msgspec.json.decode(sys.argv[1], type=RankConfig)
    worker = config.worker
    logging.basicConfig(
        level=worker.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {worker.title} rank {config.rank}: %(message)s",
    )
    die_with_parent(config.leader_pid)
    set_title(f"plait {worker.title} rank {config.rank}")
    # What ends a rank is its leader.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Only now what takes seconds to import: from here on this process ends with its leader.
    from engine.model.config import ConfigError
    from engine.model.weights import WeightError
    from kvcache.transfer.base import TransferError, TransferUnavailableError

    try:
        return serve(config)
    except (
        ConfigError,
        OSError,
        TransferError,
        TransferUnavailableError,
        ValueError,
        WeightError,
    ) as error:
        log.error("%s", error)
        return BAD_OPTIONS


if __name__ == "__main__":
    leave(main())
