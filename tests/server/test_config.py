"""Options of `plait serve`: where a value comes from, what a bad one is told, what --help shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server import config
from server.config import ConfigError, ServeConfig
from server.verbs import main


@pytest.fixture(autouse=True)
def no_variables_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(config.ENV_PREFIX):
            monkeypatch.delenv(name)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_defaults_are_those_the_documents_name() -> None:
    options = config.parse([])
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert options.max_body_bytes == 32 * 2**20
    assert (options.max_n, options.max_stop_strings) == (16, 4)
    assert (options.max_logit_bias, options.max_logprobs) == (300, 20)
    assert options.max_replays == 4
    assert not options.colocated
    assert not options.metrics_need_key
    assert options.api_keys() == ()
    assert options.cors_allow_origins == ()
    assert options.model_name == options.model == config.DEFAULT_MODEL


def test_flag_beats_variable_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "plait.yaml", "port: 1\nmax-n: 2\nmax_replays: 3\n")
    monkeypatch.setenv("PLAIT_PORT", "10")
    monkeypatch.setenv("PLAIT_MAX_N", "20")
    options = config.parse(["--config", path, "--port", "100"])
    assert (options.port, options.max_n, options.max_replays) == (100, 20, 3)
    assert options.max_logprobs == 20


def test_the_file_can_be_named_by_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_CONFIG", write(tmp_path / "plait.yaml", "port: 1\n"))
    assert config.parse([]).port == 1


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_HOME", "/somewhere")
    monkeypatch.setenv("PLAIT_PORT", "")
    assert config.parse([]).port == 8000


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
    assert config.misspelt_variables() == [f"{variable}: means nothing here; did you mean {meant}?"]
    assert main(["frontend"]) == 2  # for another reason
    error = capsys.readouterr().err
    assert f"plait frontend: {variable}: means nothing here; did you mean {meant}?" in error
    assert "hunter2" not in error


def test_variables_that_are_right_or_somebody_elses_are_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = [*config.OTHER_VARIABLES, *config.ServeConfig.model_fields]
    # What Kubernetes sets in pods beside a service that is named plait, or plait-decode.
    services = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP"]
    services += ["PORT_8000_TCP_ADDR", "PORT_8000_TCP_PORT", "PORT_8000_TCP_PROTO"]
    for name in (*ours, *services, *(f"DECODE_{name}" for name in services)):
        monkeypatch.setenv(f"PLAIT_{name.upper()}", "1")
    assert config.misspelt_variables() == []


def test_null_in_a_file_means_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "plait.yaml", "port: null\npage_size:\n")
    assert config.parse(["--config", path]) == config.parse([])
    assert config.parse(["--config", write(tmp_path / "empty.yaml", "")]).port == 8000


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
    options = config.parse(argv)
    assert options.api_keys() == ("a", "b", "c")
    assert options.cors_allow_origins == ("*",)


def test_booleans_have_a_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.parse(["--metrics-need-key"]).metrics_need_key
    monkeypatch.setenv("PLAIT_METRICS_NEED_KEY", "true")
    assert config.parse([]).metrics_need_key
    assert not config.parse(["--no-metrics-need-key"]).metrics_need_key


@pytest.mark.parametrize(
    ("flag", "value", "accepted"),
    [
        ("--port", "65536", "a whole number from 0 to 65535"),
        ("--port", "-1", "a whole number from 0 to 65535"),
        ("--port", "http", "a whole number from 0 to 65535"),
        ("--page-size", "0", "a whole number, 1 or more"),
        ("--max-total-tokens", "1e3", "a whole number, 1 or more"),
        ("--dtype", "int8", "one of auto, float32, bfloat16, float16"),
        ("--log-level", "loud", "one of debug, info, warning, error"),
        ("--device", "tpu", "auto, cpu, cuda or cuda:N"),
        ("--drain-timeout-s", "nan", "a number, 0 or more"),
        ("--drain-timeout-s", "-1", "a number, 0 or more"),
        ("--model", "", "non-empty text"),
    ],
)
def test_a_bad_flag_names_itself_its_value_and_what_is_accepted(
    flag: str, value: str, accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", f"{flag}={value}"]) == 2
    error = capsys.readouterr().err
    assert f"{flag} {value}: expected {accepted}" in error
    assert "Traceback" not in error


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
        config.parse(["--config", path])
    assert f"hicache_ratio in {path} 4.0, PLAIT_HICACHE_SIZE 3.0: means" in str(caught.value)
    assert config.parse(["--config", path, "--enable-hierarchical-cache"]).hicache_ratio == 4
    off = config.parse(["--config", path, "--no-enable-hierarchical-cache"])
    assert not off.enable_hierarchical_cache


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1\n", "unknown key 'prot'; did you mean port?"),
        ("zzz: 1\n", "unknown key 'zzz'; expected one of model, "),
        ("- port\n", "holds a list; expected a mapping"),
        ("port: [\n", "not valid YAML"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "plait.yaml", text)
    with pytest.raises(ConfigError) as caught:
        config.parse(["--config", path])
    assert f"--config {path}" in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        config.parse(["--config", str(tmp_path / "nothing.yaml")])


def test_an_unknown_flag_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--prot", "1"])
    assert caught.value.code == 2
    assert "--prot" in capsys.readouterr().err


def test_keys_of_a_file_are_added_and_an_empty_file_does_not_open_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = write(tmp_path / "keys", "one\n\n two \none\n")
    options = config.parse(["--api-key", "zero", "--api-key-file", keys])
    assert options.api_keys() == ("zero", "one", "two")
    for path in (write(tmp_path / "empty", "\n \n"), str(tmp_path / "missing")):
        assert main(["serve", "--api-key-file", path]) == 2
        assert f"--api-key-file {path}" in capsys.readouterr().err


def test_keys_are_shown_nowhere() -> None:
    options = config.parse(["--api-key", "hunter2"])
    assert "hunter2" not in repr(options)
    assert "hunter2" not in options.model_dump_json()


def test_the_model_is_named_after_hub_id_or_folder(tmp_path: Path) -> None:
    assert config.parse(["--model", "owner/name"]).model_name == "owner/name"
    assert config.parse(["--model", str(tmp_path)]).model_name == tmp_path.name
    named = config.parse(["--model", str(tmp_path), "--served-model-name", "mine"])
    assert named.model_name == "mine"


def test_the_worker_is_told_what_concerns_it() -> None:
    argv = "--page-size 16 --max-total-tokens 4096 --chunked-prefill-size 128"
    argv += " --max-running-requests 3 --context-length 99 --dtype float32 --device cpu"
    options = config.parse([*argv.split(), "--log-level", "debug", "--api-key", "hunter2"])
    told = options.worker_config(
        "decode",
        1,
        model_path=Path("/models/m"),
        listen_address="ipc:///x",
        cp_size=1,
        salt="pepper",
    )
    assert (told.model, told.listen_address) == ("/models/m", "ipc:///x")
    assert (told.role, told.index, told.title) == ("decode", 1, "decode 1")
    assert told.hash_salt == "pepper"
    assert (told.page_size, told.max_total_tokens, told.chunked_prefill_size) == (16, 4096, 128)
    assert (told.max_running_requests, told.context_length) == (3, 99)
    assert (told.dtype, told.device, told.log_level) == ("float32", "cpu", "debug")
    assert "hunter2" not in repr(told)


def test_a_worker_of_a_cluster_has_probes_of_its_own_and_a_local_fleets_has_none() -> None:
    """Local workers would all ask for the same port."""

    def told(parent_pid: int | None) -> str | None:
        options = config.load({"health_address": "10.0.0.7:7001"})
        return options.worker_config(
            "decode",
            0,
            model_path=Path("/m"),
            listen_address="",
            cp_size=1,
            parent_pid=parent_pid,
        ).health_address

    assert told(None) == "10.0.0.7:7001"
    assert told(1) is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("listen", "tcp://127.0.0.1:{}"),
        ("health_address", "127.0.0.1:{}"),
        ("workers", "tcp://127.0.0.1:{}"),
        ("workers", "dns://workers:{}"),
    ],
)
def test_a_port_is_at_most_65535(option: str, value: str) -> None:
    """A socket would take what is above for its remainder."""
    for port in (65536, 70000, 7999999):
        with pytest.raises(config.ConfigError, match=f"{port}: expected "):
            config.load({option: value.format(port)})
    for port in (0, 7000, 59999, 65535):
        config.load({option: value.format(port)})


@pytest.mark.parametrize("address", ["7001", "host:", "host:port", "http://host:7001", "::1:7001"])
def test_a_health_address_is_host_and_port(address: str) -> None:
    with pytest.raises(config.ConfigError, match=r"health-address .*: expected HOST:PORT"):
        config.load({"health_address": address})
    assert config.load({"health_address": "[::1]:7001"}).health_address == "[::1]:7001"


def test_help_shows_every_option_in_a_group_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for name in set(ServeConfig.model_fields) - set(config.NOT_FOR["serve"]):
        assert "--" + name.replace("_", "-") in out
    for group in ("model:", "network:", "scheduling:", "limits:", "operation:"):
        assert f"\n{group}\n" in out
    assert "(default: 8000)" in out


@settings(deadline=None)
@given(st.integers(0, 65535))
def test_every_port_is_accepted_as_text_and_kept(port: int) -> None:
    assert config.parse(["--port", str(port)]).port == port


@settings(deadline=None)
@given(
    st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1), min_size=1)
)
def test_a_list_survives_being_joined_by_commas(keys: list[str]) -> None:
    argv = [part for key in keys for part in ("--api-key", key)]
    repeated = config.parse(argv).api_keys()
    joined = config.parse([f"--api-key={','.join(keys)}"]).api_keys()
    assert repeated == joined == tuple(dict.fromkeys(keys))


def test_an_empty_key_does_not_open_the_server(monkeypatch):
    with pytest.raises(ConfigError, match="--api-key: holds no key"):
        config.parse(["--api-key", ""]).api_keys()
    monkeypatch.setenv("PLAIT_API_KEY", "")
    with pytest.raises(ConfigError, match="--api-key: holds no key"):
        config.parse([]).api_keys()
