"""`plait serve` and `plait frontend` from start to end: model, socket, workers, HTTP, drain.

Owns the processes' lifetimes and their signals. Knows no route and no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from engine.cluster_key import ClusterKey, ClusterKeyError
from engine.config import WorkerConfig
from engine.model.fingerprint import fingerprint
from engine.private_folder import PrivateFolder
from engine.process import set_title, unwind_when_asked
from engine.tracing import open_tracer
from kvcache.host_size import read_host_memory
from server import logs, model_source
from server.app import create_app
from server.discovery.discovery import Discovery, sources_of
from server.discovery.places import Source
from server.dispatch.client import EngineClient
from server.generation import Limits
from server.http_server import HttpServer, listen, url_of
from server.options.config import ConfigError, ServeConfig
from server.options.loading import api_keys
from server.supervisor import Supervisor, WorkerFailedError
from server.tokenizer import Tokenizer, TokenizerError
from server.topology import count_gpus, plan_topology, worker_configs

log = logging.getLogger(__name__)

MAX_IPC_PATH_BYTES = 100  # the kernel's limit for a unix socket's path is 107


def serve(config: ServeConfig, *, starts_workers: bool = True) -> int:
    """Serve until SIGTERM or SIGINT, with workers of its own or with those at --workers. Exit code
    0, or 1 where it could not start or went down. Raises ConfigError."""
    logs.configure(config.log_level)
    set_title("plait frontend")
    topology = plan_topology(config, count_gpus()) if starts_workers else None
    sources = {} if starts_workers else sources_of(config)
    key = read_key(config)
    unwind_when_asked()  # the process that fetches the model ends as well
    console = Console(stderr=True, highlight=False)
    try:
        listener = listen(config.host, config.port)
        folder = model_source.resolve(config.model)
        version = importlib.metadata.version("plait")
        console.print(f"plait {version}: {config.model_name} from {folder}", soft_wrap=True)
        console.print(str(topology or f"workers at {', '.join(config.workers)}"), soft_wrap=True)
        tokenizer = Tokenizer.from_folder(folder)
        expected = fingerprint_of(folder)
        with contextlib.closing(listener), socket_folder() as private:
            told = []
            if topology:
                available = read_host_memory().available
                told = worker_configs(config, topology, folder, private.path, available)
            launch = _Launch(config, key, told, sources, tokenizer, expected, listener, private)
            return asyncio.run(launch.run())
    except (model_source.ModelSourceError, TokenizerError, WorkerFailedError, OSError) as error:
        print(f"plait {'serve' if starts_workers else 'frontend'}: {error}", file=sys.stderr)
        return 1


def read_key(config: ServeConfig) -> ClusterKey | None:
    """Raises ConfigError."""
    if config.cluster_key_file is None:
        return None
    try:
        return ClusterKey.read(config.cluster_key_file.expanduser())
    except ClusterKeyError as error:
        raise ConfigError(str(error)) from error


def fingerprint_of(folder: Path) -> str:
    """What workers have to hold; empty where the folder has no weights, as it need not here."""
    try:
        return fingerprint(folder)
    except (OSError, ValueError) as error:
        log.warning("workers are not compared with --model: %s", error)
        return ""


def curl_line(config: ServeConfig, url: str) -> str:
    """A command that a newcomer can paste."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    # Greedy: a small model's first answer should be its best.
    body = json.dumps({"model": config.model_name, "messages": question, "temperature": 0})
    parts = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if api_keys(config):
        parts += ["-H", "Authorization: Bearer YOUR_KEY"]
    return shlex.join([*parts, "-d", body])


class _Launch:
    """One run of the front end: built before the event loop, run once on it."""

    def __init__(
        self,
        config: ServeConfig,
        key: ClusterKey | None,
        workers: list[WorkerConfig],
        sources: dict[str, Source],
        tokenizer: Tokenizer,
        fingerprint: str,
        listener: socket.socket,
        private: PrivateFolder,
    ) -> None:
        self._config = config
        self._key = key
        self._workers = workers
        self._sources = sources
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._listener = listener
        self._private = private
        self._started_s = time.monotonic()

    async def run(self) -> int:
        config = self._config
        tracer = open_tracer(
            config.traces_url,
            service="plait-frontend",
            instance=f"{socket.gethostname()}:{os.getpid()}",
            common={"gen_ai.request.model": config.model_name},
        )
        client = EngineClient(
            self._tokenizer.token_bytes,
            Limits(
                max_replays=config.max_replays,
                max_queued_requests=config.max_queued_requests,
                max_queued_tokens=config.max_queued_tokens,
            ),
            policy=config.router_policy,
            fingerprint=self._fingerprint,
            key=self._key,
            tracer=tracer,
        )
        supervisors = [Supervisor(told, client.fleet.num_heard) for told in self._workers]
        http = HttpServer(
            create_app(config, client, self._tokenizer), access_log=config.log_level == "debug"
        )
        stop = asyncio.Event()
        _on_signals(stop.set, lambda: self._end_at_once(supervisors))
        client.start()
        items = [told.listen_address for told in self._workers] or config.workers
        discovery = Discovery(client.roster, items, self._sources)
        discovery.start()
        watches = [asyncio.create_task(supervisor.run()) for supervisor in supervisors]
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        stopping = asyncio.create_task(stop.wait())
        announcement = asyncio.create_task(self._announce(client, supervisors))
        try:
            await asyncio.wait([*watches, serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await self._drain(client, http)
        finally:
            announcement.cancel()
            await discovery.close()
            client.start_draining()
            client.requests.fail_all("the server is shutting down")
            http.should_exit = True
            ends = [supervisor.stop() for supervisor in supervisors]
            await asyncio.gather(*ends, *watches, serving, return_exceptions=True)
            stopping.cancel()
            await client.close()
            await asyncio.to_thread(tracer.close)
            self._tokenizer.close()
        for task in (*watches, serving):
            task.result()
        return 0 if stop.is_set() else 1

    async def _announce(self, client: EngineClient, supervisors: list[Supervisor]) -> None:
        for supervisor in supervisors:
            await supervisor.ready.wait()
        await client.can_serve()
        url = url_of(self._listener)
        print(f"\nready after {time.monotonic() - self._started_s:.1f} s: {url}\n")
        print(f"{curl_line(self._config, url)}\n")
        if self._config.playground:
            print(f"or in a browser: {url}/\n")
        sys.stdout.flush()

    async def _drain(self, client: EngineClient, http: HttpServer) -> None:
        """Have load balancers send requests elsewhere, then refuse what still comes and let what
        runs finish, for a bounded time."""
        delay_s, limit_s = self._config.drain_delay_s, self._config.drain_timeout_s
        client.start_leaving()
        if delay_s:
            log.info("leaving: requests are taken for another %g s", delay_s)
            await asyncio.sleep(delay_s)
        client.start_draining()
        http.close_idle()
        if len(client.requests):
            log.info("draining %d requests, %g s at most", len(client.requests), limit_s)
            try:
                await asyncio.wait_for(client.requests.all_ended(), limit_s)
            except asyncio.TimeoutError:
                log.warning("%d requests are cut off", len(client.requests))

    def _end_at_once(self, supervisors: list[Supervisor]) -> None:
        for supervisor in supervisors:
            supervisor.kill()
        self._private.remove()
        os._exit(128 + signal.SIGINT)


def _on_signals(stop: Callable[[], None], end_at_once: Callable[[], None]) -> None:
    """SIGTERM and the first SIGINT stop; a further SIGINT ends at once."""
    loop = asyncio.get_running_loop()
    num_interrupts = 0

    def interrupt() -> None:
        nonlocal num_interrupts
        num_interrupts += 1
        if num_interrupts > 1:
            end_at_once()
        stop()

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, interrupt)


@contextlib.contextmanager
def socket_folder() -> Iterator[PrivateFolder]:
    """A folder that only this user can enter; gone at the end."""
    most = MAX_IPC_PATH_BYTES - len("/plait-xxxxxxxx/workers")
    folder = PrivateFolder(tempfile.gettempdir(), max_base_bytes=most)
    try:
        yield folder
    finally:
        folder.remove()
