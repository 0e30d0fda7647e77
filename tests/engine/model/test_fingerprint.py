"""A model's fingerprint: equal for copies, another one wherever answers would be."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model import fingerprint as module
from engine.model.fingerprint import fingerprint
from tests.tiny import save_dsa

NAME = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dsa(tmp_path_factory.mktemp("models") / "a")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def test_equal_for_copies_with_other_files_beside_the_weights(folder: Path, copy: Path) -> None:
    found = fingerprint(folder)
    assert re.fullmatch(r"[0-9a-f]{16}", found)
    (copy / "tokenizer.json").write_text("{}")
    (copy / "consolidated.safetensors").write_bytes(b"of another format")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert fingerprint(copy) == found


def test_equal_however_tensors_are_dealt_to_files(folder: Path, copy: Path) -> None:
    tensors = load_file(copy / NAME)
    (copy / NAME).unlink()
    parts = {f"model-{i}-of-3.safetensors": sorted(tensors)[i::3] for i in range(3)}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, copy / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert fingerprint(copy) == fingerprint(folder)
    (copy / "model-1-of-3.safetensors").unlink()
    assert fingerprint(copy) == ""


def test_another_one_for_another_seed_of_the_same_shapes(folder: Path, tmp_path: Path) -> None:
    other = save_dsa(tmp_path / "b", seed=1)
    assert (other / NAME).stat().st_size == (folder / NAME).stat().st_size
    assert (other / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert fingerprint(other) != fingerprint(folder)


def test_another_one_where_one_tensor_was_trained_on(folder: Path, copy: Path) -> None:
    for name, tensor in load_file(folder / NAME).items():
        changed = {**load_file(folder / NAME), name: torch.nextafter(tensor, tensor + 1)}
        save_file(changed, copy / NAME)
        assert fingerprint(copy) != fingerprint(folder), name


@pytest.mark.parametrize("what", ["config", "dtype", "name"])
def test_another_one_where_the_same_bytes_mean_something_else(
    folder: Path, copy: Path, what: str
) -> None:
    if what == "config":
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    else:
        content = (copy / NAME).read_bytes()
        old, new = {"dtype": (b'"F32"', b'"I32"'), "name": (b"lm_head", b"ln_head")}[what]
        assert old in content
        (copy / NAME).write_bytes(content.replace(old, new))
    assert fingerprint(copy) != fingerprint(folder)


def test_no_more_tensors_are_read_than_the_limit_and_files_beyond_memory_are_no_matter(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of many gigabytes: a sparse file, of which next to nothing is read."""
    rows = 1 << 33
    header = {
        f"layer.{i}": {"dtype": "U8", "shape": [rows], "data_offsets": [i * rows, (i + 1) * rows]}
        for i in range(10)
    }
    text = json.dumps(header).encode()

    def write(changed: list[int]) -> str:
        with (copy / NAME).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + 10 * rows)
            for layer in changed:
                file.seek(8 + len(text) + layer * rows + rows // 2)
                file.write(b"x")
        return fingerprint(copy)

    monkeypatch.setattr(module, "_NUM_SAMPLES", 4)
    plain = write([])
    assert sum(write([layer]) != plain for layer in range(10)) == 4


def test_empty_without_weights_and_an_error_where_they_are_damaged(copy: Path) -> None:
    path = copy / NAME
    content = path.read_bytes()
    for broken in (b"", content[:100], content[:-70_000], b"\xff" * 100):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"model\.safetensors (is not|ends within)"):
            fingerprint(copy)
    path.unlink()
    assert fingerprint(copy) == ""
    (copy / "model.safetensors.index.json").write_text('{"weight_map": 1}')
    with pytest.raises(ValueError, match=r"index\.json: weight_map: Expected"):
        fingerprint(copy)
