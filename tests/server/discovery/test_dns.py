"""Workers found by a DNS name: they follow its addresses and survive its failures."""

from __future__ import annotations

import socket

import pytest

from server.discovery.dns import DnsSource, look_up
from server.discovery.places import DnsName, dns_name, kind_of, tcp_address
from tests.server.discovery.following import discovering, place_of
from tests.server.scripted import reply, serving
from tests.server.stream import SPOKEN, TEXT, Stream
from tests.server.worker import ScriptedWorker

SPEAKING = reply(SPOKEN)


def test_addresses_that_come_and_go_are_followed_and_failures_change_nothing() -> None:
    answers: list[set[str] | OSError] = [OSError("the resolver is not there yet")]

    async def resolve(host: str, port: int) -> set[str]:
        answer = answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    with serving() as server:
        vocab_size = server.tokenizer.vocab_size
        first = ScriptedWorker("tcp://127.0.0.1:*", SPEAKING, vocab_size)
        port = place_of(first)[1]
        second = ScriptedWorker(f"tcp://127.0.0.2:{port}", SPEAKING, vocab_size)
        server.workers += [first, second]
        item = f"dns://plait-decode:{port}"
        source = DnsSource(DnsName("plait-decode", port), 0.01, resolve=resolve)
        fleet = server.client.fleet
        with discovering(server, [item], {item: source}):
            server.until(lambda: "not there yet" in server.client.roster.places[0].error)
            answers[0] = {"127.0.0.1"}
            server.until(lambda: server.knows(first) and not server.client.roster.places[0].error)
            answers[0] = {"127.0.0.1", "127.0.0.2"}
            server.until(lambda: server.knows(second))
            answers[0] = OSError("no such name")
            server.until(lambda: "no such name" in server.client.roster.places[0].error)
            assert len(fleet) == 2
            assert Stream(server).answer() == (TEXT, ["stop"])
            answers[0] = {"127.0.0.2"}
            server.until(lambda: len(fleet) == 1 and server.knows(second))
            page = server.http.get("/metrics").text
            assert 'plait_discovery_endpoints{source="dns"} 1.0' in page
            failures = 'plait_discovery_failures_total{reason="lookup",source="dns"} '
            assert failures in page and failures + "0.0" not in page


async def test_a_name_of_this_machine_is_looked_up() -> None:
    assert await look_up("localhost", 7000) == {"127.0.0.1"}


def test_items_say_what_they_are() -> None:
    assert dns_name("dns://plait-decode.models.svc:7000") == DnsName(
        "plait-decode.models.svc", 7000
    )
    items = ["tcp://a:1", "ipc:///a", "dns://a:1", "k8s://a:b"]
    assert [kind_of(item) for item in items] == ["static", "static", "dns", "kubernetes"]


def loopbacks() -> list[str]:
    """Of the families that this machine has."""
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return ["127.0.0.1"]
    return ["127.0.0.1", "::1"]


@pytest.mark.parametrize("host", loopbacks())
def test_workers_are_reached_over_both_families(host: str) -> None:
    with serving() as server:
        listen = tcp_address(host, 0).replace(":0", ":*")
        worker = ScriptedWorker(listen, SPEAKING, server.tokenizer.vocab_size)
        server.workers.append(worker)
        server.call(lambda: server.client.roster.add(worker.address))
        server.until(lambda: server.knows(worker))
        assert Stream(server).answer() == (TEXT, ["stop"])
