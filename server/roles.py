"""`plait prefill` and `plait decode`: one worker of a cluster, in this process.

Resolves the model and then becomes the worker; its end is the command's. As the first process of a
container it ends only where it says how: the kernel ignores SIGTERM for it otherwise.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Literal

from engine.process import unblock_signals, unwind_when_asked
from server import logs, model_source
from server.launcher import read_key
from server.options.config import ServeConfig
from server.supervisor import PACKAGE_ROOT, WORKER_ENVIRONMENT, worker_command
from server.topology import hash_salt, worker_config

DEFAULT_LISTEN = "tcp://127.0.0.1:7000"


def run_worker(config: ServeConfig, role: Literal["prefill", "decode"]) -> int:
    """Does not return where it works. Exit code 1 where the model cannot be had. Raises
    ConfigError."""
    unwind_when_asked(0)
    logs.configure(config.log_level)
    read_key(config)
    try:
        folder = model_source.resolve(config.model)
    except model_source.ModelSourceError as error:
        print(f"plait {role}: {error}", file=sys.stderr)
        return 1
    told = worker_config(
        config,
        role,
        0,
        model_path=folder.resolve(),
        listen_address=config.listen or DEFAULT_LISTEN,
        cp_size=(config.prefill_cp_size or 1) if role == "prefill" else 1,
        salt=hash_salt(config),
    )
    sys.stdout.flush()
    os.chdir(PACKAGE_ROOT)
    command = worker_command(told)
    # Held back until the worker says what it means.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        os.execve(command[0], command, WORKER_ENVIRONMENT | os.environ)
    finally:  # it did not become the worker
        unblock_signals()
