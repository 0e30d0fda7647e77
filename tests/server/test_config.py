"""The options as values: defaults, bounds, what is accepted, what a model is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.options.arguments import parse
from server.options.config import DEFAULT_MODEL, ConfigError
from server.options.loading import api_keys, load
from server.verbs import main

pytestmark = pytest.mark.usefixtures("no_variables_of_the_developer")


def test_defaults_are_those_the_documents_name() -> None:
    options = parse([])
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert options.max_body_bytes == 32 * 2**20
    assert (options.max_n, options.max_stop_strings) == (16, 4)
    assert (options.max_logit_bias, options.max_logprobs) == (300, 20)
    assert options.max_replays == 4
    assert not options.colocated
    assert not options.metrics_need_key
    assert api_keys(options) == ()
    assert options.cors_allow_origins == ()
    assert options.model_name == options.model == DEFAULT_MODEL


@pytest.mark.parametrize(
    ("flag", "value", "accepted"),
    [
        ("--port", "65536", "a whole number from 0 to 65535"),
        ("--port", "-1", "a whole number from 0 to 65535"),
        ("--port", "http", "a whole number from 0 to 65535"),
        ("--page-size", "0", "a whole number, 1 or more"),
        ("--max-running-requests", "100000", "a whole number from 1 to 4096"),
        ("--max-total-tokens", "1e3", "a whole number, 1 or more"),
        ("--dtype", "int8", "one of auto, float32, bfloat16, float16"),
        ("--quantization", "fp8", "one of auto, none"),
        ("--index-cache-dtype", "fp8", "one of auto, fp8_e4m3"),
        ("--log-level", "loud", "one of debug, info, warning, error"),
        ("--device", "tpu", "auto, cpu, cuda or cuda:N"),
        ("--drain-timeout-s", "nan", "a number, 0 or more"),
        ("--drain-timeout-s", "-1", "a number, 0 or more"),
        ("--hicache-ratio", "0", "a number above 0"),
        ("--hicache-size", "inf", "a number above 0"),
        ("--mem-fraction-static", "1", "a number above 0 and below 1"),
        ("--model", "", "non-empty text"),
    ],
)
def test_a_bad_flag_names_itself_its_value_and_what_is_accepted(
    flag: str, value: str, accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", f"{flag}={value}"]) == 2
    error = capsys.readouterr().err
    assert f"{flag} {value}: expected {accepted}\n" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("verb", "flag", "value"),
    [
        ("prefill", "--listen", "tcp://here"),
        ("decode", "--listen", "7000"),
    ],
)
def test_an_address_that_is_none_is_said(
    verb: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, flag, value]) == 2
    error = capsys.readouterr().err
    assert f"plait {verb}: {flag} {value}: expected tcp://HOST:PORT or ipc:///PATH" in error


@pytest.mark.parametrize(
    "value",
    ["10.0.0.7:7000", "dns://name", "dns://:7000", "k8s://name", "k8s://A:b", "k8s://a.b.c:d"],
)
def test_a_place_of_workers_that_is_none_is_said(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["frontend", "--workers", value]) == 2
    error = capsys.readouterr().err
    assert f"plait frontend: --workers {value}: expected tcp://HOST:PORT, ipc:///PATH, " in error
    assert "dns://NAME:PORT or k8s://SERVICE[.NAMESPACE]:PORT" in error


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
        with pytest.raises(ConfigError, match=f"{port}: expected "):
            load({option: value.format(port)})
    for port in (0, 7000, 59999, 65535):
        load({option: value.format(port)})


@pytest.mark.parametrize("address", ["7001", "host:", "host:port", "http://host:7001", "::1:7001"])
def test_a_health_address_is_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"health-address .*: expected HOST:PORT"):
        load({"health_address": address})
    assert load({"health_address": "[::1]:7001"}).health_address == "[::1]:7001"


@settings(deadline=None)
@given(st.integers(0, 65535))
def test_every_port_is_accepted_as_text_and_kept(port: int) -> None:
    assert parse(["--port", str(port)]).port == port


def test_keys_are_shown_nowhere() -> None:
    options = parse(["--api-key", "hunter2"])
    assert "hunter2" not in repr(options)
    assert "hunter2" not in options.model_dump_json()


def test_the_model_is_named_after_hub_id_or_folder(tmp_path: Path) -> None:
    assert parse(["--model", "owner/name"]).model_name == "owner/name"
    assert parse(["--model", str(tmp_path)]).model_name == tmp_path.name
    named = parse(["--model", str(tmp_path), "--served-model-name", "mine"])
    assert named.model_name == "mine"
