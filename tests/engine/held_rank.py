"""A rank whose copies begin only when a test lets them: stands for one that is slow.

Started by `spawn` in place of engine.parallel.rank, with a few pipes beside the configuration; all
else is the rank's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from engine.config import RankConfig
from kvcache.host_copies import Copy, Lane, Step, ThreadCopier


class Pipes(msgspec.Struct, frozen=True):
    """File descriptors of the rank's ends."""

    gates: dict[Lane, int]  # a lane's copies begin once nobody holds the other end open
    says: int  # "LANE holds": a copy is about to begin; "LANE is waited for": a step needs one


@dataclass(frozen=True)
class AwaitedCopy:
    copy: Copy
    is_awaited: Callable[[], None]

    def wait_step(self, index: int) -> None:
        self.is_awaited()
        self.copy.wait_step(index)

    def is_done(self) -> bool:
        return self.copy.is_done()

    def wait(self) -> None:
        self.copy.wait()

    @property
    def seconds(self) -> float:
        return self.copy.seconds


class HeldCopier(ThreadCopier):
    def __init__(self, gates: Mapping[Lane, int], say: Callable[[str], None]) -> None:
        super().__init__()
        self._gates = gates
        self._say = say

    def start(self, lane: Lane, steps: Sequence[Step]) -> Copy:
        def begin() -> None:
            self._say(f"{lane} holds")
            assert os.read(self._gates[lane], 1) == b""  # its end, once for all
            steps[0]()

        copy = super().start(lane, [begin, *steps[1:]])
        return AwaitedCopy(copy, lambda: self._say(f"{lane} is waited for"))


def spawn(pipes: Pipes, config: RankConfig) -> subprocess.Popen[bytes]:
    """As engine.parallel.group._spawn."""
    arguments = [msgspec.json.encode(value).decode() for value in (config, pipes)]
    command = [sys.executable, "-m", "tests.engine.held_rank", *arguments]
    passed = [*pipes.gates.values(), pipes.says]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed)


def main() -> int:
    pipes = msgspec.json.decode(sys.argv.pop(), type=Pipes)
    import kvcache.host_tier
    from engine.parallel.rank import main as rank_main

    def say(what: str) -> None:
        os.write(pipes.says, f"{what}\n".encode())

    kvcache.host_tier.new_copier = lambda device: HeldCopier(pipes.gates, say)
    return rank_main()


if __name__ == "__main__":
    sys.exit(main())
