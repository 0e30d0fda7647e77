"""A front end that follows a fake API, and workers for it to find."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from server.discovery.discovery import Discovery
from server.discovery.kubernetes import KubernetesSource
from server.discovery.kubernetes_api import KubernetesApi
from server.discovery.places import Source, kubernetes_service
from tests.server.discovery.fake_api import NAMESPACE, PORT_NAME, SERVICE, FakeApi, endpoint
from tests.server.scripted import Script, Server, serving
from tests.server.worker import ScriptedWorker

ITEM = f"k8s://{SERVICE}:{PORT_NAME}"


class Cluster:
    """The API, its front end, and the pods."""

    def __init__(self, api: FakeApi, server: Server, credentials: Path) -> None:
        self.api = api
        self.server = server
        self.credentials = credentials

    def start_pod(self, script: Script, host: str = "127.0.0.1", **options: Any) -> ScriptedWorker:
        """A worker that no front end has been told of."""
        address = f"tcp://{host}:*"
        worker = ScriptedWorker(address, script, self.server.tokenizer.vocab_size, **options)
        self.server.workers.append(worker)
        return worker

    def publish(self, name: str, worker: ScriptedWorker, **conditions: Any) -> None:
        """Each pod in a slice of its own: a slice's endpoints share their port."""
        host, port = place_of(worker)
        self.api.put(name, port, [endpoint(host, **conditions)])

    def until_known(self, *workers: ScriptedWorker) -> None:
        """The front end has these and no others."""
        fleet = self.server.client.fleet
        self.server.until(
            lambda: len(fleet) == len(workers) and all(map(self.server.knows, workers))
        )

    def until_watched(self) -> None:
        """Workers may be known from the list; what is said before a watch reaches nobody."""
        self.server.until(lambda: self.api.num_watches == 1)

    @property
    def trouble(self) -> str:
        """Why the service cannot be followed; empty where it can."""
        return self.server.client.roster.places[0].error

    def shown_error(self) -> str:
        """The same as /status says it."""
        [place] = self.server.http.get("/status").json()["places"]
        return str(place["error"])

    def counted(self, name: str, labels: str = "") -> float:
        """A sample of the front end's metrics."""
        page = self.server.http.get("/metrics").text
        [line] = [line for line in page.splitlines() if line.startswith(f"{name}{labels} ")]
        return float(line.rpartition(" ")[2])


def place_of(worker: ScriptedWorker) -> tuple[str, int]:
    host, _, port = worker.address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def credentials_in(folder: Path, token: str = "first") -> Path:
    (folder / "namespace").write_text(NAMESPACE)
    (folder / "token").write_text(token + "\n")
    return folder


@contextlib.contextmanager
def discovering(
    server: Server, items: list[str], sources: Mapping[str, Source]
) -> Iterator[Discovery]:
    discovery = Discovery(server.client.roster, items, sources)
    server.call(discovery.start)
    try:
        yield discovery
    finally:
        asyncio.run_coroutine_threadsafe(discovery.close(), server.loop).result(60)


@contextlib.contextmanager
def following(folder: Path) -> Iterator[Cluster]:
    """A cluster without pods."""
    with serving() as server, contextlib.closing(FakeApi()) as api:
        cluster = Cluster(api, server, credentials_in(folder))
        kubernetes = KubernetesApi(api.url, cluster.credentials)
        source = KubernetesSource(kubernetes, kubernetes_service(ITEM), ITEM, first_delay_s=0.01)
        with discovering(server, [ITEM], {ITEM: source}):
            yield cluster
