"""Who is there: names outlive connections, silence is counted in looks."""

from __future__ import annotations

from engine.messages import Register
from engine.peers import MAX_SILENT_LOOKS, Peers, Upstreams

FRONTEND = Register(kind="frontend", name="f")
WORKER = Register(kind="worker", name="w")


def test_a_peer_is_known_by_name_by_connection_and_by_kind() -> None:
    peers = Peers()
    assert peers.register("1", FRONTEND) is None
    assert peers.register("2", WORKER) is None
    known = peers.named("f")
    assert known is not None and (known.kind, known.identity) == ("frontend", "1")
    assert peers.heard("1") is known
    assert peers.of_kind("frontend") == [known]
    assert [peer.name for peer in peers.all()] == ["f", "w"]
    assert peers.heard("3") is None
    assert peers.named("v") is None


def test_a_name_over_a_new_connection_ends_the_old_one() -> None:
    peers = Peers()
    peers.register("1", FRONTEND)
    before = peers.named("f")
    assert peers.register("2", FRONTEND) is before
    now = peers.named("f")
    assert now is not None and now.identity == "2"
    assert peers.heard("1") is None
    assert peers.all() == [now]
    # Late news of the old one's end do not touch the new one.
    assert before is not None
    peers.remove(before)
    assert peers.named("f") is now
    assert peers.heard("2") is now


def test_registering_twice_over_one_connection_is_nothing_new() -> None:
    peers = Peers()
    peers.register("1", FRONTEND)
    known = peers.named("f")
    assert peers.register("1", FRONTEND) is None
    assert peers.named("f") is known


def test_a_peer_is_gone_after_more_silent_looks_than_may_be() -> None:
    peers = Peers()
    peers.register("1", FRONTEND)
    peers.register("2", WORKER)
    for _ in range(MAX_SILENT_LOOKS):
        assert peers.look() == []
        peers.heard("2")
    [gone] = peers.look()
    assert gone.name == "f"
    assert peers.named("f") is None
    assert peers.heard("1") is None  # it has to register again
    peers.heard("2")
    assert peers.look() == []


def test_an_upstream_is_silent_at_every_look_until_it_is_heard() -> None:
    upstreams = Upstreams()
    upstreams.asked("tcp://a:1")
    upstreams.asked("tcp://a:1")
    for _ in range(MAX_SILENT_LOOKS):
        assert upstreams.look() == []
    assert upstreams.look() == ["tcp://a:1"]
    assert upstreams.look() == ["tcp://a:1"]
    upstreams.asked("tcp://a:1")  # whoever is there now has as much time as the one before
    for _ in range(MAX_SILENT_LOOKS):
        assert upstreams.look() == []
        upstreams.asked("tcp://a:1")  # asking is not hearing
    assert upstreams.look() == ["tcp://a:1"]
    upstreams.heard("tcp://a:1")
    assert upstreams.look() == []


def test_another_instance_at_an_address_is_noticed_once() -> None:
    upstreams = Upstreams()
    upstreams.asked("tcp://a:1")
    assert not upstreams.heard("tcp://a:1", "first")
    assert not upstreams.heard("tcp://a:1", "first")  # a blip
    assert not upstreams.heard("tcp://a:1")  # a message that does not say
    assert upstreams.heard("tcp://a:1", "second")
    assert not upstreams.heard("tcp://a:1", "second")
