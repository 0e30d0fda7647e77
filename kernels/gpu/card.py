"""What a kernel's launch must know of the card it runs on."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True)
class Card:
    num_processors: int  # multiprocessors
    capability: int  # major compute capability
    shared_bytes: int  # of memory that one program may have on its multiprocessor
    multiplies_fp8: bool = False  # its tensor cores take e4m3


@functools.cache
def card_of(device: torch.device) -> Card:
    """Outside a card, as in Triton's interpreter, as few processors as a test can see shared work
    with."""
    if device.type != "cuda":
        return Card(4, 0, 1 << 20)
    properties = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    limits = triton.runtime.driver.active.utils.get_device_properties(index)
    multiplies_fp8 = (properties.major, properties.minor) >= (8, 9)
    return Card(
        properties.multi_processor_count,
        properties.major,
        limits["max_shared_mem"],
        multiplies_fp8,
    )
