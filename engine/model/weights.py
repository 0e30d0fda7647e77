"""A checkpoint's tensors: safetensors, one file or shards with an index, memory-mapped and copied
into the dtype and device of the model. Knows names and shapes as the model asks for them, no
architecture."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open

from engine.model.fingerprint import INDEX, SINGLE
from kernels.block_fp8 import BLOCK, BlockFp8, Weight, widen

logger = logging.getLogger(__name__)

_FP8: Final = "F8_E4M3"
_SCALE: Final = "_scale_inv"
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_FLOATS: Final = ("BF16", "F16", "F32", "F64")


class WeightError(Exception):
    """A checkpoint that cannot be loaded; says which tensor, in which file, what was expected."""


class Checkpoint:
    """The tensors of one folder; open for the time of a load, best as a context manager.

    Every tensor is copied out of the map, so that the files may be replaced while the model
    serves. At most one tensor is held twice, and no shard's map is needed after `close`.
    """

    def __init__(
        self,
        folder: Path | str,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        keeps_fp8: bool = False,
    ) -> None:
        """`keeps_fp8`: `weight` leaves in block fp8 what is stored so, which a checkpoint that
        `has_block_fp8` can do. Raises WeightError where no safetensors are found, a shard that the
        index names is missing, or the index is damaged."""
        self._keeps_fp8 = keeps_fp8
        self.folder = Path(folder)
        self.device = torch.device(device)
        self.dtype = dtype
        self._open: dict[Path, Any] = {}
        self._file_of = self._read_names()
        self._unused = set(self._file_of)
        self._block: tuple[int, int] | None = None
        total = sum(path.stat().st_size for path in set(self._file_of.values()))
        self._progress = _progress_bar()
        self._task = self._progress.add_task(f"Loading {self.folder.name}", total=total)
        self._num_bytes = 0
        self._held_bytes = 0

    def __enter__(self) -> Checkpoint:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(complete=error is None)

    def close(self, *, complete: bool = True) -> None:
        """Unmap the files and report; `complete` says that the model took all that it wanted."""
        self._open.clear()
        if complete:
            self._progress.update(self._task, completed=self._progress.tasks[0].total)
            count = len(self._file_of) - len(self._unused)
            logger.info("loaded %d tensors, %.2f GB, from %s", count, self.gigabytes, self.folder)
            if self._unused:
                names = ", ".join(sorted(self._unused)[:20])
                logger.debug("%d tensors not used, such as %s", len(self._unused), names)
        self._progress.stop()

    @property
    def gigabytes(self) -> float:
        """Read so far, as stored."""
        return self._num_bytes / 1e9

    @property
    def held_bytes(self) -> int:
        """Of all that was asked for so far, as it is held."""
        return self._held_bytes

    @property
    def unused(self) -> frozenset[str]:
        """Names that were never asked for."""
        return frozenset(self._unused)

    def has(self, name: str) -> bool:
        return name in self._file_of

    def get(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensor `name`, of exactly `shape`, as `dtype` (None: the checkpoint's).

        fp8 weights with a block scale beside them (`<name>_scale_inv`) are dequantised. Raises
        WeightError for a missing, mis-shaped or not floating-point tensor.
        """
        out = torch.empty(tuple(shape), dtype=dtype or self.dtype, device=self.device)
        self.fill(out, name)
        return out

    def shape(self, name: str) -> list[int]:
        return list(self._slice(name).get_shape())

    def fused(
        self, parts: Sequence[tuple[str, int]], *inner: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Tensors [rows, *inner] of `parts` (name, rows), one below the other in one tensor."""
        total = sum(rows for _, rows in parts)
        out = torch.empty((total, *inner), dtype=dtype or self.dtype, device=self.device)
        self._fill_rows(out, parts)
        return out

    def weight(self, parts: Sequence[tuple[str, int]], columns: int) -> Weight:
        """Matrices [rows, columns] of `parts` (name, rows), one below the other. In block fp8 where
        all are stored so, that is kept, and each begins where a block does."""
        begin_blocks = not any(rows % BLOCK for _, rows in parts[:-1])
        if not all(self.is_kept(name) for name, _ in parts) or columns % 16 or not begin_blocks:
            return self.fused(parts, columns)
        out = BlockFp8.empty(sum(rows for _, rows in parts), columns, device=self.device)
        self._fill_rows(out, parts)
        return out

    def _fill_rows(self, out: Weight, parts: Sequence[tuple[str, int]]) -> None:
        begin = 0
        for name, rows in parts:
            self.fill(out[begin : begin + rows], name)
            begin += rows

    def is_kept(self, name: str) -> bool:
        """Whether `weight` leaves this tensor in block fp8."""
        is_fp8: bool = self.has(name) and self._slice(name).get_dtype() == _FP8
        return self._keeps_fp8 and is_fp8

    def fill(self, out: Weight, name: str) -> None:
        """Copy the tensor `name` into `out`, whose shape is the expected one. Errors as `get`."""
        stored = self._slice(name)
        path, found = self._file_of[name], tuple(stored.get_shape())
        kind = stored.get_dtype()
        if found != tuple(out.shape):
            raise WeightError(
                f"tensor {name!r} in {path} has the shape {list(found)}, expected {list(out.shape)}"
            )
        if not name.endswith(_SCALE):
            self._held_bytes += out.nbytes
        if isinstance(out, BlockFp8):
            out.codes.copy_(self._read(name))
            self.fill(out.scales, self._scale_name(name))
            self._check_scales(name, out.scales)
        elif kind == _FP8:
            self._dequantise(name, out)
        elif kind in _FLOATS:
            out.copy_(self._read(name))
        else:
            raise WeightError(
                f"tensor {name!r} in {path} is stored as {kind}, "
                f"expected one of {', '.join((*_FLOATS, _FP8))}"
            )

    def _dequantise(self, name: str, out: torch.Tensor) -> None:
        """Of blocks of the checkpoint's own size."""
        block = self._block_size()
        codes = self._read(name).to(self.device)
        grid = [math.ceil(size / of) for size, of in zip(codes.shape, block, strict=True)]
        scales = self.get(self._scale_name(name), grid, torch.float32)
        self._check_scales(name, scales)
        widen(codes, scales, out, block)

    def _scale_name(self, name: str) -> str:
        scale_name = f"{name}{_SCALE}"
        if not self.has(scale_name):
            raise WeightError(
                f"tensor {name!r} in {self._file_of[name]} is fp8 without a block scale: "
                f"{scale_name!r} is missing"
            )
        return scale_name

    def _check_scales(self, name: str, scales: torch.Tensor) -> None:
        """Every answer of a model would be NaN for one that is no number."""
        wrong = (~scales.isfinite()).nonzero()
        if len(wrong):
            at = wrong[0].tolist()
            raise WeightError(
                f"tensor {self._scale_name(name)!r} in {self._file_of[name]} has "
                f"{scales[tuple(at)].item()} at {at}, expected finite scales"
            )

    def _block_size(self) -> tuple[int, int]:
        if self._block is None:
            config = _read_json(self.folder / "config.json")
            block = (config.get("quantization_config") or {}).get("weight_block_size")
            if not (isinstance(block, list) and len(block) == 2 and min(block) > 0):
                raise WeightError(
                    f"{self.folder / 'config.json'} has fp8 weights but its quantization_config's "
                    f"weight_block_size is {block!r}, expected two positive numbers"
                )
            self._block = int(block[0]), int(block[1])
        return self._block

    def _slice(self, name: str) -> Any:
        path = self._file_of.get(name)
        if path is None:
            raise WeightError(f"tensor {name!r} is missing in {self.folder}")
        try:
            handle = self._open.get(path)
            if handle is None:
                handle = self._open[path] = safe_open(path, framework="pt", device="cpu")
            return handle.get_slice(name)
        except SafetensorError as error:
            raise WeightError(f"tensor {name!r} cannot be read from {path}: {error}") from error

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open[self._file_of[name]].get_tensor(name)
        self._unused.discard(name)
        self._num_bytes += tensor.nbytes
        self._progress.advance(self._task, tensor.nbytes)
        return tensor

    def _read_names(self) -> dict[str, Path]:
        """Which file holds each tensor."""
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise WeightError(f"{index} has no weight_map")
            for name, file in weight_map.items():
                if not isinstance(file, str) or Path(file).name != file:
                    raise WeightError(f"{index} puts {name!r} into {file!r}, expected a file name")
                if not (self.folder / file).is_file():
                    raise WeightError(
                        f"shard {file} is missing in {self.folder}; {index.name} expects "
                        f"{name!r} in it"
                    )
            return {name: self.folder / file for name, file in weight_map.items()}
        if not single.is_file():
            raise WeightError(
                f"no weights in {self.folder}: expected {SINGLE}, or {INDEX} and its shards"
            )
        try:
            with safe_open(single, framework="pt", device="cpu") as handle:
                return dict.fromkeys(handle.keys(), single)
        except SafetensorError as error:
            raise WeightError(f"{single} is not a safetensors file: {error}") from error


def weight_bytes(folder: Path | str, dtype: torch.dtype, *, keeps_fp8: bool = False) -> int:
    """About what a checkpoint takes once it is loaded in `dtype`: layers beyond the config's count
    are left out, and of fp8 blocks that are not kept the scales. Errors as Checkpoint."""
    config = _read_json(Path(folder) / "config.json")
    num_layers = config.get("num_hidden_layers")
    num_bytes = 0
    checkpoint = Checkpoint(folder, "cpu", dtype, keeps_fp8=keeps_fp8)
    for name in checkpoint.unused:
        layer = _LAYER.search(name)
        is_beyond = layer is not None and num_layers and int(layer[1]) >= num_layers
        if is_beyond:
            continue
        num_elements = math.prod(checkpoint.shape(name))
        if not name.endswith(_SCALE):
            num_bytes += num_elements * (1 if checkpoint.is_kept(name) else dtype.itemsize)
        elif checkpoint.is_kept(name.removesuffix(_SCALE)):
            num_bytes += num_elements * torch.float32.itemsize
    checkpoint.close(complete=False)
    return num_bytes


def has_block_fp8(folder: Path | str) -> bool:
    """Whether its weights are in the blocks that kernels multiply, by its config.json."""
    quantization = _read_json(Path(folder) / "config.json").get("quantization_config") or {}
    return quantization.get("weight_block_size") == [BLOCK, BLOCK]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise WeightError(f"{path} is not a JSON object")
    return value


def _progress_bar() -> Progress:
    """On stderr, silent where that is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
