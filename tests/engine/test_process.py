"""How a process ends."""

from __future__ import annotations

import signal
import subprocess
import sys

UNWINDS = """
import os, signal
from engine.process import unwind_when_asked

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as a parent may have left it
unwind_when_asked()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        signal.pause()
finally:
    print("cleared away")
"""
LEAVES = """
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


def test_a_process_that_is_asked_to_end_clears_away_what_it_began() -> None:
    ended = subprocess.run([sys.executable, "-c", UNWINDS], stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "cleared away\n")


def test_an_exit_runs_what_was_registered_and_searches_for_no_garbage() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 3
    assert ended.stdout == "what was registered has run\n"
