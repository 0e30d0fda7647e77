"""Folders for unix sockets that only this user can enter. Their owner removes them; where it was
killed, whoever makes the next one in that place does. Knows no socket."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

_PREFIX = "plait-"
# Locked by the owner for as long as it lives. A folder without this file is none of ours.
_LOCK = "plait.lock"


class PrivateFolder:
    """Lies in `base` from its making until `remove`, or until nobody owns it."""

    def __init__(
        self, base: Path | str, kind: str = "", *, max_base_bytes: int | None = None
    ) -> None:
        """`kind`: the begin of its name, after the product's. Where `base` is longer than that, and
        the paths of sockets would be too long, it lies in /tmp. Raises OSError."""
        if max_base_bytes is not None and len(os.fsencode(base)) > max_base_bytes:
            base = "/tmp"
        base = Path(base)
        _sweep(base)
        # It gets its name when it is locked: before that nobody takes it for one left behind.
        made = Path(tempfile.mkdtemp(prefix=f".new-{_PREFIX}", dir=base))
        try:
            # A number, not a file object: it stays locked should nobody refer to this any more.
            self._lock: int | None = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path = base / f"{_PREFIX}{kind}{made.name.rpartition('-')[2]}"
            made.rename(self.path)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def remove(self) -> None:
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _sweep(base: Path) -> None:
    """Remove what owners that are gone have left."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else was faster, or it is not what it seems
            if _is_ours(folder.lstat(), stat.S_ISDIR):
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _is_ours(os.fstat(lock), stat.S_ISREG):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
            # Another may have removed it between the two calls, and its name be taken again.
            if os.path.samestat(os.fstat(lock), (folder / _LOCK).lstat()):
                _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """The lock last: who is killed before leaves a folder that the next start knows for ours."""
    with contextlib.suppress(OSError):
        for held in folder.iterdir():
            if held.is_dir() and not held.is_symlink():
                _remove(held)
            elif held.name != _LOCK:
                os.unlink(held)
    shutil.rmtree(folder, ignore_errors=True)


def _is_ours(found: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    return is_kind(found.st_mode) and found.st_uid == os.geteuid()
