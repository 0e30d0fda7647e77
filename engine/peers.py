"""Who dials a worker, by name and by connection, and who has fallen silent. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.messages import Register

# Peers speak once a second. One that has said nothing in three looks of two seconds is gone. Looks
# are counted, not time, so a worker that was itself held up loses nobody.
LOOK_S = 2.0
MAX_SILENT_LOOKS = 3


@dataclass(slots=True)
class Peer:
    name: str
    kind: str
    identity: str  # of its connection
    num_silent_looks: int = 0


class Peers:
    def __init__(self) -> None:
        self._by_identity: dict[str, Peer] = {}
        self._by_name: dict[str, Peer] = {}

    def register(self, identity: str, message: Register) -> Peer | None:
        """The peer that had this name over an earlier connection, which is over."""
        before = self._by_name.get(message.name)
        if before is not None and before.identity == identity:
            return None
        if before is not None:
            self.remove(before)
        peer = Peer(message.name, message.kind, identity)
        self._by_identity[identity] = self._by_name[message.name] = peer
        return before

    def heard(self, identity: str) -> Peer | None:
        """Who speaks; None for one that has not registered."""
        peer = self._by_identity.get(identity)
        if peer is not None:
            peer.num_silent_looks = 0
        return peer

    def named(self, name: str) -> Peer | None:
        return self._by_name.get(name)

    def of_kind(self, kind: str) -> list[Peer]:
        return [peer for peer in self._by_identity.values() if peer.kind == kind]

    def all(self) -> list[Peer]:
        return list(self._by_identity.values())

    def look(self) -> list[Peer]:
        """To be called every LOOK_S, after what has come was read: the peers that are gone."""
        gone = []
        for peer in self._by_identity.values():
            peer.num_silent_looks += 1
            if peer.num_silent_looks > MAX_SILENT_LOOKS:
                gone.append(peer)
        for peer in gone:
            self.remove(peer)
        return gone

    def remove(self, peer: Peer) -> None:
        self._by_identity.pop(peer.identity, None)
        if self._by_name.get(peer.name) is peer:
            del self._by_name[peer.name]


@dataclass(slots=True)
class _Upstream:
    instance_id: str | None = None
    num_silent_looks: int = 0


class Upstreams:
    """The prefill groups that a decode worker dials, by address."""

    def __init__(self) -> None:
        self._by_address: dict[str, _Upstream] = {}

    def asked(self, address: str) -> None:
        """Something was sent there: an answer, or a sign of life, is expected from now on."""
        upstream = self._by_address.setdefault(address, _Upstream())
        if upstream.num_silent_looks > MAX_SILENT_LOOKS:  # whoever is there now is given time
            upstream.num_silent_looks = 0

    def remove(self, address: str) -> None:
        self._by_address.pop(address, None)

    def heard(self, address: str, instance_id: str | None = None) -> bool:
        """Whether another process than before listens there now."""
        upstream = self._by_address.setdefault(address, _Upstream())
        upstream.num_silent_looks = 0
        if instance_id is None or instance_id == upstream.instance_id:
            return False
        is_new = upstream.instance_id is not None
        upstream.instance_id = instance_id
        return is_new

    def look(self) -> list[str]:
        """To be called every LOOK_S: the addresses that have fallen silent, each look again."""
        silent = []
        for address, upstream in self._by_address.items():
            upstream.num_silent_looks += 1
            if upstream.num_silent_looks > MAX_SILENT_LOOKS:
                silent.append(address)
        return silent
