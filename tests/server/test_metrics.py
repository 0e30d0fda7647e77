"""What a scrape shows: the front end's numbers, the workers' families, bounded labels."""

from __future__ import annotations

from typing import get_args

from prometheus_client.parser import text_string_to_metric_families

from engine.types import Load, MetricFamily, MetricSample, Role
from tests.server.scripted import MODEL_NAME, Server, reply, serving

CHAT = "/v1/chat/completions"


def scrape(server: Server) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = server.http.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def lost(server: Server) -> dict[tuple[str, str], float]:
    """By role and reason, where a worker was lost at all."""
    return {
        (dict(labels)["role"], dict(labels)["reason"]): value
        for (name, labels), value in scrape(server).items()
        if name == "plait_workers_lost_total" and value
    }


def family(name: str, kind: str, value: float, **labels: str) -> MetricFamily:
    sample = f"{name}_total" if kind == "counter" else name
    return MetricFamily(name, kind, "help", [MetricSample(sample, labels, value)])


def test_counts_of_one_request() -> None:
    with serving() as server:
        server.add_worker(reply(server.tokenizer.encode("fine words")))
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 5,
        }
        usage = server.http.post(CHAT, json=body).json()["usage"]
        server.http.post(CHAT, json={**body, "n": 0})
        found = scrape(server)
    assert found["plait_prompt_tokens_total", ()] == usage["prompt_tokens"]
    assert found["plait_output_tokens_total", ()] == usage["completion_tokens"] == 5
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert found["plait_cached_tokens_total", ()] == cached > 0
    assert found["plait_ttft_seconds_count", ()] == 1
    assert found["plait_itl_seconds_count", ()] == 4
    assert found["plait_e2e_seconds_count", ()] == 1
    ended = (("finish_reason", "length"), ("route", CHAT))
    assert found["plait_requests_total", ended] == 1
    failed = (("finish_reason", "error"), ("route", "/v1/completions"))
    assert found["plait_requests_total", failed] == 0
    refused = (("kind", "invalid_value"), ("status", "400"))
    assert found["plait_errors_total", refused] == 1
    ready = {role: found["plait_workers_ready", (("role", role),)] for role in get_args(Role)}
    assert ready == {"colocated": 1, "prefill": 0, "decode": 0}


def test_what_alerts_tell_of_is_counted_from_zero_on() -> None:
    """A burst between two scrapes would otherwise be a first sample, without any growth."""
    with serving() as server:
        found = scrape(server)
    zero = {
        (dict(labels)["kind"], dict(labels)["status"])
        for (name, labels), value in found.items()
        if name == "plait_errors_total" and value == 0
    }
    assert zero == {
        ("overloaded", "503"),
        ("unavailable", "503"),
        ("worker_lost", "503"),
        ("worker_error", "500"),
    }


def test_families_of_workers_are_merged_by_slot_and_role() -> None:
    with serving() as server:
        token_ids = server.tokenizer.encode("fine")
        for value in (1.0, 2.0):
            worker = server.add_worker(reply(token_ids))
            worker.families = [
                family("plait_pool_pages", "gauge", value, state="used"),
                family("plait_steps", "counter", value),
                family("plait_requests_running", "gauge", 99.0),  # the front end's own name
                family("other_name", "gauge", value),
                family("plait_odd", "summary", value),
            ]
        body = {"model": MODEL_NAME, "prompt": ["a", "b"], "max_tokens": 1}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        server.until(lambda: all(worker.families for worker in server.client.fleet))
        server.until(lambda: all(worker.load.num_running == 0 for worker in server.client.fleet))
        found = scrape(server)
        for slot in ("0", "1"):
            where = (("role", "colocated"), ("worker", slot))
            key = (("role", "colocated"), ("state", "used"), ("worker", slot))
            assert found["plait_pool_pages", key] == float(slot) + 1
            assert found["plait_steps_total", where] == float(slot) + 1
        assert found["plait_requests_running", ()] == 0
        assert not any(name in ("other_name", "plait_odd") for name, _ in found)
        # A restarted worker takes its predecessor's slot: names stay few.
        first = server.workers[0]
        first.vanish()
        server.until(lambda: len(server.client.fleet) == 1)
        assert lost(server) == {("colocated", "disconnected"): 1}
        server.add_worker(reply(token_ids))
        assert sorted(worker.slot for worker in server.client.fleet) == [0, 1]


def test_pools_in_use_are_the_decode_workers_as_their_heartbeats_say() -> None:
    with serving() as server:
        token_ids = server.tokenizer.encode("fine")
        for role, free, cached in (("prefill", 1024, 0), ("decode", 512, 256), ("decode", 0, 512)):
            worker = server.add_worker(reply(token_ids), role=role)
            worker.families = [family("plait_steps", "counter", 1.0)]
            worker.beat(Load(free_pages=free, evictable_pages=cached))
        server.until(lambda: all(worker.families for worker in server.client.fleet))
        found = scrape(server)
    assert found["plait_fleet_kv_utilization", ()] == 1 - (512 + 256 + 512) / 2048
    (labels,) = [dict(labels) for name, labels in found if name == "plait_fleet_cache_info"]
    assert labels["num_pages"] == labels["num_gpu_blocks"] == "2048"
    assert labels["page_size"] == labels["block_size"]


def test_nothing_a_client_sends_becomes_a_label() -> None:
    with serving() as server:
        server.add_worker(reply(server.tokenizer.encode("fine")))
        for path in ("/v1/models/odd-name", "/odd-name"):
            server.http.get(path, headers={"x-request-id": "odd-name"})
        body = {"model": "odd-name", "prompt": "x", "user": "odd-name"}
        server.http.post("/v1/completions", json=body)
        assert "odd-name" not in server.http.get("/metrics").text


def test_a_worker_that_was_removed_is_told_from_one_that_broke() -> None:
    with serving() as server:
        worker = server.add_worker(reply(server.tokenizer.encode("fine")))
        before = scrape(server)
        assert before["plait_workers_lost_total", (("reason", "silent"), ("role", "decode"))] == 0
        server.loop.call_soon_threadsafe(server.client.roster.remove, worker.address)
        server.until(lambda: not len(server.client.fleet))
        assert lost(server) == {("colocated", "removed"): 1}
