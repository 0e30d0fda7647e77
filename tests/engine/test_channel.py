"""Channels over real sockets: what arrives, what is refused, what a restart does not inherit."""

from __future__ import annotations

import logging
import queue
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from engine.channel import Channel, Disconnected, Event
from engine.cluster_key import ClusterKey, ClusterKeyError
from engine.dialled import Dialled
from engine.messages import Abort, Alive, CloseRoom, Drain, Goodbye, Register, RoomClosed

T = TypeVar("T")


class Ends:
    """Channels that a test opens, their received messages, and the turns that they all take."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.got: dict[str, list[tuple[str, Event]]] = {}

    def open(self, name: str, **options: object) -> Channel:
        kind = "worker" if "bind" in options else "frontend"
        channel = Channel(kind, name, **options)
        self.channels.append(channel)
        self.got[name] = []
        return channel

    def close(self, channel: Channel) -> None:
        self.channels.remove(channel)
        channel.close()

    def turn(self) -> None:
        for channel in self.channels:
            # Signs of life are not what the tests are about.
            events = [e for e in channel.receive(0.005) if not isinstance(e[1], Alive)]
            self.got[channel.name] += events

    def until(self, found: Callable[[], T | None]) -> T:
        """Turns until there is something to see; the test's timeout bounds it."""
        while not (seen := found()):
            self.turn()
        return seen

    def messages(self, name: str, kind: type[T]) -> list[T]:
        return [message for _, message in self.got[name] if isinstance(message, kind)]

    def identity(self, name: str, of: str) -> str:
        """What the bound channel `name` knows the dialler `of` by, once it has registered."""

        def found() -> str | None:
            its = [p for p, m in self.got[name] if isinstance(m, Register) and m.name == of]
            return its[-1] if its else None

        return self.until(found)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for channel in list(ends.channels):
        ends.close(channel)


@pytest.fixture(params=["ipc", "tcp"])
def bind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/w" if request.param == "ipc" else "tcp://127.0.0.1:*"


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/w"


def key(folder: Path, name: str) -> ClusterKey:
    path = folder / name
    if not path.exists():
        ClusterKey.write_new(path)
    return ClusterKey.read(path)


@pytest.fixture
def raw() -> Iterator[Callable[[int], zmq.Socket]]:
    """Makes sockets that speak ZeroMQ and not our language."""
    context: zmq.Context = zmq.Context()
    sockets: list[zmq.Socket] = []

    def make(kind: int) -> zmq.Socket:
        sockets.append(context.socket(kind))
        return sockets[-1]

    yield make
    for sock in sockets:
        sock.close(linger=0)
    context.term()


def test_messages_go_both_ways_in_order(ends: Ends, bind: str) -> None:
    worker = ends.open("w", bind=bind)
    frontend = ends.open("f")
    frontend.dial(worker.address)
    frontend.dial(worker.address)  # nothing more
    for number in range(100):
        frontend.send(worker.address, Abort(f"{number}"))
    identity = ends.identity("w", "f")
    for number in range(100):
        worker.send(identity, RoomClosed(room=f"{number}"))
    ends.until(lambda: len(ends.messages("f", RoomClosed)) == 100)
    first, *rest = ends.got["w"]
    assert first == (identity, Register(kind="frontend", name="f"))
    assert rest == [(identity, Abort(f"{number}")) for number in range(100)]
    assert ends.got["f"] == [(worker.address, RoomClosed(room=f"{n}")) for n in range(100)]


def test_one_that_dials_first_is_connected_when_the_other_comes(ends: Ends, address: str) -> None:
    frontend = ends.open("f")
    frontend.dial(address)
    frontend.send(address, Drain())
    ends.open("w", bind=address)
    ends.until(lambda: ends.messages("w", Drain))
    assert not ends.messages("f", Disconnected)


def test_peers_are_told_apart_and_strangers_are_nobody(ends: Ends, address: str) -> None:
    worker = ends.open("w", bind=address)
    for name in ("f", "g"):
        ends.open(name).dial(worker.address)
    identities = {name: ends.identity("w", name) for name in ("f", "g")}
    assert len(set(identities.values())) == 2
    worker.send("nobody", Goodbye())
    worker.send(identities["g"], Goodbye())
    worker.send(identities["f"], RoomClosed(room="last"))
    ends.until(lambda: ends.messages("f", RoomClosed))
    assert not ends.messages("f", Goodbye)
    ends.until(lambda: ends.messages("g", Goodbye))


def test_one_that_hangs_up_hears_nothing_more(ends: Ends, address: str) -> None:
    worker = ends.open("w", bind=address)
    frontend = ends.open("f")
    frontend.dial(address)
    identity = ends.identity("w", "f")
    frontend.hang_up(address)
    frontend.hang_up(address)
    worker.send(identity, Goodbye())
    frontend.send(address, Drain())  # to nobody
    other = ends.open("g")
    other.dial(address)
    worker.send(ends.identity("w", "g"), Goodbye())
    ends.until(lambda: ends.messages("g", Goodbye))
    assert ends.got["f"] == []
    assert not ends.messages("w", Drain)


def test_any_thread_may_post_dial_and_wake(ends: Ends, address: str) -> None:
    worker = ends.open("w", bind=address)
    frontend = ends.open("f")

    def dial_and_post(number: int) -> None:
        frontend.post_dial(address)
        for index in range(50):
            frontend.post(address, CloseRoom(f"{number}-{index}"))

    threads = [threading.Thread(target=dial_and_post, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends.until(lambda: len(ends.messages("w", CloseRoom)) == 200)
    for number in range(4):
        mine = [m.room for m in ends.messages("w", CloseRoom) if m.room.startswith(f"{number}-")]
        assert mine == [f"{number}-{index}" for index in range(50)]
    assert len(ends.messages("w", Register)) == 1
    worker.post(ends.identity("w", "f"), Goodbye())
    ends.until(lambda: ends.messages("f", Goodbye))

    frontend.post_hang_up(address)
    waits, returned = threading.Event(), queue.Queue[list[tuple[str, Event]]]()

    def receive() -> None:
        waits.set()
        returned.put(frontend.receive(300.0))

    thread = threading.Thread(target=receive)
    thread.start()
    waits.wait()
    frontend.wake()
    assert returned.get(timeout=60) == []
    thread.join()


FRAMES = [
    [b"\xc1"],
    [b""],
    [b"hello"],
    [b"\x91" * 100_000],  # nested too deep for a decoder
    [b"\x81\xa4type\xa7unknown"],
    [b"\x82\xa4type\xa5abort\xa3rid\x01"],  # a number where text is due
    [b"\x81\xa4type\xa5hello"],  # for nobody that is bound, and without its fields
    [b"\x81\xa4type\xa5drain", b"more"],
    [b"\x81\xa4type\xa5drain", b""],
]


def test_a_malformed_message_is_dropped_counted_and_logged_once(
    ends: Ends, address: str, raw: Callable[[int], zmq.Socket], caplog: pytest.LogCaptureFixture
) -> None:
    worker = ends.open("w", bind=address)
    frontend = ends.open("f")
    frontend.dial(address)
    stranger = raw(zmq.DEALER)
    stranger.connect(address)
    for frames in FRAMES:
        stranger.send_multipart(frames)
    frontend.send(address, Drain())
    ends.until(lambda: worker.num_malformed == len(FRAMES) and ends.messages("w", Drain))
    logged = [r for r in caplog.records if "none of ours" in r.getMessage()]
    assert len(logged) == 1
    assert len(ends.got["w"]) == 2  # those of the front end


def test_what_a_dialled_peer_says_is_checked_as_well(
    ends: Ends, address: str, raw: Callable[[int], zmq.Socket]
) -> None:
    stranger = raw(zmq.ROUTER)
    stranger.bind(address)
    frontend = ends.open("f")
    frontend.dial(address)
    identity = stranger.recv_multipart()[0]
    for frames in FRAMES:
        stranger.send_multipart([identity, *frames])
    ends.until(lambda: frontend.num_malformed == len(FRAMES))
    assert ends.got["f"] == []


def test_an_oversize_message_costs_its_sender_the_connection_and_others_nothing(
    ends: Ends, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.frames.MAX_MESSAGE_BYTES", 10_000)
    worker = ends.open("w", bind=address)
    for name in ("f", "g"):
        ends.open(name).dial(address)
    frontend = ends.channels[-1]
    identity = ends.identity("w", "f")
    ends.identity("w", "g")
    frontend.send(address, CloseRoom("x" * 20_000))  # read, counted and dropped
    ends.until(lambda: worker.num_malformed == 1)
    frontend.send(address, CloseRoom("x" * 50_000))  # not even read
    ends.until(lambda: ends.messages("g", Disconnected))
    ends.until(lambda: len(ends.messages("w", Register)) == 3)  # it is back
    frontend.send(address, CloseRoom("x" * 5_000))
    ends.until(lambda: ends.messages("w", CloseRoom))
    worker.send(identity, Goodbye())
    ends.until(lambda: ends.messages("f", Goodbye))
    assert not ends.messages("f", Disconnected)
    assert [len(m.room) for m in ends.messages("w", CloseRoom)] == [5_000]


def test_a_restarted_peer_gets_a_new_connection_and_nothing_meant_for_the_one_before(
    ends: Ends, address: str
) -> None:
    first = ends.open("w", bind=address)
    frontend = ends.open("f")
    frontend.dial(address)
    before = ends.identity("w", "f")
    ends.close(first)
    for number in range(10):  # nobody is there, and the front end does not know yet
        frontend.send(address, CloseRoom(f"{number}"))
        frontend.post(address, CloseRoom(f"{number}"))
    ends.until(lambda: ends.messages("f", Disconnected))
    second = ends.open("v", bind=address)
    after = ends.identity("v", "f")
    frontend.send(address, Drain())
    ends.until(lambda: ends.messages("v", Drain))
    assert after != before
    assert not ends.messages("v", CloseRoom)
    assert ends.got["f"] == [(address, Disconnected())]
    ends.close(second)
    ends.until(lambda: len(ends.messages("f", Disconnected)) == 2)


def test_what_came_before_the_connection_broke_is_read_although_the_poll_did_not_see_it(
    address: str, raw: Callable[[int], zmq.Socket]
) -> None:
    """A poll looks at the messages first, then at the connection; both may come in between."""
    peer, poller = raw(zmq.ROUTER), zmq.Poller()
    peer.bind(address)
    context: zmq.Context = zmq.Context()
    dialled = Dialled(address, context, poller, None, b"who dials")
    identity, _ = peer.recv_multipart()
    for word in (b"one", b"two"):
        peer.send_multipart([identity, word])
    peer.unbind(address)
    peer.close(linger=1000)
    heard, is_lost = [], False
    while not is_lost:
        ready = {sock: event for sock, event in poller.poll() if sock.type == zmq.PAIR}
        heard += dialled.receive(ready)
        is_lost = dialled.look(ready)
    dialled.close()
    context.term()
    assert heard == [[b"one"], [b"two"]]


def test_the_address_of_a_channel_that_cannot_be_bound_is_named(ends: Ends, address: str) -> None:
    taken = ends.open("w", bind="tcp://127.0.0.1:*").address
    for bad in (taken, "tcp://nowhere", "udp://127.0.0.1:1", "ipc:///none/none/w"):
        with pytest.raises(OSError, match=r"expected ipc:///path or tcp://host:port"):
            Channel("worker", bind=bad)
    frontend = ends.open("f")
    with pytest.raises(OSError, match=r"cannot dial nowhere: .*expected ipc:///path or tcp"):
        frontend.dial("nowhere")


# -- CURVE


def test_holders_of_the_key_talk(ends: Ends, bind: str, tmp_path: Path) -> None:
    worker = ends.open("w", bind=bind, key=key(tmp_path, "a"))
    frontend = ends.open("f", key=key(tmp_path, "a"))
    frontend.dial(worker.address)
    worker.send(ends.identity("w", "f"), Goodbye())
    ends.until(lambda: ends.messages("f", Goodbye))


@pytest.mark.parametrize(
    ("bound", "dialling"), [("a", "b"), ("a", None), (None, "a")], ids=["other", "none", "unasked"]
)
def test_others_are_refused_counted_and_logged_once(
    ends: Ends,
    bind: str,
    tmp_path: Path,
    bound: str | None,
    dialling: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    keys = {None: None, "a": key(tmp_path, "a"), "b": key(tmp_path, "b")}
    worker = ends.open("w", bind=bind, key=keys[bound])
    member = ends.open("m", key=keys[bound])
    member.dial(worker.address)
    stranger = ends.open("s", key=keys[dialling])
    stranger.dial(worker.address)
    for room in ("1", "2", "3", "4"):
        stranger.send(worker.address, CloseRoom(room))
        before = worker.num_refused
        ends.until(lambda before=before: worker.num_refused > before)
    member.send(worker.address, Drain())
    ends.until(lambda: ends.messages("w", Drain))
    worker.send(ends.identity("w", "m"), Goodbye())
    ends.until(lambda: ends.messages("m", Goodbye))
    assert not ends.messages("w", CloseRoom)
    assert [m.name for m in ends.messages("w", Register)] == ["m"]
    assert not ends.messages("m", Disconnected)
    said = [record.getMessage() for record in caplog.records]
    assert sum("failed at its handshake" in line for line in said) == 1
    assert sum("refuses connections" in line for line in said) == 1


def test_who_knows_the_public_half_only_is_refused(
    ends: Ends, bind: str, tmp_path: Path, raw: Callable[[int], zmq.Socket]
) -> None:
    worker = ends.open("w", bind=bind, key=key(tmp_path, "a"))
    stranger = raw(zmq.DEALER)
    stranger.curve_serverkey = key(tmp_path, "a").public
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.connect(worker.address)
    stranger.send(b"\x81\xa4type\xa5drain")
    ends.until(lambda: worker.num_refused > 0)
    member = ends.open("m", key=key(tmp_path, "a"))
    member.dial(worker.address)
    ends.identity("w", "m")
    assert not ends.messages("w", Drain)
    assert worker.num_malformed == 0


def test_one_that_was_refused_is_let_in_by_the_right_peer(
    ends: Ends, address: str, tmp_path: Path
) -> None:
    """However long it was refused, and without what it said meanwhile."""
    wrong = ends.open("w", bind=address)
    frontend = ends.open("f", key=key(tmp_path, "a"))
    frontend.dial(address)
    frontend.send(address, CloseRoom("lost"))
    ends.until(lambda: wrong.num_refused >= 3)
    ends.until(lambda: ends.messages("f", Disconnected))  # it is told so
    ends.close(wrong)
    right = ends.open("v", bind=address, key=key(tmp_path, "a"))
    right.send(ends.identity("v", "f"), Goodbye())
    ends.until(lambda: ends.messages("f", Goodbye))
    assert not ends.messages("v", CloseRoom)


def test_a_key_that_found_no_room_leaves_no_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError):
            ClusterKey.write_new(tmp_path / "key")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    ClusterKey.write_new(path)
    assert path.stat().st_mode & 0o777 == 0o600
    first = ClusterKey.read(path)
    with pytest.raises(FileExistsError):
        ClusterKey.write_new(path)
    assert ClusterKey.read(path) == first
    assert first.secret.decode() not in repr(first)
    path.chmod(0o640)  # a group may share it
    assert ClusterKey.read(path) == first


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "holds 0 characters that are no key"),
        (b"x" * 39, "holds 39 characters that are no key"),
        (b'"' * 40, "holds 40 characters that are no key"),
        (b"\xff" * 40, "can't decode byte"),
    ],
)
def test_a_key_file_that_is_none_is_named_with_what_is_expected(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(ClusterKeyError) as caught:
        ClusterKey.read(path)
    assert str(caught.value).startswith(f"--cluster-key-file {path}: ")
    assert said in str(caught.value)
    assert "expected a file written by `plait keygen FILE`" in str(caught.value)


def test_a_key_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    ClusterKey.write_new(path)
    path.chmod(0o644)
    with pytest.raises(ClusterKeyError, match=r"mode 644\); expected a mode such as 600 or 640"):
        ClusterKey.read(path)
    with pytest.raises(ClusterKeyError, match="expected a file written by"):
        ClusterKey.read(tmp_path)  # a folder
