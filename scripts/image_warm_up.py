"""Run once in the image's build: compiles the CPU kernels, and what serving imports to byte code.

Both are written where they are looked for at start-up, on a file system that is read-only by then.
"""

from __future__ import annotations

import compileall
import importlib
import os
from pathlib import Path

import torch

import kernels
from kernels import linear
from kernels.cpu import threads

# What the processes of a fleet import, those that are imported late included.
IMPORTED = (
    "engine.parallel.rank",
    "engine.pull.__main__",
    "engine.worker",
    "h11",
    "mooncake.engine",
    "server.app",
    "server.bench.options",
    "server.launcher",
    "server.roles",
    "server.status_command",
    "uvicorn.protocols.http.h11_impl",
)


def main() -> None:
    os.environ["PLAIT_HOME"] = str(threads.SHIPPED.parent)
    threads.configure(len(os.sched_getaffinity(0)))
    linear.warm_up((torch.bfloat16,))  # what --dtype auto is on a CPU
    packages = Path(str(kernels.__file__)).parent.parent
    for package in ("server", "engine", "kvcache", "kernels"):
        compileall.compile_dir(packages / package, quiet=1)
    for name in IMPORTED:
        importlib.import_module(name)


if __name__ == "__main__":
    main()
