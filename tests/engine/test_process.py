"""How a process ends."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit
from engine.process import leave

class Held:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("was searched for")

atexit.register(print, "what was registered has run")
Held()
leave(3)
"""


def test_an_exit_runs_what_was_registered_and_searches_for_no_garbage() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 3
    assert ended.stdout == "what was registered has run\n"
