"""A step's small host arrays on their way to the device: one copy, for which nobody waits. Knows
nothing of what they mean."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_ALIGN: Final = 16  # bytes
_NUM_BUFFERS: Final = 4  # copies that may be under way


class _Pinned:
    """Host memory that a copy reads, and when it is free again."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


class Staging:
    """`send` arrays. On a CPU the tensors share the arrays' memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shares = device.type == "cpu"
        self._buffers: list[_Pinned] = []
        self._next = 0

    def send(
        self, *arrays: npt.NDArray[Any], out: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Each array as a tensor on the device, in order with its current stream. `out` (uint8, at
        least `size_of(*arrays)`): device memory to use, so that arrays of the same shapes and
        dtypes always come to the same place."""
        if self._shares:
            return [torch.from_numpy(array) for array in arrays]
        num_bytes = size_of(*arrays)
        pinned = self._take(num_bytes)
        host = pinned.bytes.numpy()
        places = []
        begin = 0
        for array in arrays:
            end = begin + array.nbytes
            host[begin:end] = array.reshape(-1).view(np.uint8)
            places.append((begin, end))
            begin = _aligned(end)
        if out is None:
            out = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        there = out[:num_bytes]
        there.copy_(pinned.bytes[:num_bytes], non_blocking=True)
        pinned.copied.record()
        return [
            there[begin:end].view(torch.from_numpy(array).dtype).view(array.shape)
            for array, (begin, end) in zip(arrays, places, strict=True)
        ]

    def _take(self, num_bytes: int) -> _Pinned:
        """The buffer that was used longest ago; waits where its copy is still under way."""
        if len(self._buffers) < _NUM_BUFFERS:
            self._buffers.append(_Pinned(max(num_bytes, 1 << 16)))
            return self._buffers[-1]
        place = self._next
        self._next = (place + 1) % _NUM_BUFFERS
        self._buffers[place].copied.synchronize()
        if self._buffers[place].bytes.numel() < num_bytes:
            self._buffers[place] = _Pinned(2 * num_bytes)
        return self._buffers[place]


def size_of(*arrays: npt.NDArray[Any]) -> int:
    """Bytes that the arrays take together on the device."""
    return sum(_aligned(array.nbytes) for array in arrays)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
