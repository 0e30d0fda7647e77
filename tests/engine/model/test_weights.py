"""Reading checkpoints: what is copied, and what each kind of damage is called."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.model.registry import load_model
from engine.model.weights import Checkpoint, WeightError, has_block_fp8, weight_bytes
from kernels.block_fp8 import BlockFp8
from tests.tiny import save_dsa, save_dsa_fp8, save_llama

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def save_shards(folder: Path, *shards: dict[str, torch.Tensor]) -> dict[str, str]:
    """Shards and their index; returns the index's weight_map."""
    weight_map = {}
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def open_cpu(folder: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return Checkpoint(folder, "cpu", dtype)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# What is read


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_reads_a_single_file_into_the_dtype(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    weight = torch.randn(3, 5).to(stored)
    save_file({"a": weight}, tmp_path / SINGLE)
    with open_cpu(tmp_path, wanted) as checkpoint:
        assert checkpoint.has("a") and not checkpoint.has("b")
        got = checkpoint.get("a", (3, 5))
        exact = checkpoint.get("a", (3, 5), torch.float32)
    assert torch.equal(got, weight.to(wanted))
    assert torch.equal(exact, weight.float())


def test_reads_shards_by_their_index(tmp_path: Path) -> None:
    a, b, c = torch.randn(2, 3), torch.randn(4), torch.randn(1, 3)
    save_shards(tmp_path, {"a": a, "b": b}, {"c": c})
    with open_cpu(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.get("c", (1, 3)), c)
        assert torch.equal(checkpoint.get("b", [4]), b)
        assert torch.equal(checkpoint.fused([("c", 1), ("a", 2)], 3), torch.cat((c, a)))
        assert checkpoint.unused == frozenset()


def test_fills_a_part_of_a_tensor(tmp_path: Path) -> None:
    save_file({"expert": torch.ones(2, 3)}, tmp_path / SINGLE)
    stacked = torch.zeros(4, 2, 3, dtype=torch.bfloat16)
    with open_cpu(tmp_path) as checkpoint:
        checkpoint.fill(stacked[2], "expert")
    assert stacked.sum(dim=(1, 2)).tolist() == [0, 0, 6, 0]


def test_owns_what_it_has_read(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    save_file({"a": weight}, tmp_path / SINGLE)
    with open_cpu(tmp_path) as checkpoint:
        got = checkpoint.get("a", (64, 64))
    with (tmp_path / SINGLE).open("r+b") as file:  # a new download over the old one
        file.write(b"\xff" * (tmp_path / SINGLE).stat().st_size)
    assert torch.equal(got, weight)


def test_unused_tensors_are_allowed_and_named_at_debug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({"a": torch.ones(2), inv_freq: torch.ones(3)}, tmp_path / SINGLE)
    with caplog.at_level(logging.DEBUG), open_cpu(tmp_path) as checkpoint:
        checkpoint.get("a", (2,))
        assert checkpoint.unused == {inv_freq}
    debug = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
    assert any(inv_freq in message for message in debug)


# fp8


def save_fp8(
    folder: Path, shape: tuple[int, int], block: Any, *, scaled: bool = True
) -> torch.Tensor:
    """A block-quantised weight `w.weight`; returns what it stands for."""
    torch.manual_seed(1)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
    tensors = {"w.weight": weight}
    if scaled:
        tensors["w.weight_scale_inv"] = scales
    save_file(tensors, folder / SINGLE)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    (folder / "config.json").write_text(json.dumps(config))
    widened = torch.kron(scales, torch.ones(128, 128))[: shape[0], : shape[1]]
    return weight.float() * widened


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 129)])
def test_fp8_is_dequantised(tmp_path: Path, shape: tuple[int, int]) -> None:
    want = save_fp8(tmp_path, shape, [128, 128])
    with open_cpu(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.get("w.weight", shape), want)
        assert torch.equal(checkpoint.get("w.weight", shape, torch.bfloat16), want.bfloat16())
        assert checkpoint.unused == frozenset()


@pytest.mark.parametrize("keeps_fp8", [False, True])
@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
def test_fp8_needs_scales_that_are_numbers(tmp_path: Path, scale: float, keeps_fp8: bool) -> None:
    scales = torch.tensor([[1.0, scale]])
    codes = torch.ones(128, 144).to(torch.float8_e4m3fn)
    save_file({"w": codes, "w_scale_inv": scales}, tmp_path / SINGLE)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = rf"'w_scale_inv' in .* has {scale} at \[0, 1\], expected finite scales"
    with (
        Checkpoint(tmp_path, "cpu", torch.bfloat16, keeps_fp8=keeps_fp8) as checkpoint,
        pytest.raises(WeightError, match=told),
    ):
        checkpoint.weight([("w", 128)], 144)


def test_fp8_needs_its_scale(tmp_path: Path) -> None:
    save_fp8(tmp_path, (128, 128), [128, 128], scaled=False)
    with open_cpu(tmp_path) as checkpoint, pytest.raises(WeightError, match=r"w\.weight_scale_inv"):
        checkpoint.get("w.weight", (128, 128))


@pytest.mark.parametrize("block", [None, [128], [0, 128], 128])
def test_fp8_needs_a_block_size(tmp_path: Path, block: Any) -> None:
    save_fp8(tmp_path, (128, 128), block)
    with open_cpu(tmp_path) as checkpoint, pytest.raises(WeightError, match="weight_block_size is"):
        checkpoint.get("w.weight", (128, 128))


def test_fp8_scale_must_fit_the_blocks(tmp_path: Path) -> None:
    save_fp8(tmp_path, (128, 256), [64, 128])  # the scale has one row, blocks of 64 need two
    with (
        open_cpu(tmp_path) as checkpoint,
        pytest.raises(WeightError, match=r"scale_inv.*\[1, 2\], expected \[2, 2\]"),
    ):
        checkpoint.get("w.weight", (128, 256))


def save_fp8_parts(folder: Path, columns: int, **rows: int) -> dict[str, BlockFp8]:
    """Matrices of these names and rows, in block fp8."""
    torch.manual_seed(1)
    held = {name: BlockFp8.quantised(torch.randn(n, columns)) for name, n in rows.items()}
    tensors = {name: w.codes for name, w in held.items()}
    save_file(
        tensors | {f"{name}_scale_inv": w.scales for name, w in held.items()}, folder / SINGLE
    )
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    return held


def keeping(folder: Path) -> Checkpoint:
    return Checkpoint(folder, "cpu", torch.bfloat16, keeps_fp8=True)


def test_fp8_is_kept_part_below_part(tmp_path: Path) -> None:
    """The last part may end within a block."""
    held = save_fp8_parts(tmp_path, 144, a=128, b=256, c=72)
    with keeping(tmp_path) as checkpoint:
        got = checkpoint.weight([("b", 256), ("a", 128), ("c", 72)], 144)
        assert checkpoint.unused == frozenset()
    assert isinstance(got, BlockFp8)
    want = [held[name].to(torch.float32) for name in "bac"]
    assert torch.equal(got.to(torch.float32), torch.cat(want))


@pytest.mark.parametrize(
    "columns, parts",
    [(144, [("c", 72), ("a", 128)]), (72, [("a", 128)]), (144, [("a", 128), ("plain", 1)])],
    ids=["a part begins within a block", "no multiple of 16", "a part of another kind"],
)
def test_fp8_that_kernels_do_not_take_is_dequantised(
    tmp_path: Path, columns: int, parts: list[tuple[str, int]]
) -> None:
    save_fp8_parts(tmp_path, columns, a=128, c=72)
    with safe_open(tmp_path / SINGLE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors | {"plain": torch.ones(1, columns)}, tmp_path / SINGLE)
    with keeping(tmp_path) as checkpoint, open_cpu(tmp_path, torch.bfloat16) as plain:
        got, want = checkpoint.weight(parts, columns), plain.weight(parts, columns)
    assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


def test_fp8_that_is_asked_for_as_a_tensor_is_dequantised(tmp_path: Path) -> None:
    held = save_fp8_parts(tmp_path, 144, a=128)
    with keeping(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.get("a", (128, 144)), held["a"].to(torch.bfloat16))


@pytest.mark.parametrize("scale", [torch.ones(1, 1), torch.ones(2, 2), None])
def test_fp8_that_is_kept_needs_a_scale_of_its_blocks(
    tmp_path: Path, scale: torch.Tensor | None
) -> None:
    tensors = {"w": torch.ones(128, 144).to(torch.float8_e4m3fn)}
    save_file(tensors if scale is None else tensors | {"w_scale_inv": scale}, tmp_path / SINGLE)
    missing = r"fp8 without a block scale: 'w_scale_inv' is missing"
    with (
        keeping(tmp_path) as checkpoint,
        pytest.raises(WeightError, match=missing if scale is None else r"expected \[1, 2\]"),
    ):
        checkpoint.weight([("w", 128)], 144)


@pytest.mark.parametrize("block, has", [([128, 128], True), ([64, 128], False), (None, False)])
def test_kernels_take_blocks_of_one_size(tmp_path: Path, block: Any, has: bool) -> None:
    save_fp8(tmp_path, (128, 128), block)
    assert has_block_fp8(tmp_path) == has
    (tmp_path / "config.json").write_text("{}")
    assert not has_block_fp8(tmp_path)


# Damage


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE)
    with open_cpu(tmp_path) as checkpoint, pytest.raises(WeightError, match=r"'b' is missing in /"):
        checkpoint.get("b", (2,))


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1)])
def test_a_wrong_shape_is_named_with_both(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_file({"a": torch.ones(2, 3)}, tmp_path / SINGLE)
    with open_cpu(tmp_path) as checkpoint, pytest.raises(WeightError) as caught:
        checkpoint.get("a", shape)
    for part in ("'a'", SINGLE, "[2, 3]", f"expected {list(shape)}"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e5m2, "F8_E5M2")])
def test_an_unknown_dtype_is_named(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    save_file({"a": torch.ones(2).to(dtype)}, tmp_path / SINGLE)
    with open_cpu(tmp_path) as checkpoint, pytest.raises(WeightError, match=f"{name}, expected"):
        checkpoint.get("a", (2,))


def test_a_missing_shard_is_found_at_once(tmp_path: Path) -> None:
    weight_map = save_shards(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (tmp_path / weight_map["b"]).unlink()
    with pytest.raises(WeightError, match=r"model-00002-of-00002.safetensors.*'b'"):
        open_cpu(tmp_path)


def test_an_index_that_is_wrong_about_a_shard(tmp_path: Path) -> None:
    weight_map = save_shards(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"b": weight_map["a"]}}))
    with open_cpu(tmp_path) as checkpoint, pytest.raises(WeightError, match=r"'b'.*00001-of-00002"):
        checkpoint.get("b", (2,))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightError, match=INDEX):
        open_cpu(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_may_not_leave_its_folder(tmp_path: Path, file: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(WeightError, match=r"'a' into .* expected a file name"):
        open_cpu(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", None])
def test_a_damaged_file(tmp_path: Path, content: bytes | None) -> None:
    save_file({"a": torch.ones(200)}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:-10] if content is None else content)
    with pytest.raises(WeightError, match=SINGLE):
        open_cpu(tmp_path)


def test_a_damaged_shard(tmp_path: Path) -> None:
    weight_map = save_shards(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (tmp_path / weight_map["b"]).write_bytes(b"short")
    with open_cpu(tmp_path) as checkpoint:
        checkpoint.get("a", (2,))
        with pytest.raises(WeightError, match=r"'b' cannot be read from .*00002"):
            checkpoint.get("b", (2,))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightError, match=r"expected model.safetensors, or .*index.json"):
        open_cpu(tmp_path)


# Progress


def test_a_terminal_sees_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(300_000)}, tmp_path / SINGLE)
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with open_cpu(tmp_path) as checkpoint:
        checkpoint.get("a", (300_000,))
    assert f"Loading {tmp_path.name}" in terminal.getvalue()
    assert "1.2/1.2 MB" in terminal.getvalue()


def test_a_log_sees_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.ones(300_000), "b": torch.ones(5)}, tmp_path / SINGLE)
    with caplog.at_level(logging.INFO), open_cpu(tmp_path) as checkpoint:
        checkpoint.get("a", (300_000,))
        checkpoint.get("b", (5,))
    assert len(caplog.records) == 1
    assert "2 tensors" in caplog.text and str(tmp_path) in caplog.text
    assert capfd.readouterr() == ("", "")


def test_a_failed_load_reports_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE)
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(WeightError),
        open_cpu(tmp_path) as checkpoint,
    ):
        checkpoint.get("missing", (2,))
    assert caplog.records == []


def test_the_size_of_what_would_be_loaded_is_known_beforehand(tmp_path: Path) -> None:
    """In the wanted dtype, without the layers beyond the model's and the scales of fp8 blocks."""
    save_shards(
        tmp_path,
        {"model.layers.0.a": torch.zeros(3, 5), "model.layers.0.a_scale_inv": torch.zeros(1, 1)},
        {"model.layers.1.a": torch.zeros(7, dtype=torch.bfloat16), "lm_head": torch.zeros(2, 2)},
    )
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    assert weight_bytes(tmp_path, torch.bfloat16) == 2 * (15 + 4)
    assert weight_bytes(tmp_path, torch.float32) == 4 * (15 + 4)


@pytest.mark.parametrize("save", [save_llama, save_dsa, save_dsa_fp8])
def test_a_loaded_model_knows_its_size(save: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = save(tmp_path)
    model = load_model(folder, "cpu", torch.float32)
    assert model.num_bytes == weight_bytes(folder, torch.float32)


def test_the_size_of_fp8_that_is_kept_has_its_scales(tmp_path: Path) -> None:
    save_fp8_parts(tmp_path, 144, a=128, b=256)
    kept, widened = 144 * 384 + 4 * 2 * 3, 2 * 144 * 384
    assert weight_bytes(tmp_path, torch.bfloat16, keeps_fp8=True) == kept
    assert weight_bytes(tmp_path, torch.bfloat16) == widened
    for opened, num_bytes in (
        (keeping(tmp_path), kept),
        (open_cpu(tmp_path, torch.bfloat16), widened),
    ):
        with opened as checkpoint:
            checkpoint.weight([("a", 128), ("b", 256)], 144)
            assert checkpoint.held_bytes == num_bytes
