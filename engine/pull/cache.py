"""The cache folder: where the default model lies, and whether it is whole.

Owns paths, the manifest, atomic replacement and the lock between pulls. Imports no torch: the front
end asks `is_complete` before it serves. Knows nothing of how a model is made.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

DEFAULT_MODEL = "smollm2-135m-dsv32"
CONVERSION = 2  # raised when a converted folder of an earlier version must be made again
MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20


class PullError(Exception):
    """A pull that cannot go on; one line that says what would help."""


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int  # bytes
    sha256: str  # hexadecimal


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Written last into a model folder: what the folder must hold to be whole."""

    conversion: int
    source_sha256: str
    files: dict[str, FileRecord]


def default_home() -> Path:
    """PLAIT_HOME, else `plait` in XDG_CACHE_HOME, else ~/.cache/plait."""
    if home := os.environ.get("PLAIT_HOME"):
        return Path(home).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "plait"


def default_model_path(home: Path | None = None) -> Path:
    """Where the default model is or will be; `home` None: default_home()."""
    return (home or default_home()) / "models" / DEFAULT_MODEL


def is_complete(path: Path) -> bool:
    """Whether the folder is a finished pull of this version, by names and sizes: milliseconds."""
    manifest = _read_manifest(path)
    return manifest is not None and not any(
        _size(path / name) != record.size for name, record in manifest.files.items()
    )


def verify(path: Path) -> None:
    """Check every byte of a model folder. Raises PullError that names the first fault."""
    manifest = _read_manifest(path)
    if manifest is None:
        raise PullError(f"{path}: no manifest of conversion {CONVERSION}")
    for name, record in manifest.files.items():
        file = path / name
        if _size(file) != record.size:
            raise PullError(f"{file}: size is {_size(file)} bytes, expected {record.size}")
        found = sha256_of(file)
        if found != record.sha256:
            raise PullError(f"{file}: sha256 is {found}, expected {record.sha256}")


def write_manifest(path: Path, source_sha256: str) -> None:
    """Describe the files of a folder that is finished but for its manifest."""
    files = {
        file.name: FileRecord(file.stat().st_size, sha256_of(file))
        for file in sorted(path.iterdir())
    }
    manifest = Manifest(CONVERSION, source_sha256, files)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (path / MANIFEST).write_bytes(text + b"\n")


def _read_manifest(path: Path) -> Manifest | None:
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return manifest if manifest.conversion == CONVERSION and manifest.files else None


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def exclusive(home: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the home's lock; `on_wait` is called once where another process has it. The kernel
    releases the lock of a process that dies."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".pull.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Remove what killed pulls left in `folder`. Call under the lock."""
    for pattern in (_partial(folder / "*"), _old(folder / "*")):
        for path in folder.glob(pattern.name):
            _remove(path)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`, removed at the end. Call under the lock."""
    partial = _partial(path)
    _remove(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        _remove(partial)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A sibling path to make a file or a folder at; on a clean exit it is on disk and takes
    target's place, on any other it is removed. Call under the lock."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, old = _partial(target), _old(target)
    _remove(partial)
    try:
        yield partial
        _sync(partial)
        if target.is_dir():
            _remove(old)
            os.rename(target, old)
        os.replace(partial, target)
        _sync(target.parent, shallow=True)
        _remove(old)
    finally:
        _remove(partial)


def _sync(path: Path, *, shallow: bool = False) -> None:
    if path.is_dir() and not shallow:
        for file in path.iterdir():
            _sync(file)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
