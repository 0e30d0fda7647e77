"""The key that the processes of one cluster share: CURVE keys of ZeroMQ (RFC 26, CurveZMQ).

Who holds the key file may take part; who does not can neither read nor speak. A process is server
on the socket it binds and client on those it dials, with the same key pair.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

_NUM_KEY_CHARS = 40  # Z85 of 32 bytes


class ClusterKeyError(Exception):
    """A key file that cannot be used; the message names it and what is expected."""


@dataclass(frozen=True, slots=True)
class ClusterKey:
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """Raises ClusterKeyError where the file is missing, is open to others or holds no key."""
        wanted = "expected a file written by `plait keygen FILE`"
        try:
            mode = path.stat().st_mode
            secret = path.read_text(encoding="ascii").strip().encode()
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterKeyError(f"--cluster-key-file {path}: {error}; {wanted}") from error
        if mode & 0o007:
            raise ClusterKeyError(
                f"--cluster-key-file {path}: everybody may read it (mode {mode & 0o777:o}); "
                "expected a mode such as 600 or 640"
            )
        try:
            if len(secret) != _NUM_KEY_CHARS:
                raise ValueError
            return cls(zmq.curve_public(secret), secret)
        except (ValueError, zmq.ZMQError):
            raise ClusterKeyError(
                f"--cluster-key-file {path}: holds {len(secret)} characters that are no key; "
                f"{wanted}"
            ) from None

    @staticmethod
    def write_new(path: Path) -> None:
        """A new key in a new file that only its owner may read. FileExistsError where it exists."""
        _, secret = zmq.curve_keypair()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(secret + b"\n")
        except BaseException:
            path.unlink(missing_ok=True)  # a part of a key, or none
            raise


class _OnlyMembers:
    def __init__(self, key: ClusterKey) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key.public


def admit_only(context: zmq.Context[zmq.Socket[bytes]], key: ClusterKey) -> ThreadAuthenticator:
    """Refuse, on sockets that `context` binds from now on, every client that has another key."""
    auth = ThreadAuthenticator(context)
    auth.start()
    auth.configure_curve_callback(domain="*", credentials_provider=_OnlyMembers(key))
    return auth
