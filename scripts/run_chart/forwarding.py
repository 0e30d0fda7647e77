"""A service's address: connections to it go to its ready pods in turn, as kube-proxy has them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable


class Forwarder:
    """Listens at `address` until closed; `endpoints` are looked up for each connection."""

    def __init__(self, address: str, port: int, endpoints: Callable[[], list[tuple[str, int]]]):
        self._address, self._port = address, port
        self._endpoints = endpoints
        self._turns = itertools.count()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://{self._address}:{self._port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, self._address, self._port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            endpoints = self._endpoints()
            if not endpoints:
                return
            host, port = endpoints[next(self._turns) % len(endpoints)]
            to_pod = await asyncio.open_connection(host, port)
            with contextlib.closing(to_pod[1]):
                await asyncio.gather(_copy(reader, to_pod[1]), _copy(to_pod[0], writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
