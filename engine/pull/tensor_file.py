"""A safetensors file written tensor by tensor, so that a checkpoint is never in memory as a whole.

Follows the safetensors format: 8 bytes little-endian header size, a JSON header that may be padded
with spaces, then the tensors' bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

HEADER_BYTES = 512 * 1024  # reserved before the data, filled in at the end
DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class TensorFileWriter:
    """Context manager; the file is complete only after a clean exit."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.seek(8 + HEADER_BYTES)
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offset = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a CPU tensor of a dtype in DTYPE_NAMES. Raises ValueError on a second `name`."""
        if name in self._header:
            raise ValueError(f"tensor {name!r} was written before")
        data = tensor.contiguous().view(torch.uint8).numpy()
        end = self._offset + data.nbytes
        self._header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._offset, end],
        }
        self._file.write(data.data)
        self._offset = end

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is None:
                self._finish()

    def _finish(self) -> None:
        header = json.dumps(self._header, separators=(",", ":")).encode()
        if len(header) > HEADER_BYTES:
            raise ValueError(f"header takes {len(header)} bytes, at most {HEADER_BYTES} fit")
        self._file.seek(0)
        self._file.write(HEADER_BYTES.to_bytes(8, "little"))
        self._file.write(header.ljust(HEADER_BYTES))
