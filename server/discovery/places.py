"""Where workers are looked for: what `--workers` names, and what was found there last.

Knows no socket: an item is read here and followed elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

PlaceKind = Literal["static", "dns", "kubernetes"]
KINDS: dict[str, PlaceKind] = {
    "tcp": "static",
    "ipc": "static",
    "dns": "dns",
    "k8s": "kubernetes",
}

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"  # of a Kubernetes name
# 0 to 65535: what is above would be taken for its remainder.
PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d{2}|6[0-4]\d{3}|[1-5]\d{4}|\d{1,4})"
PATTERN = (
    rf"^(tcp://.+:{PORT}|ipc:///.+|dns://[^\s/:]+:{PORT}"
    rf"|k8s://{_LABEL}(\.{_LABEL})?:{_LABEL})$"
)
ACCEPTED = "tcp://HOST:PORT, ipc:///PATH, dns://NAME:PORT or k8s://SERVICE[.NAMESPACE]:PORT"

# Why nothing new was learned from a place: the bounded label of a metric.
Reason = Literal["denied", "credentials", "unreachable", "lost", "answer", "lookup"]
REASONS: dict[PlaceKind, tuple[Reason, ...]] = {
    "static": (),
    "dns": ("lookup",),
    "kubernetes": ("denied", "credentials", "unreachable", "lost", "answer"),
}


@dataclass(frozen=True, slots=True)
class DnsName:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class KubernetesService:
    name: str
    namespace: str | None  # None: the one that this process runs in
    port: str  # as its EndpointSlices name it, or a number


def kind_of(text: str) -> PlaceKind:
    """Of an item that matches PATTERN."""
    return KINDS[text.partition("://")[0]]


def dns_name(text: str) -> DnsName:
    """Of dns://NAME:PORT."""
    host, _, port = text.removeprefix("dns://").rpartition(":")
    return DnsName(host, int(port))


def kubernetes_service(text: str) -> KubernetesService:
    """Of k8s://SERVICE[.NAMESPACE]:PORT."""
    service, _, port = text.removeprefix("k8s://").rpartition(":")
    name, _, namespace = service.partition(".")
    return KubernetesService(name, namespace or None, port)


class Listener(Protocol):
    """Who is told what a place has, on the event loop."""

    def found(self, addresses: Mapping[str, bool]) -> None:
        """All that is there now, by control address; True where it may be given work."""
        ...

    def failed(self, reason: Reason, message: str) -> None:
        """Nothing new could be learned; what was found before stands."""
        ...

    def listed(self) -> None:
        """The whole was asked for, not only what changed."""
        ...


class Source(Protocol):
    async def follow(self, listener: Listener) -> None:
        """Tell what is there now and whenever that changes, until cancelled."""
        ...


@dataclass(slots=True)
class Place:
    """One item of `--workers` as it stands."""

    name: str
    kind: PlaceKind
    num_ready: int = 0  # addresses there that may be given work
    error: str = ""  # why the last attempt to learn something failed; empty: it did not


def tcp_address(host: str, port: int) -> str:
    """The control address of an IPv4 or IPv6 host."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
