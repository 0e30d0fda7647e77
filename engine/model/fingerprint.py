"""Which model a folder holds, in a few hex digits: from config.json and, of the safetensors that a
load reads, each tensor's name, type and shape and a few bytes of many. Reads some megabytes of the
largest models; loads no torch, since front ends ask too."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"

# Tensors that are looked into, of all files together, so that the largest models take no longer.
# Which ones follows from hashes of their names: no numbering of layers or experts falls in step.
_NUM_SAMPLES = 2048
_SAMPLE_BYTES = 256  # from the middle of the tensor
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]  # [begin, end) in the data, which follows the header


def fingerprint(folder: Path) -> str:
    """Equal for copies of a model, however its tensors are dealt to files. Another one for other
    weights of the same shapes, unless they differ in a few places only. Empty where the folder does
    not hold all weights. Raises OSError or ValueError where what is there is damaged."""
    named = _named_tensors(folder)  # None: all that the one file holds
    files = {SINGLE} if named is None else set(named.values())
    if not all((folder / file).is_file() for file in files):
        return ""
    digest = hashlib.sha256(_canonical(_read_object(folder / "config.json")))
    where: dict[str, tuple[Path, int, _Tensor]] = {}  # the file, where its data begins
    for file in files:
        path = folder / file
        tensors, begin = _read_header(path)
        for name, tensor in tensors.items():
            if named is None or named.get(name) == file:
                where[name] = path, begin, tensor
    for name, (_, _, tensor) in sorted(where.items()):
        digest.update(_canonical([name, tensor.dtype, tensor.shape]))
    chosen = heapq.nsmallest(_NUM_SAMPLES, where, key=lambda name: _hash(name.encode()))
    for sample in _read_samples({name: where[name] for name in chosen}):
        digest.update(sample)
    return digest.hexdigest()[:16]


def _named_tensors(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, by the index; None where there is no index."""
    if not (folder / INDEX).is_file():
        return None
    weight_map = _read_object(folder / INDEX).get("weight_map")
    try:
        return msgspec.convert(weight_map, dict[str, str])
    except msgspec.ValidationError as error:
        raise ValueError(f"{folder / INDEX}: weight_map: {error}") from error


def _read_header(path: Path) -> tuple[dict[str, _Tensor], int]:
    """The tensors of a safetensors file, and where its data begins."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header would be too long")
        header = file.read(num_bytes)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {n: msgspec.json.decode(raw, type=_Tensor) for n, raw in entries.items()}
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    return tensors, 8 + num_bytes


def _read_samples(where: Mapping[str, tuple[Path, int, _Tensor]]) -> list[bytes]:
    """One of each tensor, in the order of their names; each file is opened once."""
    by_file: dict[Path, list[tuple[int, int, str]]] = defaultdict(list)
    for name, (path, data_begin, tensor) in where.items():
        begin, end = tensor.data_offsets
        num_bytes = min(end - begin, _SAMPLE_BYTES)
        middle = data_begin + begin + (end - begin - num_bytes) // 2
        by_file[path].append((middle, num_bytes, name))
    samples: dict[str, bytes] = {}
    for path, places in by_file.items():
        with path.open("rb", buffering=0) as file:
            for position, num_bytes, name in sorted(places):
                file.seek(position)
                samples[name] = file.read(num_bytes)
                if len(samples[name]) != num_bytes:
                    raise ValueError(f"{path} ends within the tensor {name!r}")
    return [samples[name] for name in sorted(samples)]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
