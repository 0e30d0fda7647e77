"""A process's own standing in the system: its title, its end when asked or with its parent's."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from typing import NoReturn

import setproctitle

# Exit code of a worker or rank whose model or options cannot work: a restart will not help.
BAD_OPTIONS = 2

_PR_SET_PDEATHSIG = 1


def set_title(title: str) -> None:
    setproctitle.setproctitle(title)


def unblock_signals() -> None:
    """Have SIGTERM and SIGINT reach this process, also where its parent held them back: a mask is
    inherited, and with it nothing short of SIGKILL would end this one."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


def end_when_asked(code: int = 128 + signal.SIGTERM) -> None:
    """Have SIGTERM end this process at once with `code`, whatever its parent did with the signal:
    to a container's first process it means nothing otherwise. For as long as it only imports;
    later there is more to an end."""
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))
    unblock_signals()


def unwind_when_asked(code: int = 128 + signal.SIGTERM) -> None:
    """Have SIGTERM end this process by SystemExit with `code`, so that what it has begun (files,
    folders, processes) is cleared away."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(code))
    unblock_signals()


def leave(code: int) -> NoReturn:
    """Exit by SystemExit. The interpreter's last search for garbage finds nothing: what torch's
    modules hold keeps it busy for most of a second, and the memory goes with the process anyway."""
    gc.freeze()
    sys.exit(code)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when its parent thread ends, however that happens.

    `parent_pid` is the parent that this process was started by: where that one ended before this
    call, the process ends now. Linux only; elsewhere nothing is done and the worker's own check of
    its parent is all there is.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent_pid is None else parent_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call took effect
        os.kill(os.getpid(), signal.SIGKILL)
