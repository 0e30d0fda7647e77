"""Threads and the compiler's cache: what must be settled before numba is first used.

numba's `omp` layer shares torch's OpenMP threads: torch puts its libgomp into the global scope,
where the layer's symbols are looked up first, so torch is imported before numba's first parallel
call. Where the system has no libgomp, numba takes its work queue, which only one thread may call.

How long an idle thread spins before it sleeps is read from the environment when libgomp is loaded
and cannot be set here: GOMP_SPINCOUNT=1000 is much faster on cores that other processes keep busy.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from kernels.full_disk import full_disk_named

# Kernels compiled when plait was packed, as in a container image; numba takes those of its own kind
# of processor only.
SHIPPED = Path(sys.prefix) / "share" / "plait" / "numba"

_KEPT_S = 30 * 24 * 3600


def configure(num_threads: int) -> None:
    """Use `num_threads` threads in torch and, where it is installed, in numba.

    To be called first in a worker: numba cannot start more threads than it sees in the first call,
    nor be told another number once its threads run.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}, expected 1 or more")
    torch.set_num_threads(num_threads)
    if importlib.util.find_spec("numba") is None:
        return
    prepare_numba()
    from numba.core import config
    from numba.np.ufunc import parallel

    if not parallel._is_initialized:
        os.environ.setdefault("NUMBA_NUM_THREADS", str(num_threads))
        config.reload_config()  # it may have been read before


@contextlib.contextmanager
def one_compiler() -> Iterator[None]:
    """One process at a time: those that start together do not compile the same kernels, but wait
    for the first and load what it has compiled. OSError for a full disk says what to do."""
    folder = os.environ.get("NUMBA_CACHE_DIR") or str(cache_folder())
    with full_disk_named(folder, "NUMBA_CACHE_DIR"), (cache_folder() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare_numba() -> None:
    """Point numba to a cache folder of these sources' own.

    Comes before the first compiled function. A NUMBA_CACHE_DIR set by the user is respected.
    """
    folder = os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder()))
    from numba.core import config

    config.CACHE_DIR = folder  # numba may have been imported, and its settings read, before


def cache_folder() -> Path:
    """Where compiled kernels are kept: one folder per state of the sources.

    numba notices a changed kernel but not a changed function that the kernel calls, hence the
    digest. PLAIT_HOME, then the XDG cache directory, then the temporary directory is taken. A new
    folder begins with what was shipped for these sources.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]
    xdg = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(os.environ.get("PLAIT_HOME") or Path(xdg) / "plait").expanduser()
    for base in (home, Path(tempfile.gettempdir()) / f"plait-{os.getuid()}"):
        folder = base / "numba" / digest
        try:
            _make(folder)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            _remove_unused(folder)
            return folder
    raise OSError(f"no writable folder for compiled kernels: tried {home} and the temporary one")


def _make(folder: Path) -> None:
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    shipped = SHIPPED / folder.name
    if not shipped.is_dir() or folder == shipped:
        folder.mkdir(exist_ok=True)
        return
    # Whole at once: other processes may be starting as well.
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
        copy = shutil.copytree(shipped, Path(scratch) / folder.name)
        with contextlib.suppress(OSError):  # another process was faster
            copy.rename(folder)


def is_cache_empty() -> bool:
    """Whether kernels that are called now have to be compiled first."""
    return not any(cache_folder().rglob("*.nbi"))


def _remove_unused(folder: Path) -> None:
    """Delete the folders beside this one, of other states of the sources, after a month."""
    os.utime(folder)
    for other in folder.parent.iterdir():
        if other.stat().st_mtime < folder.stat().st_mtime - _KEPT_S:
            shutil.rmtree(other, ignore_errors=True)
