"""EndpointSlices of the Kubernetes API (discovery.k8s.io/v1) as they come over the wire, and what
workers they name. Knows no connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from server.discovery.places import tcp_address


class Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None  # None: unknown, which the API says to take for true
    terminating: bool | None = None


class Endpoint(msgspec.Struct, frozen=True):
    addresses: list[str]
    conditions: Conditions | None = None

    @property
    def takes_work(self) -> bool:
        """A service that publishes addresses which are not ready calls those ready that end."""
        conditions = self.conditions or Conditions()
        return conditions.ready is not False and not conditions.terminating


class Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None  # None: TCP


class Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    next_page: str = msgspec.field(name="continue", default="")


class EndpointSlice(msgspec.Struct, frozen=True):
    metadata: Metadata
    address_type: str = msgspec.field(name="addressType", default="")  # IPv4, IPv6 or FQDN
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None

    def number_of(self, port: str) -> int | None:
        """Of the TCP port with this name; a number is itself."""
        if port.isdigit():
            return int(port)
        named = (p for p in self.ports or () if p.name == port and p.protocol in (None, "TCP"))
        return next((p.port for p in named), None)


class SliceList(msgspec.Struct, frozen=True):
    metadata: Metadata
    items: list[EndpointSlice] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    type: str  # ADDED, MODIFIED, DELETED, BOOKMARK or ERROR
    object: msgspec.Raw


class Bookmark(msgspec.Struct, frozen=True):
    metadata: Metadata


class Status(msgspec.Struct, frozen=True):
    """What the API answers instead, where something is wrong."""

    message: str = ""
    code: int = 0


def addresses_of(slices: Iterable[EndpointSlice], port: str) -> Mapping[str, bool]:
    """The control addresses behind these slices, and which of them may be given work. An endpoint
    that moves from slice to slice is in both for a while. In a service of both families each worker
    has an address of each: then those of IPv4 count."""
    listed = [part for part in slices if part.endpoints]
    families = {part.address_type for part in listed}
    family = next((family for family in ("IPv4", "IPv6") if family in families), "")
    found: dict[str, bool] = {}
    for part in listed:
        number = part.number_of(port)
        if number is None or part.address_type != family:
            continue
        for endpoint in part.endpoints or ():
            for host in endpoint.addresses[:1]:  # consumers are to use the first
                address = tcp_address(host, number)
                found[address] = found.get(address, False) or endpoint.takes_work
    return found


def port_names(slices: Iterable[EndpointSlice]) -> list[str]:
    """Of all ports that slices with endpoints have."""
    parts = [part for part in slices if part.endpoints]
    return sorted({port.name or str(port.port) for part in parts for port in part.ports or ()})
