"""Run once in an image's build, as `image_warm_up.py cpu|gpu`: compiles the CPU kernels, for gpu
Triton's C module as well, and what serving imports to byte code. All is written where it is looked
for at start-up, on a file system that is read-only by then.
"""

from __future__ import annotations

import compileall
import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
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
    "server.app",
    "server.bench.options",
    "server.launcher",
    "server.roles",
    "server.status_command",
    "server.verbs",
    "uvicorn.protocols.http.h11_impl",
)


def main(target: str) -> None:
    compile_cpu_kernels()
    if target == "gpu":
        build_triton_module()
    packages = Path(str(kernels.__file__)).parent.parent
    for package in ("server", "engine", "kvcache", "kernels"):
        compileall.compile_dir(packages / package, quiet=1)
    for name in IMPORTED:
        importlib.import_module(name)
    if target == "cpu":  # the other one needs a driver, which is the host's
        importlib.import_module("mooncake.engine")


def compile_cpu_kernels() -> None:
    os.environ["PLAIT_HOME"] = str(threads.SHIPPED.parent)
    threads.configure(len(os.sched_getaffinity(0)))
    linear.warm_up((torch.bfloat16,))  # what --dtype auto is on a CPU


def build_triton_module() -> None:
    """The C module by which Triton launches kernels. It is linked against the driver's library, for
    which an empty one stands in here; hence it cannot be loaded before it is in the image."""
    from kernels.gpu.triton_cache import SHIPPED

    os.environ["TRITON_CACHE_DIR"] = str(SHIPPED)
    with tempfile.TemporaryDirectory() as folder:
        library = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1"]
        subprocess.run(["gcc", *library, "-x", "c", "/dev/null"], check=True)
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        # It has no symbols, and a linker that keeps only what it sees used would leave it out.
        compiler = Path(folder) / "cc"
        compiler.write_text('#!/bin/sh\nexec gcc -Wl,--no-as-needed "$@"\n')
        compiler.chmod(0o755)
        os.environ["CC"] = str(compiler)
        from triton.backends.nvidia.driver import CudaUtils

        with contextlib.suppress(ImportError):
            CudaUtils()
    if not list(SHIPPED.rglob("cuda_utils*.so")):
        raise SystemExit(f"Triton has built no cuda_utils in {SHIPPED}")


if __name__ == "__main__":
    main(sys.argv[1])
