"""Workers by a Kubernetes service: its EndpointSlices, listed once and then watched.

Follows the API's contract for watches: go on from the last resourceVersion, list again where the
API has forgotten it. While the API cannot be asked, what was found before stands.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import TypeVar

import httpx
import msgspec

from server.discovery.endpoint_slices import (
    Bookmark,
    EndpointSlice,
    SliceList,
    Status,
    WatchEvent,
    addresses_of,
    port_names,
)
from server.discovery.kubernetes_api import ANSWER_S, CONNECT_S, CredentialsError, KubernetesApi
from server.discovery.places import KubernetesService, Listener, Reason

# The API ends a watch after this long; one whose connection died unnoticed is given up soon after.
WATCH_S = 60
MAX_LINE_BYTES = 16 * 2**20  # of one slice: it has 1000 endpoints at most
PAGE_ITEMS = 500
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 30.0
LONG_WATCH_S = 5.0  # one that lasts so long was no failure

T = TypeVar("T", bound=msgspec.Struct)


class ApiError(Exception):
    """The API did not do what was asked. `code` is the HTTP status, 0 where there was none."""

    def __init__(self, reason: Reason, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.code = code

    @property
    def is_gone(self) -> bool:
        """The API does not remember the resourceVersion any more: list again."""
        return self.code == httpx.codes.GONE


class KubernetesSource:
    """Raises ConfigError where the service names no namespace and this is no pod."""

    def __init__(
        self,
        api: KubernetesApi,
        service: KubernetesService,
        place: str,
        *,
        first_delay_s: float = FIRST_DELAY_S,
        watch_s: int = WATCH_S,
    ) -> None:
        self._api = api
        self._namespace = service.namespace or api.namespace(place)
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        self._selector = f"kubernetes.io/service-name={service.name}"
        self._port = service.port
        self._watch_s = watch_s
        self._first_delay_s = self._delay_s = first_delay_s
        self._slices: dict[str, EndpointSlice] = {}  # by name
        self._version: str | None = None  # to watch from; None: list first

    async def follow(self, listener: Listener) -> None:
        while True:
            began_s = time.monotonic()
            try:
                async with self._api.connect() as http:
                    if self._version is None:
                        await self._list(http, listener)
                    await self._watch(http, listener)
            except ApiError as error:
                if error.is_gone or error.reason == "denied":  # lists may be allowed all the same
                    self._version = None
                if not error.is_gone:
                    listener.failed(error.reason, str(error))
            except CredentialsError as error:
                listener.failed("credentials", str(error))
            except (httpx.HTTPError, OSError) as error:
                why = str(error) or type(error).__name__
                listener.failed("unreachable", f"{self._api.url}: {why}")
            if time.monotonic() - began_s >= LONG_WATCH_S:
                self._delay_s = self._first_delay_s
            await asyncio.sleep(self._delay_s * random.uniform(0.5, 1.0))
            self._delay_s = min(2 * self._delay_s, MAX_DELAY_S)

    async def _list(self, http: httpx.AsyncClient, listener: Listener) -> None:
        listener.listed()
        slices: list[EndpointSlice] = []
        parameters = {"labelSelector": self._selector, "limit": str(PAGE_ITEMS)}
        while True:
            response = await http.get(self._path, params=parameters)
            if response.status_code != httpx.codes.OK:
                raise self._refused(response.status_code, response.content, "list")
            page = _decode(response.content, SliceList)
            slices += page.items or []
            if not page.metadata.next_page:
                break
            parameters["continue"] = page.metadata.next_page
        self._slices = {part.metadata.name: part for part in slices}
        self._version = page.metadata.resource_version
        self._tell(listener)

    async def _watch(self, http: httpx.AsyncClient, listener: Listener) -> None:
        """Until the API ends the watch, as it does now and then."""
        parameters = {
            "labelSelector": self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version or "",
            "timeoutSeconds": str(self._watch_s),
        }
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S, read=self._watch_s + ANSWER_S)
        request = http.stream("GET", self._path, params=parameters, timeout=timeout)
        async with request as response:
            if response.status_code != httpx.codes.OK:
                raise self._refused(response.status_code, await response.aread(), "watch")
            self._tell(listener)  # what stands is known to be true again
            try:
                async for line in _lines(response):
                    self._take(_decode(line, WatchEvent), listener)
                    self._delay_s = self._first_delay_s
            except httpx.HTTPError as error:
                why = str(error) or type(error).__name__
                raise ApiError("lost", f"{self._api.url}: the watch was cut off: {why}") from error

    def _take(self, event: WatchEvent, listener: Listener) -> None:
        if event.type == "ERROR":
            status = _decode(event.object, Status)
            raise self._error(status.code, status, "watch")
        if event.type == "BOOKMARK":
            self._version = _decode(event.object, Bookmark).metadata.resource_version
            return
        part = _decode(event.object, EndpointSlice)
        self._version = part.metadata.resource_version
        if event.type == "DELETED":
            self._slices.pop(part.metadata.name, None)
        else:
            self._slices[part.metadata.name] = part
        self._tell(listener)

    def _tell(self, listener: Listener) -> None:
        slices = self._slices.values()
        found = addresses_of(slices, self._port)
        names = port_names(slices)
        listener.found(found)
        if names and not found:
            known = ", ".join(names)
            message = f"the service has no TCP port named {self._port}; it has {known}"
            listener.failed("answer", message)

    def _refused(self, code: int, body: bytes, verb: str) -> ApiError:
        try:
            status = _decode(body, Status)
        except ApiError:
            status = Status(message=body[:200].decode(errors="replace"))
        return self._error(code, status, verb)

    def _error(self, code: int, status: Status, verb: str) -> ApiError:
        said = f"{self._api.url} answers {code} to {verb} endpointslices: {status.message}"
        if code == httpx.codes.FORBIDDEN:
            rule = '{apiGroups: ["discovery.k8s.io"], resources: ["endpointslices"], '
            rule += 'verbs: ["list", "watch"]}'
            said += f"; this pod's service account needs a Role with the rule {rule}"
            return ApiError("denied", f"{said} in namespace {self._namespace}", code)
        if code == httpx.codes.UNAUTHORIZED:
            return ApiError("denied", f"{said}; the token is not accepted", code)
        return ApiError("answer", said, code)


def _decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError("answer", f"the API sent what is no {kind.__name__}: {error}") from error


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The whole lines of a body as they come; a last one that is cut off is dropped."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > MAX_LINE_BYTES:
            raise ApiError("answer", f"the API sent a line of more than {MAX_LINE_BYTES} bytes")
