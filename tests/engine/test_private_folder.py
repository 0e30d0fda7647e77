"""Private folders: gone with their owner, or with the next one beside it; nothing else ever."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.private_folder import PrivateFolder

OWNER = """
import signal, sys
from engine.private_folder import PrivateFolder
print(PrivateFolder(sys.argv[1], "group-").path, flush=True)
signal.pause()
"""


class Owner:
    """Another process that has a folder in `base`, with a socket in it."""

    def __init__(self, base: Path) -> None:
        command = [sys.executable, "-c", OWNER, str(base)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.folder = Path(self._process.stdout.readline().strip())
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(self.folder / "s"))

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its path is short, as those of sockets have to be."""
    yield tmp_path_factory.mktemp("b")


def test_is_for_this_user_only_and_goes_away(base: Path) -> None:
    folder = PrivateFolder(base, "group-")
    assert folder.path.parent == base and folder.path.name.startswith("plait-group-")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()
    assert list(base.iterdir()) == []
    folder.remove()


def test_what_a_killed_owner_left_goes_with_the_next_and_what_a_living_one_has_stays(
    base: Path,
) -> None:
    dead, alive = Owner(base), Owner(base)
    try:
        dead.kill()
        assert dead.folder.exists()
        own = [PrivateFolder(base) for _ in range(2)]
        assert set(base.iterdir()) == {alive.folder, *(folder.path for folder in own)}
        assert (alive.folder / "s").exists()
    finally:
        alive.kill()


def left_behind(base: Path) -> Path:
    owner = Owner(base)
    owner.kill()
    return owner.folder


def test_what_is_not_ours_stays(base: Path, tmp_path: Path) -> None:
    (base / "plait-notes").mkdir()
    (base / "plait-file").write_text("")
    elsewhere = left_behind(tmp_path)
    (base / "plait-link").symlink_to(elsewhere)
    (base / "plait-linked-lock").mkdir()
    (base / "plait-linked-lock" / "plait.lock").symlink_to(elsewhere / "plait.lock")
    (base / "plait-pipe").mkdir()
    os.mkfifo(base / "plait-pipe" / "plait.lock")
    other = left_behind(base).rename(base / "mine")
    before = {path.name for path in base.iterdir()}
    PrivateFolder(base).remove()
    assert {path.name for path in base.iterdir()} == before
    assert (elsewhere / "plait.lock").exists() and other.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("what", ["folder", "lock"])
def test_what_is_another_users_stays(base: Path, what: str) -> None:
    folder = left_behind(base)
    os.chown(folder if what == "folder" else folder / "plait.lock", 12345, -1)
    PrivateFolder(base).remove()
    assert folder.exists()


def test_folders_that_are_made_at_the_same_time_leave_each_other_alone(base: Path) -> None:
    missing: list[Path] = []
    start = threading.Barrier(8)

    def make_and_remove() -> None:
        start.wait()
        for _ in range(100):
            folder = PrivateFolder(base)
            if not (folder.path / "plait.lock").exists():
                missing.append(folder.path)
            folder.remove()

    threads = [threading.Thread(target=make_and_remove) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not missing
    assert list(base.iterdir()) == []


def test_the_lock_goes_last_so_that_a_removal_cut_short_can_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = PrivateFolder(tmp_path)
    for number in range(50):
        (owned.path / f"{number}").touch()
    removed: list[str] = []
    unlink = os.unlink

    def recorded(path: str | Path, *, dir_fd: int | None = None) -> None:
        removed.append(os.path.basename(path))
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", recorded)
    owned.remove()
    assert len(removed) == 51
    assert removed[-1] == "plait.lock"
    assert not list(tmp_path.iterdir())
