"""The transfer port over Mooncake's engine, peer to peer: TCP, RDMA, or NVLink where built in.

Over a network requests are submitted one by one and polled: unlike the engine's batch call this
tells the fate of each, ends only when all are decided, and does not burn a core meanwhile. Over
NVLink a submission is the copy, and the batch call is used.

CUDA pools may be registered. Over TCP Mooncake moves them by pieces of 64 KiB through the host: 1.1
to 2.1 GB/s where host memory makes 2.1 to 4.5 (H200, one sender). Staging in pinned memory would
have to be done at both ends, with a page-first layout that pool records cannot say; it is not done.
RDMA has not been tried.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kvcache.transfer.base import LATE_BYTES_S, TransferError, TransferUnavailableError, Write
from kvcache.transfer.sessions import SessionThreads
from kvcache.transfer.system import captured_stderr, load_engine_module

log = logging.getLogger("plait.transfer")

PROTOCOLS = ("tcp", "rdma", "nvlink")

_MAX_IN_FLIGHT = 1024  # requests of one session; past about 2048 the engine needs the setting below
_MAX_REQUEST_BYTES = 8 * 1024 * 1024
_POLL_S = 0.0003
_LOOK_AHEAD = 16  # undecided requests in a row after which a poll looks no further
_STALL_S = 20.0  # without any request decided: longer than the engine's own limit below
_ANSWER_S = 10.0  # for a peer's description
_MAX_DESCRIPTION_BYTES = 16 * 1024 * 1024
_DONE = 1
_PENDING = (0, -2)  # -2: the engine's own limit has passed, the request is still held
_NO_HANDLE = (0, -1, 2**64 - 1)
_RDMA_DEVICES = Path("/sys/class/infiniband")
_SETTINGS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(int(LATE_BYTES_S / 2)),
    "MC_TCP_STATUS_TIMEOUT_SEC": str(int(LATE_BYTES_S / 2)),
    "MC_LOG_LEVEL": "WARNING",
}


class MooncakeEngine:
    """A TransferEngine that listens on two ports of all interfaces, without authentication.

    `host` is the address that peers reach this machine by. Raises TransferUnavailableError where
    the module, a system library, the device for `protocol` or a port is missing, ValueError for
    another protocol than tcp, rdma and nvlink. Make it after the process has forked, if it does.
    """

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp") -> None:
        _choose(protocol)
        module = load_engine_module()
        if protocol == "nvlink" and not module.SUPPORT_INTRA_NVLINK:
            raise TransferUnavailableError(
                "protocol nvlink: this build of Mooncake has no NVLink transport; use tcp or rdma"
            )
        self._engine: Any = module.TransferEngine()
        with captured_stderr() as said:
            code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if code != 0:
            raise TransferUnavailableError(
                f"Mooncake did not start on {host} over {protocol}: {' / '.join(said)}"
            )
        for line in said:
            log.debug("mooncake: %s", line)
        name = f"[{host}]" if ":" in host else host
        self.session = f"{name}:{self._engine.get_rpc_port()}"
        self._reached: set[str] = set()  # sessions that answered and have not failed since
        self._adrift: dict[str, list[int]] = {}  # requests that a write stopped waiting for
        self._threads = SessionThreads(self._write_batch, "mooncake")
        self.protocol = self._chosen_protocol(protocol)
        log.info("transfer engine at %s over %s", self.session, self.protocol)

    def _chosen_protocol(self, protocol: str) -> str:
        """As the engine tells its peers: it takes any name and falls back to TCP in silence."""
        try:
            chosen = str(describe(self.session).get("protocol"))
        except TransferError as error:
            raise TransferUnavailableError(
                f"the transfer engine cannot be reached under the address it was given: {error}"
            ) from error
        if not chosen.startswith(protocol):
            raise TransferUnavailableError(
                f"protocol {protocol} was asked for, Mooncake chose {chosen}"
            )
        return chosen

    def register(self, address: int, num_bytes: int) -> None:
        code = self._engine.register_memory(address, num_bytes)
        if code != 0:
            raise TransferError(
                f"registering {num_bytes} bytes at {address:#x} failed: code {code}"
            )

    def write(self, session: str, writes: Sequence[Write]) -> Future[None]:
        return self._threads.submit(session, writes)

    def forget(self, session: str) -> None:
        self._threads.forget(session)
        self._reached.discard(session)

    def close(self) -> None:
        self._threads.close()
        self._engine = None  # stops listening: from here on nobody writes into this memory

    def _write_batch(
        self, session: str, writes: Sequence[Write], abandoned: threading.Event
    ) -> None:
        if session not in self._reached:
            # For a peer that does not answer the engine, with all its sessions, waits a minute.
            describe(session)
            self._reached.add(session)
        if self.protocol.startswith("nvlink"):
            self._copy(session, writes, abandoned)
            return
        batch = _Batch(self._engine, session, len(writes), self._adrift.pop(session, []))
        try:
            batch.run(_pieces(writes), abandoned)
        except TransferError:
            self._reached.discard(session)
            raise
        finally:
            if batch.undecided:
                self._adrift[session] = list(batch.undecided)

    def _copy(self, session: str, writes: Sequence[Write], abandoned: threading.Event) -> None:
        for start in range(0, len(writes), _MAX_IN_FLIGHT):
            if abandoned.is_set():
                raise TransferError(f"write to {session}: the peer was given up")
            part = writes[start : start + _MAX_IN_FLIGHT]
            columns = (list(column) for column in zip(*part, strict=True))
            if self._engine.batch_transfer_sync_write(session, *columns) != 0:
                self._reached.discard(session)
                raise TransferError(f"write to {session}: a copy of {len(writes)} failed")


class _Batch:
    """The requests of one call of write(), at most _MAX_IN_FLIGHT at a time.

    Those that an earlier batch stopped waiting for are waited for first: they could still write
    what their source holds by then, over what this batch has written.
    """

    def __init__(self, engine: Any, session: str, num_writes: int, adrift: list[int]) -> None:
        self.undecided = deque(adrift)
        self._adrift = set(adrift)
        self._engine = engine
        self._session = session
        self._num_writes = num_writes
        self._num_failed = 0

    def run(self, writes: Iterator[Write], abandoned: threading.Event) -> None:
        """Raises TransferError when a request failed and all others are decided, when none was
        decided for _STALL_S, and when abandoned."""
        is_submitting = True
        decided_at = time.monotonic()
        while is_submitting or self.undecided:
            while is_submitting and len(self.undecided) < _MAX_IN_FLIGHT:
                write = next(writes, None)
                is_submitting = write is not None and self._submit(write)
            if not self.undecided:
                continue
            if abandoned.is_set():
                raise TransferError(f"write to {self._session}: the peer was given up")
            time.sleep(_POLL_S)
            if self._poll():
                decided_at = time.monotonic()
                is_submitting &= not self._num_failed
            elif time.monotonic() - decided_at > _STALL_S:
                raise TransferError(
                    f"write to {self._session}: nothing moved for {_STALL_S:.0f} s, "
                    f"{len(self.undecided)} of {self._num_writes} requests undecided"
                )
        if self._num_failed:
            raise TransferError(
                f"write to {self._session}: "
                f"{self._num_failed} of {self._num_writes} requests failed"
            )

    def _submit(self, write: Write) -> bool:
        handle = self._engine.transfer_submit_write(self._session, *write)
        if handle in _NO_HANDLE:
            self._num_failed += 1
            return False
        self.undecided.append(handle)
        return True

    def _poll(self) -> int:
        """Requests decided since the last call. They are looked at from the oldest on."""
        waiting: list[int] = []
        num_decided = 0
        while self.undecided and len(waiting) < _LOOK_AHEAD:
            handle = self.undecided.popleft()
            status = self._engine.transfer_check_status(handle)
            if status in _PENDING:
                waiting.append(handle)
            else:
                num_decided += 1
                if handle in self._adrift:
                    self._adrift.remove(handle)
                else:
                    self._num_failed += status != _DONE
        self.undecided.extendleft(reversed(waiting))
        return num_decided


def _pieces(writes: Sequence[Write]) -> Iterator[Write]:
    """The same bytes by requests that even a slow network decides well within _STALL_S."""
    for write in writes:
        for start in range(0, write.num_bytes, _MAX_REQUEST_BYTES):
            size = min(_MAX_REQUEST_BYTES, write.num_bytes - start)
            yield Write(write.source + start, write.destination + start, size)


def describe(session: str) -> dict[str, Any]:
    """What the engine at "host:port" tells its peers of itself: protocol, buffers, data port.

    Raises TransferError when it does not answer as an engine does within _ANSWER_S. Follows
    Mooncake's handshake: 8 bytes of length, 1 byte that says "metadata", JSON; both ways.
    """
    host, _, port = session.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as sock:
            question = b"\x01{}"
            sock.sendall(struct.pack("<Q", len(question)) + question)
            (size,) = struct.unpack("<Q", _receive(sock, 8))
            if not 1 < size <= _MAX_DESCRIPTION_BYTES:
                raise ValueError(f"a description of {size} bytes")
            found = json.loads(_receive(sock, size)[1:])
            if not isinstance(found, dict):
                raise ValueError("a description that is no object")
            return found
    except (OSError, ValueError, OverflowError) as error:
        raise TransferError(f"no transfer engine answers at {session}: {error}") from error


def _receive(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise ValueError(f"the connection ended after {len(parts)} of {size} bytes")
        parts += part
    return bytes(parts)


def _choose(protocol: str) -> None:
    """Have the engine, which reads the environment, take this protocol and no other."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {protocol!r}")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in ("MC_FORCE_TCP", "MC_INTRANODE_NVLINK"):
        os.environ.pop(name, None)
    if protocol == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
    elif protocol == "nvlink":
        os.environ["MC_INTRANODE_NVLINK"] = "1"
    elif not any(_RDMA_DEVICES.glob("*")):
        raise TransferUnavailableError(
            f"protocol rdma: this machine has no RDMA device in {_RDMA_DEVICES}; use tcp"
        )
