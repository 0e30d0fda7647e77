"""What is said where there is no room for compiled kernels."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk_named(folder: str, variable: str) -> Iterator[None]:
    """What finds the disk full in here, which compilers say of no folder, raises OSError that names
    theirs and the variable by which another is taken."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        said = f"{error.strerror} for compiled kernels; free some, or set {variable} to a folder"
        raise OSError(error.errno, f"{said} elsewhere", folder) from error
