"""Workers that hold another model than the fleet's: given nothing, and shown for what they are."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest

from engine.types import ModelId
from server.verbs import main
from tests.identity import MODEL_ID
from tests.server.scripted import MODEL_NAME, Server, reply, serving
from tests.server.stream import SPOKEN, TEXT, Stream, stalling
from tests.server.test_metrics import scrape
from tests.server.worker import ScriptedWorker

OTHER = msgspec.structs.replace(MODEL_ID, fingerprint="fedcba9876543210")


def in_numbers(**changes: Any) -> ModelId:
    numbers = msgspec.structs.replace(MODEL_ID.numbers, **changes)
    return msgspec.structs.replace(MODEL_ID, numbers=numbers)


HALF = in_numbers(weights="bfloat16")
FP8_KEYS = in_numbers(index_keys="fp8_e4m3")


def refused(server: Server) -> list[str]:
    """Their addresses."""
    return list(server.client.fleet.refused)


def served(server: Server) -> list[str]:
    return [worker.address for worker in server.client.fleet]


@pytest.mark.parametrize("other", [OTHER, HALF, FP8_KEYS], ids=["weights", "dtype", "index keys"])
def test_a_worker_with_another_model_than_the_first_gets_nothing(
    other: ModelId, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        first = server.add_worker(reply(SPOKEN))
        with caplog.at_level(logging.ERROR):
            second = server.add_worker(reply(SPOKEN), model_id=other)
        assert (served(server), refused(server)) == ([first.address], [second.address])
        (line,) = [record.getMessage() for record in caplog.records]
        assert all(part in line for part in (second.address, str(other), first.address))
        assert str(MODEL_ID) in line and "expected the same --model files, --dtype, " in line

        for _ in range(4):
            assert Stream(server).answer() == (TEXT, ["stop"])
        assert (first.submits.qsize(), second.submits.qsize()) == (4, 0)

        assert main(["status", "--json", "--url", server.base_url]) == 0
        status = json.loads(capsys.readouterr().out)
        (told,) = status["refused"]
        assert (told["address"], told["model"]) == (second.address, str(other))
        assert told["instance_id"] == second.instance_id
        assert status["absent"] == []
        assert main(["status", "--url", server.base_url]) == 0
        assert f"refused: colocated at {second.address}: " in capsys.readouterr().out
        assert scrape(server)["plait_workers_refused", (("role", "colocated"),)] == 1

        second.leave()
        server.until(lambda: not refused(server))
        assert scrape(server)["plait_workers_refused", (("role", "colocated"),)] == 0


def test_a_prefill_group_and_a_decode_worker_of_two_models_are_no_pair() -> None:
    with serving() as server:
        server.add_worker(reply(SPOKEN), role="prefill")
        server.add_worker(reply(SPOKEN), role="decode", model_id=OTHER)
        assert server.http.get("/ready").status_code == 503
        server.add_worker(reply(SPOKEN), role="decode")
        assert server.http.get("/ready").status_code == 200


def test_the_front_ends_own_folder_says_what_workers_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(fingerprint=MODEL_ID.fingerprint) as server:
        wrong = server.add_worker(reply(SPOKEN), model_id=OTHER)
        assert f"--model of this front end is {MODEL_ID.fingerprint}" in caplog.text
        right = server.add_worker(reply(SPOKEN), model_id=HALF)  # it knows of no dtype
        assert (served(server), refused(server)) == ([right.address], [wrong.address])


def test_where_no_worker_is_left_another_model_takes_over_but_no_answer_that_was_begun() -> None:
    with serving() as server:
        script, reached = stalling(3)
        first = server.add_worker(script)
        begun = Stream(server)
        assert reached.wait(60)
        second: ScriptedWorker = server.add_worker(reply(SPOKEN), model_id=OTHER)
        third = server.add_worker(reply(SPOKEN), model_id=HALF)
        first.vanish()
        error = begun.values()[-1]["error"]
        assert error["message"] == f"the model was replaced: {MODEL_ID} by {OTHER}"
        assert Stream(server).answer() == (TEXT, ["stop"])
        assert (served(server), refused(server)) == ([second.address], [third.address])


def test_a_worker_that_comes_back_with_another_model_is_refused() -> None:
    with serving() as server:
        workers = [server.add_worker(reply(SPOKEN)) for _ in range(2)]
        address = workers[1].address
        workers[1].vanish()
        server.add_worker(reply(SPOKEN), address=address, model_id=OTHER)
        assert (served(server), refused(server)) == ([workers[0].address], [address])
        workers[0].leave()
        server.until(lambda: served(server) == [address])


def test_the_fingerprint_of_answers_tells_all_that_changes_them() -> None:
    """It has no spaces: it goes into log lines and spreadsheets."""
    found = []
    others = [
        OTHER,
        HALF,
        FP8_KEYS,
        in_numbers(weights="bfloat16", kv="bfloat16", index_keys="bfloat16"),
        in_numbers(weights="bfloat16", keeps_fp8=True),
        msgspec.structs.replace(MODEL_ID, rope_context=4096),
        msgspec.structs.replace(MODEL_ID, rope_context=8192),
    ]
    unknown = msgspec.structs.replace(MODEL_ID, fingerprint="")
    for model_id in (MODEL_ID, MODEL_ID, *others, unknown):
        with serving() as server:
            server.add_worker(reply(SPOKEN), model_id=model_id)
            body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 1}
            answer = server.http.post("/v1/completions", json=body).json()
            found.append(answer["system_fingerprint"])
    assert found[0] == found[1]
    assert len(set(found)) == 2 + len(others)
    assert all(name.isascii() and not set(name) & set(" ,;") for name in found[:-1])
    assert found[-1] is None
