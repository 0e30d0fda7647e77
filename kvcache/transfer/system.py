"""Loading Mooncake's compiled module: the system's libraries that it needs, and what it prints."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcache.transfer.base import TransferUnavailableError

# Libraries unpacked by scripts/install.sh where it may not install them.
PRIVATE_LIBRARIES = Path(sys.prefix) / "lib" / "system"

# What the compiled module is linked against and Debian may lack, and the package it comes in.
_PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
_CUDA_PACKAGES = {"libmlx5.so.1": "ibverbs-providers"}

_WITHOUT_CUDA = "mooncake-transfer-engine-non-cuda"

_LOG_LINE = re.compile(r"^([IWEF]\d{4} |WARNING: Logging before )")


def load_engine_module() -> Any:
    """mooncake.engine. Raises TransferUnavailableError that says what to install."""
    preload(PRIVATE_LIBRARIES)
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise TransferUnavailableError(
            f"the transfer engine is not installed ({error}): pip install "
            "mooncake-transfer-engine-non-cuda, or -cuda13 in its place on CUDA machines, "
            "never both; --colocated needs neither"
        ) from error
    except ImportError as error:
        raise TransferUnavailableError(
            f"the transfer engine lacks a system library ({error}); Debian and Ubuntu: apt-get "
            f"install {' '.join(_PACKAGES.values())}; --colocated needs none"
        ) from error


def check_reaches_gpus() -> None:
    """Raises TransferUnavailableError where Mooncake's build without CUDA is installed:
    it takes a GPU's memory for the host's, and every transfer would fail."""
    try:
        importlib.metadata.version(_WITHOUT_CUDA)
    except importlib.metadata.PackageNotFoundError:
        return
    raise TransferUnavailableError(
        f"--device cuda: {_WITHOUT_CUDA} cannot move a GPU's memory; pip uninstall it, then pip "
        "install mooncake-transfer-engine-cuda13; --colocated needs neither"
    )


def missing_packages(*, for_cuda: bool) -> list[str]:
    """Debian's names of what the CPU or the CUDA build still needs, for scripts/install.sh."""
    preload(PRIVATE_LIBRARIES)
    wanted = {**_PACKAGES, **_CUDA_PACKAGES} if for_cuda else _PACKAGES
    return [package for library, package in wanted.items() if not _is_loadable(library)]


def _is_loadable(library: str | Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def preload(folder: Path) -> list[Path]:
    """Load the shared libraries of a folder, so that what is loaded later finds them by name.

    Those whose own needs are in the folder too are loaded after them; what cannot be loaded is left
    out. Returns the loaded ones in order.
    """
    waiting = sorted(path for path in folder.glob("*.so*") if path.is_file())
    loaded: list[Path] = []
    is_moving = True
    while waiting and is_moving:
        is_moving = False
        for path in list(waiting):
            if _is_loadable(path):
                waiting.remove(path)
                loaded.append(path)
                is_moving = True
    return loaded


@contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Lines that glog writes to the process's stderr meanwhile, as a list filled at the end.

    Other lines, of other threads, are passed on.
    """
    lines: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as capture:
        real = os.dup(2)
        os.dup2(capture.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(real, 2)
            capture.seek(0)
            for line in capture.read().splitlines(keepends=True):
                text = line.decode(errors="replace")
                if _LOG_LINE.match(text):
                    lines.append(text.rstrip())
                else:
                    os.write(2, line)
            os.close(real)
