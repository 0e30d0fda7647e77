"""Workers by a DNS name: every address that it has, looked up again every few seconds.

A name that cannot be looked up, or has no address, says nothing about workers that are known: those
that are gone show it by their connections.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from server.discovery.places import DnsName, Listener, tcp_address

Resolve = Callable[[str, int], Awaitable[set[str]]]


class DnsSource:
    def __init__(self, name: DnsName, interval_s: float, *, resolve: Resolve | None = None) -> None:
        self._name = name
        self._interval_s = interval_s
        self._resolve = resolve or look_up

    async def follow(self, listener: Listener) -> None:
        host, port = self._name.host, self._name.port
        while True:
            try:
                hosts = await self._resolve(host, port)
            except (OSError, UnicodeError) as error:
                listener.failed("lookup", f"{host} cannot be looked up: {error}")
            else:
                listener.found({tcp_address(each, port): True for each in sorted(hosts)})
            await asyncio.sleep(self._interval_s)


async def look_up(host: str, port: int) -> set[str]:
    """The name's IPv4 addresses; only where it has none those of IPv6, since both may lead to one
    worker. Raises OSError where there is none."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family in (socket.AF_INET, socket.AF_INET6):
        hosts = {str(address[0]) for kind, _, _, _, address in found if kind == family}
        if hosts:
            return hosts
    raise OSError("it has no IP address")
