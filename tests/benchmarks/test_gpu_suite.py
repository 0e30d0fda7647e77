"""The suite's parts, here small programs: what each of them does to the next, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_suite import PARTS, Part, choose, run_parts

PASSES = Part("passes", "-c print('hello')", 60)
FAILS = Part("fails", "-c raise(SystemExit(3))", 60)
FINDS = Part("finds", "-c open('{json}','w').write('[1,2]')", 60)


def test_a_part_that_fails_or_is_ended_does_not_stop_the_next(tmp_path: Path) -> None:
    hangs = Part("hangs", "-c __import__('signal').pause()", 0.1)
    ended = run_parts([FAILS, hangs, FINDS, PASSES], {"passes": ["-v"]}, 600, tmp_path, {"a": 1})
    assert [(e.part, e.rc) for e in ended] == [
        ("fails", 3),
        ("hangs", None),
        ("finds", 0),
        ("passes", 0),
    ]
    kept = json.loads((tmp_path / "suite.json").read_text())
    assert kept["a"] == 1 and list(kept["parts"]) == ["fails", "hangs", "finds", "passes"]
    assert kept["parts"]["finds"]["result"] == [1, 2]
    log = (tmp_path / "suite.log").read_text()
    assert "hello" in log and "-c print('hello') -v" in log


def test_parts_beyond_the_whole_limit_are_not_reached(tmp_path: Path) -> None:
    assert run_parts([PASSES], {}, 0, tmp_path, {}) == []


def test_kernels_are_compiled_once_for_the_parts_that_share_them(tmp_path: Path) -> None:
    """And nowhere else: the first of them finds none."""
    write = "__import__('pathlib').Path(__import__('os').environ['TRITON_CACHE_DIR'])"
    cold = Part("cold", f"-c {write}.mkdir()", 60, kernels="model")
    cached = Part("cached", f"-c {write}.rmdir()", 60, kernels="model")
    other = Part("other", f"-c {write}.rmdir()", 60, kernels="another")
    ended = run_parts([cold, cached, other], {}, 600, tmp_path, {})
    assert [e.rc for e in ended] == [0, 0, 1]


def test_parts_are_chosen_by_name_and_by_how_many_gpus_there_are() -> None:
    assert [p.name for p in choose("kernels,tests-gpu", 1)] == ["tests-gpu", "kernels"]
    assert choose(None, 0) == []
    assert [p.name for p in PARTS if p not in choose(None, 1)] == ["cp", "handoff"]
    assert choose(None, 2) == PARTS
    with pytest.raises(ValueError, match="--parts kernel: accepted are tests-kernels, tests-gpu, "):
        choose("tests-gpu,kernel", 1)
    with pytest.raises(ValueError, match="--parts cp: needs 2 GPUs, here are 1"):
        choose("cp", 1)
