"""A rank whose copies begin only while a file is there: stands for one that is slow.

Started by `spawn` in place of engine.parallel.rank, with the file's folder beside the
configuration; all else is the rank's own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.config import RankConfig
from kvcache.host_copies import Copy, Lane, Step, ThreadCopier


class HeldCopier(ThreadCopier):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def start(self, lane: Lane, steps: Sequence[Step]) -> Copy:
        def hold() -> None:
            (self._folder / f"{lane}.holds").touch()
            while not (self._folder / f"{lane}.goes").exists():
                time.sleep(0.01)

        def begin() -> None:
            hold()
            steps[0]()

        return super().start(lane, [begin, *steps[1:]])


def spawn(folder: Path, config: RankConfig) -> subprocess.Popen[bytes]:
    """As engine.parallel.group._spawn. A copy "out" or "in" goes on once FOLDER/LANE.goes is there;
    that one waits says FOLDER/LANE.holds."""
    arguments = [msgspec.json.encode(config).decode(), str(folder)]
    command = [sys.executable, "-m", "tests.engine.held_rank", *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def main() -> int:
    folder = Path(sys.argv.pop())
    import kvcache.host_tier
    from engine.parallel.rank import main as rank_main

    kvcache.host_tier.new_copier = lambda device: HeldCopier(folder)
    return rank_main()


if __name__ == "__main__":
    sys.exit(main())
