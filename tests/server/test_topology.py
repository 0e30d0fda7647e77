"""Which workers a fleet gets, and what each is told: by `plait serve` or by a verb of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from engine.cluster_key import ClusterKey
from engine.config import LocalFleet, LocalWorker, WorkerConfig
from server import roles, topology
from server.options.arguments import parse
from server.options.config import OPTIONS, ConfigError
from server.options.loading import load
from server.topology import Topology, hash_salt, plan_topology, worker_config, worker_configs
from server.verbs import main

pytestmark = pytest.mark.usefixtures("no_variables_of_the_developer")


def planned(flags: str, num_gpus: int) -> Topology:
    return plan_topology(parse(flags.split()), num_gpus)


@pytest.mark.parametrize(
    ("flags", "num_gpus", "expected"),
    [
        ("", 0, Topology(num_groups=1, cp_size=2, num_decode=1, num_devices=0)),
        ("--device cpu", 8, Topology(1, 2, 1, 0)),
        ("--prefill-groups 2 --decode-workers 3", 0, Topology(2, 2, 3, 0)),
        ("--prefill-cp-size 4", 0, Topology(1, 4, 1, 0)),
        ("--colocated", 0, Topology(0, 1, 0, 0)),
        ("--colocated --prefill-cp-size 2", 0, Topology(0, 2, 0, 0)),
        ("", 1, Topology(0, 1, 0, 1)),
        ("--colocated", 8, Topology(0, 1, 0, 1)),
        ("--colocated --prefill-cp-size 8", 8, Topology(0, 8, 0, 8)),
        ("", 2, Topology(1, 1, 1, 2)),
        ("", 3, Topology(1, 1, 2, 3)),
        ("", 8, Topology(1, 4, 4, 8)),
        ("--prefill-groups 2", 8, Topology(2, 2, 4, 8)),
        ("--decode-workers 3", 8, Topology(1, 5, 3, 8)),
        ("--prefill-cp-size 6", 8, Topology(1, 6, 2, 8)),
        ("--prefill-groups 2 --prefill-cp-size 2 --decode-workers 2", 8, Topology(2, 2, 2, 6)),
        ("--device cuda:6", 8, Topology(1, 1, 1, 2)),
        ("--device cuda:7", 8, Topology(0, 1, 0, 1)),
    ],
)
def test_what_is_left_open_goes_by_the_machine(
    flags: str, num_gpus: int, expected: Topology
) -> None:
    assert planned(flags, num_gpus) == expected


@pytest.mark.parametrize("num_gpus", range(2, 17))
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_a_default_never_needs_more_gpus_than_there_are(num_gpus: int, num_groups: int) -> None:
    if num_gpus > num_groups:
        plan = planned(f"--prefill-groups {num_groups}", num_gpus)
        assert plan.num_groups * plan.cp_size + plan.num_decode == plan.num_devices <= num_gpus


@pytest.mark.parametrize(
    ("flags", "num_gpus", "said"),
    [
        (
            "--prefill-groups 1 --prefill-cp-size 8 --decode-workers 1",
            8,
            "--prefill-groups 1, --prefill-cp-size 8, --decode-workers 1: need 9 GPUs, one for "
            "each rank; this machine has 8",
        ),
        (
            "--decode-workers 1",
            1,
            "--prefill-groups 1, --prefill-cp-size 1, --decode-workers 1: need 2 GPUs, one for "
            "each rank; this machine has 1",
        ),
        (
            "--colocated --prefill-cp-size 3",
            2,
            "--prefill-cp-size 3: needs 3 GPUs, one for each rank; this machine has 2",
        ),
        *(
            (
                f"--colocated {flag}",
                0,
                f"{flag}: a colocated worker has no such part; leave it out, or leave out "
                "--colocated",
            )
            for flag in (
                "--prefill-groups 2",
                "--decode-workers 1",
                "--prefill-max-total-tokens 640",
                "--decode-max-total-tokens 640",
            )
        ),
    ],
)
def test_what_cannot_be_is_named_with_its_flags(flags: str, num_gpus: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(flags, num_gpus)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Topology(0, 1, 0, 0), "one colocated worker of 1 rank on the CPU"),
        (Topology(1, 2, 1, 0), "1 prefill group of 2 ranks, 1 decode worker on the CPU"),
        (Topology(2, 3, 2, 8), "2 prefill groups of 3 ranks, 2 decode workers on 8 GPUs"),
    ],
)
def test_the_choice_is_said_in_words(plan: Topology, said: str) -> None:
    assert str(plan) == said


def told(flags: str, num_gpus: int, folder: Path) -> list[WorkerConfig]:
    options = parse(flags.split())
    return worker_configs(options, plan_topology(options, num_gpus), Path("/m"), folder, 999)


def test_each_worker_is_told_its_role_its_socket_and_its_gpus(tmp_path: Path) -> None:
    workers = told("--prefill-groups 2 --prefill-cp-size 2", 7, tmp_path)
    assert [(w.role, w.index, w.cp_size, w.device) for w in workers] == [
        ("prefill", 0, 2, "cuda:0"),
        ("prefill", 1, 2, "cuda:2"),
        ("decode", 0, 1, "cuda:4"),
        ("decode", 1, 1, "cuda:5"),
        ("decode", 2, 1, "cuda:6"),
    ]
    assert len({w.listen_address for w in workers}) == 5
    assert all(w.listen_address.startswith(f"ipc://{tmp_path}/") for w in workers)
    assert {w.parent_pid for w in workers} == {os.getpid()}
    assert len({w.hash_salt for w in workers}) == 1 and workers[0].hash_salt
    assert [w.device for w in told("--device cuda:2", 4, tmp_path)] == ["cuda:2", "cuda:3"]
    assert [w.device for w in told("--device cuda", 2, tmp_path)] == ["cuda:0", "cuda:1"]
    assert {w.device for w in told("--device cpu", 2, tmp_path)} == {"cpu"}


def test_sizes_go_by_role_and_decode_workers_share_no_kv(tmp_path: Path) -> None:
    flags = "--max-total-tokens 640 --decode-max-total-tokens 1280 "
    flags += "--enable-nsa-prefill-cp-shared-kv --cp-stream-block-tokens 64"
    prefill, decode = told(flags, 0, tmp_path)
    assert (prefill.max_total_tokens, decode.max_total_tokens) == (640, 1280)
    assert (prefill.shared_kv, decode.shared_kv) == (True, None)
    assert (prefill.cp_stream_block_tokens, decode.cp_stream_block_tokens) == (64, None)
    assert (prefill.hands_off, decode.hands_off) == (True, True)
    assert prefill.local_fleet == decode.local_fleet
    of_prefill = LocalWorker("prefill", 0, 2, True, 640, ())
    of_decode = LocalWorker("decode", 0, 1, None, 1280, ("max_total_tokens",))
    assert prefill.local_fleet == LocalFleet((of_prefill, of_decode), 999)
    [colocated] = told("--colocated", 0, tmp_path)
    assert (colocated.role, colocated.hands_off) == ("colocated", False)


def test_a_worker_names_options_by_the_flags_that_they_were_given_by(tmp_path: Path) -> None:
    """Every option that there is for one role and for all."""
    fields = set(WorkerConfig.__struct_fields__) & set(OPTIONS)
    split = [name for name in sorted(fields) if f"prefill_{name}" in OPTIONS]
    assert split and split == [name for name in sorted(fields) if f"decode_{name}" in OPTIONS]
    for name in split:
        flag = name.replace("_", "-")
        for_all, for_prefill, for_decode = (
            f"--{flag} 640",
            f"--prefill-{flag} 1",
            f"--decode-{flag} 2",
        )

        def named(*flags: str, name: str = name) -> list[str]:
            return [worker.option(name) for worker in told(" ".join(flags), 0, tmp_path)]

        assert named(for_all) == [for_all, for_all]
        assert named(for_all, for_prefill) == [for_prefill, for_all]
        assert named(for_all, for_prefill, for_decode) == [for_prefill, for_decode]


def test_the_worker_is_told_what_concerns_it() -> None:
    argv = "--page-size 16 --max-total-tokens 4096 --chunked-prefill-size 128"
    argv += " --max-running-requests 3 --context-length 99 --dtype float32 --device cpu"
    argv += " --index-cache-dtype fp8_e4m3 --quantization none"
    options = parse([*argv.split(), "--log-level", "debug", "--api-key", "hunter2"])
    told = worker_config(
        options,
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
    assert (told.index_cache_dtype, told.quantization) == ("fp8_e4m3", "none")
    assert "hunter2" not in repr(told)


def test_a_worker_of_a_cluster_has_probes_of_its_own_and_a_local_fleets_has_none() -> None:
    """Local workers would all ask for the same port."""

    def told(parent_pid: int | None) -> str | None:
        options = load({"health_address": "10.0.0.7:7001"})
        return worker_config(
            options,
            "decode",
            0,
            model_path=Path("/m"),
            listen_address="",
            cp_size=1,
            parent_pid=parent_pid,
        ).health_address

    assert told(None) == "10.0.0.7:7001"
    assert told(1) is None


def test_hashes_are_salted_by_the_key_of_the_cluster_or_anew(tmp_path: Path) -> None:
    for name in ("a", "b"):
        ClusterKey.write_new(tmp_path / name)
    a, b = (parse(["--cluster-key-file", f"{tmp_path}/{name}"]) for name in "ab")
    assert hash_salt(a) == hash_salt(a) != hash_salt(b)
    assert ClusterKey.read(tmp_path / "a").secret.decode() not in hash_salt(a)
    bare = parse([])
    assert hash_salt(bare) != hash_salt(bare)
    with pytest.raises(ConfigError, match=f"--cluster-key-file {tmp_path}/none: .*No such file"):
        hash_salt(parse(["--cluster-key-file", f"{tmp_path}/none"]))


@pytest.mark.parametrize(
    ("visible", "number"), [("", 0), ("-1", 0), ("0", 1), ("0,3,5", 3), ("GPU-1a, GPU-2b", 2)]
)
def test_gpus_are_those_that_may_be_seen(
    visible: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert topology.count_gpus() == number


# -- plait prefill, plait decode, plait keygen


class Became(Exception):
    """Stands for the end of this program in favour of another."""


def become(monkeypatch: pytest.MonkeyPatch, folder: Path, *argv: str) -> WorkerConfig:
    """What the worker that the command becomes is told."""
    commands: list[list[str]] = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        commands.append(command)
        raise Became

    monkeypatch.setattr(roles.os, "execve", execve)
    monkeypatch.chdir(folder)  # and back, at the end
    with pytest.raises(Became):
        main(list(argv))
    # Held back for the worker only: here it would be so in every process that a later test starts.
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    [[python, _, module, text]] = commands
    assert (python, module) == (sys.executable, "engine")
    return msgspec.json.decode(text, type=WorkerConfig)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_prefill_group_is_told_what_the_flags_say(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--model model --listen tcp://10.0.0.7:7001 --prefill-cp-size 4 --max-total-tokens 640"
    worker = become(monkeypatch, model.parent, "prefill", *flags.split())
    assert (worker.role, worker.cp_size, worker.listen_address) == (
        "prefill",
        4,
        "tcp://10.0.0.7:7001",
    )
    assert worker.model == str(model)  # from wherever the worker runs
    assert (worker.max_total_tokens, worker.parent_pid) == (640, None)


def test_a_decode_worker_is_told_what_the_environment_says(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ClusterKey.write_new(model.parent / "key")
    for name, value in {
        "MODEL": str(model),
        "LISTEN": "tcp://10.0.0.8:7000",
        "TRANSFER_HOST": "10.0.0.8",
        "CLUSTER_KEY_FILE": "key",
        "PREFILL_CP_SIZE": "8",  # of the groups, where one environment serves all
    }.items():
        monkeypatch.setenv(f"PLAIT_{name}", value)
    worker = become(monkeypatch, model.parent, "decode")
    assert (worker.role, worker.cp_size, worker.listen_address) == (
        "decode",
        1,
        "tcp://10.0.0.8:7000",
    )
    assert worker.transfer_host == "10.0.0.8"
    assert worker.cluster_key_file == str(model.parent / "key")
    assert worker.hash_salt


def test_by_default_a_worker_is_reached_from_its_own_machine_only(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = become(monkeypatch, model.parent, "decode", "--model", str(model))
    assert (worker.listen_address, worker.transfer_host) == ("tcp://127.0.0.1:7000", "127.0.0.1")


def test_a_key_that_is_none_stops_every_verb(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(model), "--cluster-key-file", str(model / "none")]
    for verb in ("serve", "prefill", "decode"):
        assert main([verb, *flags]) == 2
        assert f"plait {verb}: --cluster-key-file {model}/none: " in capsys.readouterr().err
    assert main(["frontend", "--workers", "tcp://a:1", *flags]) == 2
    assert "plait frontend: --cluster-key-file" in capsys.readouterr().err


def test_keygen_makes_a_key_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert main(["keygen", str(path)]) == 0
    assert f"{path}: give this file to every process" in capsys.readouterr().out
    key = ClusterKey.read(path)
    assert main(["keygen", str(path)]) == 1
    assert f"plait keygen: {path}: File exists; expected a new file" in capsys.readouterr().err
    assert ClusterKey.read(path) == key
    assert main(["keygen", str(tmp_path / "none" / "key")]) == 1
