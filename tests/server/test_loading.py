"""Where a value comes from, and what a bad one or a bad file is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.options.arguments import parse
from server.options.config import OPTIONS, ConfigError
from server.options.loading import OTHER_VARIABLES, api_keys, load, misspelt_variables
from server.verbs import main

pytestmark = pytest.mark.usefixtures("no_variables_of_the_developer")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_flag_beats_variable_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "plait.yaml", "port: 1\nmax-n: 2\nmax_replays: 3\n")
    monkeypatch.setenv("PLAIT_PORT", "10")
    monkeypatch.setenv("PLAIT_MAX_N", "20")
    options = parse(["--config", path, "--port", "100"])
    assert (options.port, options.max_n, options.max_replays) == (100, 20, 3)
    assert options.max_logprobs == 20


def test_the_file_can_be_named_by_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_CONFIG", write(tmp_path / "plait.yaml", "port: 1\n"))
    assert parse([]).port == 1


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_HOME", "/somewhere")
    monkeypatch.setenv("PLAIT_PORT", "")
    assert parse([]).port == 8000


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("PLAIT_HOM", "PLAIT_HOME"),  # plait's, and no option
        ("PLAIT_PROT", "PLAIT_PORT"),
        ("PLAIT_API_KEYS", "PLAIT_API_KEY"),
        ("plait_max_total_token", "PLAIT_MAX_TOTAL_TOKENS"),
    ],
)
def test_a_misspelt_variable_is_named_with_what_was_meant_and_without_its_value(
    variable: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "hunter2")
    assert misspelt_variables() == [f"{variable}: means nothing here; did you mean {meant}?"]
    assert main(["frontend"]) == 2  # for another reason
    error = capsys.readouterr().err
    assert f"plait frontend: {variable}: means nothing here; did you mean {meant}?" in error
    assert "hunter2" not in error


@pytest.mark.parametrize(
    ("name", "is_close"), [("page_siz", True), ("drain_time_s", True), ("max_seqs", False)]
)
def test_flags_keys_and_variables_are_understood_alike(
    name: str,
    is_close: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--" + name.replace("_", "-"), "1"]) == 2
    with pytest.raises(ConfigError) as caught:
        parse(["--config", write(tmp_path / "plait.yaml", f"{name}: 1\n")])
    monkeypatch.setenv(f"PLAIT_{name.upper()}", "1")
    said = [capsys.readouterr().err, str(caught.value), *misspelt_variables()]
    assert ["did you mean" in line for line in said] == [is_close] * (3 if is_close else 2)


def test_variables_that_are_right_or_somebody_elses_are_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = [*OTHER_VARIABLES, *OPTIONS]
    # What Kubernetes sets in pods beside a service that is named plait, or plait-decode.
    services = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP"]
    services += ["PORT_8000_TCP_ADDR", "PORT_8000_TCP_PORT", "PORT_8000_TCP_PROTO"]
    for name in (*ours, *services, *(f"DECODE_{name}" for name in services)):
        monkeypatch.setenv(f"PLAIT_{name.upper()}", "1")
    assert misspelt_variables() == []


def test_null_in_a_file_means_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "plait.yaml", "port: null\npage_size:\n")
    assert parse(["--config", path]) == parse([])
    assert parse(["--config", write(tmp_path / "empty.yaml", "")]).port == 8000


@pytest.mark.parametrize("origin", ["flags", "variable", "file"])
def test_lists_come_repeated_by_commas_or_as_yaml(
    origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = []
    if origin == "flags":
        argv = ["--api-key", "a, b", "--api-key", "c", "--cors-allow-origins", "*"]
    elif origin == "variable":
        monkeypatch.setenv("PLAIT_API_KEY", "a,b,c")
        monkeypatch.setenv("PLAIT_CORS_ALLOW_ORIGINS", "*")
    else:
        text = "api-key: [a, b, c]\ncors-allow-origins: '*'\n"
        argv = ["--config", write(tmp_path / "plait.yaml", text)]
    options = parse(argv)
    assert api_keys(options) == ("a", "b", "c")
    assert options.cors_allow_origins == ("*",)


def test_workers_come_repeated_by_commas_or_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("tcp://a:1", "tcp://b:2")
    assert load({"workers": ["tcp://a:1", "tcp://b:2"]}).workers == both
    monkeypatch.setenv("PLAIT_WORKERS", "tcp://a:1, tcp://b:2")
    assert load({}).workers == both


@settings(deadline=None)
@given(
    st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1), min_size=1)
)
def test_a_list_survives_being_joined_by_commas(keys: list[str]) -> None:
    argv = [part for key in keys for part in ("--api-key", key)]
    repeated = api_keys(parse(argv))
    joined = api_keys(parse([f"--api-key={','.join(keys)}"]))
    assert repeated == joined == tuple(dict.fromkeys(keys))


def test_every_bad_value_is_reported_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAIT_MAX_N", "none")
    path = write(tmp_path / "plait.yaml", "page_size: yes\n")
    assert main(["serve", "--config", path, "--port", "x"]) == 2
    error = capsys.readouterr().err
    assert "--port x:" in error
    assert "PLAIT_MAX_N none:" in error
    assert f"page_size in {path} True:" in error


@pytest.mark.parametrize(
    "given",
    [
        "--hicache-ratio 2.0",  # the default's value, but given
        "--hicache-size 3.0",
        "--hicache-write-policy write_back",
        "--hicache-storage-backend file",
    ],
)
def test_options_of_a_host_tier_that_is_not_there_are_refused(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *given.split()]) == 2
    error = capsys.readouterr().err
    assert f"{given}: means nothing without --enable-hierarchical-cache; expected both" in error


def test_options_of_a_host_tier_from_anywhere_and_one_turned_off_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_HICACHE_SIZE", "3")
    path = write(tmp_path / "plait.yaml", "hicache_ratio: 4\n")
    with pytest.raises(ConfigError) as caught:
        parse(["--config", path])
    assert f"hicache_ratio in {path} 4.0, PLAIT_HICACHE_SIZE 3.0: means" in str(caught.value)
    assert parse(["--config", path, "--enable-hierarchical-cache"]).hicache_ratio == 4
    off = parse(["--config", path, "--no-enable-hierarchical-cache"])
    assert not off.enable_hierarchical_cache


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1\n", "unknown key 'prot'; did you mean port?"),
        ("zzz: 1\n", "unknown key 'zzz'; expected one of model, "),
        ("- port\n", "holds a list; expected a mapping"),
        ("port: [1\n", "not valid YAML: expected ',' or ']', but got '<stream end>' in line 2,"),
        ("port: 1\nmodel: m\nport: 2\n", "port is there 2 times; expected once"),
        ("max-n: 1\nmax_n: 2\n", "max_n is there 2 times; expected once"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "plait.yaml", text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", path])
    assert f"--config {path}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        parse(["--config", str(tmp_path / "nothing.yaml")])


def test_keys_of_a_file_are_added_and_an_empty_file_does_not_open_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = write(tmp_path / "keys", "one\n\n two \none\n")
    options = parse(["--api-key", "zero", "--api-key-file", keys])
    assert api_keys(options) == ("zero", "one", "two")
    for path in (write(tmp_path / "empty", "\n \n"), str(tmp_path / "missing")):
        assert main(["serve", "--api-key-file", path]) == 2
        assert f"--api-key-file {path}" in capsys.readouterr().err


def test_an_empty_key_does_not_open_the_server(monkeypatch):
    with pytest.raises(ConfigError, match="--api-key: holds no key"):
        api_keys(parse(["--api-key", ""]))
    monkeypatch.setenv("PLAIT_API_KEY", "")
    with pytest.raises(ConfigError, match="--api-key: holds no key"):
        api_keys(parse([]))
