"""A full disk, met while CPU kernels are compiled: what is said."""

from __future__ import annotations

import errno
import os
import re

import pytest

pytest.importorskip("numba", reason="the CPU kernels are numba's")

from kernels.cpu.compiled import compiled
from kernels.cpu.threads import one_compiler


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_folder_is_named_and_how_to_have_another(monkeypatch, number):
    @compiled
    def doubled(x):
        return 2 * x

    def is_full(*paths: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", is_full)
    folder = re.escape(repr(os.environ["NUMBA_CACHE_DIR"]))
    said = f"{os.strerror(number)} for .*set NUMBA_CACHE_DIR to a folder elsewhere: {folder}"
    with pytest.raises(OSError, match=said), one_compiler():
        doubled(1.0)


def test_another_error_is_left_as_it_is():
    with pytest.raises(PermissionError) as error, one_compiler():
        raise PermissionError(errno.EACCES, "not here", "/a")
    assert str(error.value) == "[Errno 13] not here: '/a'"
