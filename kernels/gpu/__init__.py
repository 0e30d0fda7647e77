"""Kernels that Triton compiles. What is compiled is kept by triton_cache.py."""

import os

os.environ.setdefault("TRITON_CACHE_MANAGER", "kernels.gpu.triton_cache:TritonCache")
