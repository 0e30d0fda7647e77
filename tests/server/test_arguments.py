"""The flags: which verb takes which, their forms, and what --help shows."""

from __future__ import annotations

import pytest

from server.options.arguments import NOT_FOR, parse
from server.options.config import ServeConfig
from server.verbs import main

pytestmark = pytest.mark.usefixtures("no_variables_of_the_developer")


def flags_of(verb: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    return {word[2:].replace("-", "_") for word in words if word.startswith("--")}


def test_each_verb_takes_the_flags_that_mean_something_to_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = set(ServeConfig.model_fields)
    serve, frontend, prefill, decode = (
        flags_of(verb, capsys) & known for verb in ("serve", "frontend", "prefill", "decode")
    )
    http = {"host", "port", "api_key", "max_n", "router_policy", "served_model_name"}
    fleet = {"colocated", "prefill_groups", "decode_workers"}
    computing = {"device", "dtype", "page_size", "max_total_tokens", "max_running_requests"}
    group = {"prefill_cp_size", "nsa_prefill_cp_mode", "cp_stream_block_tokens"}
    cluster = {"listen", "transfer_host"}
    everywhere = {"model", "cluster_key_file", "log_level", "drain_timeout_s"}
    assert http | fleet | computing | group | everywhere <= serve
    assert not serve & (cluster | {"workers"})
    assert http | {"workers"} | everywhere <= frontend
    assert not frontend & (fleet | computing | group | cluster | {"transfer_protocol"})
    assert computing | group | cluster | everywhere | {"transfer_protocol"} <= prefill
    assert not prefill & (http | fleet | {"workers"})
    assert computing | cluster | everywhere | {"transfer_protocol"} <= decode
    assert not decode & (http | fleet | group | {"workers"})


def test_a_frontend_needs_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontend"]) == 2
    assert "--workers: expected at least one place where workers are" in capsys.readouterr().err


def test_booleans_have_a_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["--metrics-need-key"]).metrics_need_key
    monkeypatch.setenv("PLAIT_METRICS_NEED_KEY", "true")
    assert parse([]).metrics_need_key
    assert not parse(["--no-metrics-need-key"]).metrics_need_key


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "--prot", "1"], "plait serve: --prot: no such option; did you mean --port?"),
        (["decode", "--zzz"], "plait decode: --zzz: no such option; `plait decode --help` lists"),
        (["serve", "--api-keys=sk-1"], "plait serve: --api-keys: no such option; did you mean"),
        (["status", "8000"], "plait status: 8000: no such option; `plait status --help` lists"),
    ],
)
def test_an_unknown_flag_ends_with_code_2_and_what_was_meant(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith(said)
    assert "sk-1" not in told


def test_an_unknown_flag_without_a_verb_ends_with_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--zzz"])
    assert caught.value.code == 2
    assert "--zzz" in capsys.readouterr().err


def test_help_shows_every_option_in_a_group_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for name in set(ServeConfig.model_fields) - set(NOT_FOR["serve"]):
        assert "--" + name.replace("_", "-") in out
    for group in ("model:", "network:", "scheduling:", "limits:", "operation:"):
        assert f"\n{group}\n" in out
    assert "(default: 8000)" in out
