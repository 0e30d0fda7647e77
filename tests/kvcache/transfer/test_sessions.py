"""Sessions: order within one, none waits for another, and no thread is left behind."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, wait

import pytest
import torch

from kvcache.transfer.base import TransferError, Write
from kvcache.transfer.loopback import LoopbackEngine, LoopbackNetwork

WAIT_S = 30.0


def buffer(engine: LoopbackEngine, num_bytes: int, value: int = 0) -> torch.Tensor:
    memory = torch.full((num_bytes,), value, dtype=torch.uint8)
    engine.register(memory.data_ptr(), num_bytes)
    return memory


class Pair:
    """A sender with 4 bytes (1, 2, 3, 4), and two receivers with 4 zeros."""

    def __init__(self) -> None:
        network = LoopbackNetwork()
        self.sender, self.a, self.b = (network.engine() for _ in range(3))
        self.source = buffer(self.sender, 4)
        self.source.copy_(torch.tensor([1, 2, 3, 4]))
        self.at_a, self.at_b = buffer(self.a, 4), buffer(self.b, 4)

    def to_a(self, index: int) -> Write:
        return Write(self.source.data_ptr() + index, self.at_a.data_ptr() + index, 1)

    def to_b(self, index: int) -> Write:
        return Write(self.source.data_ptr() + index, self.at_b.data_ptr() + index, 1)


def threads_of(engine: str = "loopback") -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(engine)]


def test_bytes_are_there_when_the_future_resolves() -> None:
    pair = Pair()
    pair.sender.write(pair.a.session, [pair.to_a(0), pair.to_a(2)]).result(WAIT_S)
    assert pair.at_a.tolist() == [1, 0, 3, 0]
    assert pair.at_b.tolist() == [0, 0, 0, 0]
    pair.sender.close()


def test_a_session_writes_in_order_while_another_stands_still() -> None:
    pair = Pair()
    stall = pair.sender.stall_next()
    first = pair.sender.write(pair.a.session, [pair.to_a(0)])
    assert stall.reached.wait(WAIT_S)
    second = pair.sender.write(pair.a.session, [pair.to_a(1)])
    pair.sender.write(pair.b.session, [pair.to_b(0)]).result(WAIT_S)
    assert not first.done()
    assert not second.done()
    assert pair.at_a.tolist() == [0, 0, 0, 0]
    stall.release()
    wait([first, second], WAIT_S)
    assert [name for name, _ in pair.sender.written] == [
        pair.b.session,
        pair.a.session,
        pair.a.session,
    ]
    assert pair.at_a.tolist() == [1, 2, 0, 0]
    pair.sender.close()


def test_a_failure_is_one_writes_own() -> None:
    pair = Pair()
    pair.sender.fail_next(1)
    with pytest.raises(TransferError, match=f"write to {pair.a.session}: told to fail"):
        pair.sender.write(pair.a.session, [pair.to_a(0)]).result(WAIT_S)
    pair.sender.write(pair.a.session, [pair.to_a(1)]).result(WAIT_S)
    assert pair.at_a.tolist() == [0, 2, 0, 0]
    pair.sender.close()


def test_memory_that_is_not_registered_is_refused() -> None:
    pair = Pair()
    beyond = Write(pair.source.data_ptr(), pair.at_a.data_ptr() + 2, 3)
    with pytest.raises(TransferError, match=r"destination .* is not registered there"):
        pair.sender.write(pair.a.session, [beyond]).result(WAIT_S)
    with pytest.raises(TransferError, match="no such session"):
        pair.sender.write("loopback:99", [pair.to_a(0)]).result(WAIT_S)
    pair.sender.close()


def test_forget_fails_what_waits_and_what_runs_of_that_session_only() -> None:
    pair = Pair()
    stall = pair.sender.stall_next()
    running = pair.sender.write(pair.a.session, [pair.to_a(0)])
    waiting = pair.sender.write(pair.a.session, [pair.to_a(1)])
    assert stall.reached.wait(WAIT_S)
    other = pair.sender.write(pair.b.session, [pair.to_b(0)])
    pair.sender.forget(pair.a.session)
    pair.sender.forget("loopback:99")
    for future in (running, waiting):
        with pytest.raises(TransferError, match="the peer was given up"):
            future.result(WAIT_S)
    other.result(WAIT_S)
    pair.sender.write(pair.a.session, [pair.to_a(3)]).result(WAIT_S)  # it has come back
    assert pair.at_a.tolist() == [0, 0, 0, 4]
    pair.sender.close()


def test_a_waiting_write_can_be_cancelled() -> None:
    pair = Pair()
    stall = pair.sender.stall_next()
    running = pair.sender.write(pair.a.session, [pair.to_a(0)])
    assert stall.reached.wait(WAIT_S)
    waiting = pair.sender.write(pair.a.session, [pair.to_a(1)])
    assert waiting.cancel()
    assert not running.cancel()
    stall.release()
    running.result(WAIT_S)
    with pytest.raises(CancelledError):
        waiting.result(WAIT_S)
    pair.sender.close()
    assert pair.at_a.tolist() == [1, 0, 0, 0]


def test_close_fails_what_is_left_and_joins() -> None:
    pair = Pair()
    stall = pair.sender.stall_next(2)
    futures = [
        pair.sender.write(pair.a.session, [pair.to_a(0)]),
        pair.sender.write(pair.a.session, [pair.to_a(1)]),
        pair.sender.write(pair.b.session, [pair.to_b(0)]),
    ]
    assert stall.reached.wait(WAIT_S)
    pair.sender.close()
    pair.sender.close()
    assert threads_of() == []
    for future in futures:
        assert isinstance(future.exception(0), TransferError)
    with pytest.raises(TransferError, match="the engine is closed"):
        pair.sender.write(pair.a.session, [pair.to_a(0)]).result(0)


def test_an_idle_session_has_no_thread() -> None:
    pair = Pair()
    pair.sender.write(pair.a.session, [pair.to_a(0)]).result(WAIT_S)
    for thread in threads_of():
        thread.join(WAIT_S)
    assert threads_of() == []
    pair.sender.write(pair.a.session, [pair.to_a(1)]).result(WAIT_S)
    assert pair.at_a.tolist() == [1, 2, 0, 0]
    pair.sender.close()
