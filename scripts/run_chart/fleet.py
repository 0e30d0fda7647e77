"""The pods and services of a release, started, replaced and ended together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.run_chart.containers import Engine, Volumes
from scripts.run_chart.forwarding import Forwarder
from scripts.run_chart.kubelet import RunningPod
from scripts.run_chart.manifests import Pod, Release, Service


@dataclass(slots=True)
class Fleet:
    release: Release
    engine: Engine
    volumes: Volumes
    say: Callable[[str], None]
    running: list[RunningPod] = field(default_factory=list)
    forwarders: dict[str, Forwarder] = field(default_factory=dict)  # by service

    async def start(self) -> None:
        """Everything, until every pod is ready."""
        for service in self.release.services:
            if not service.is_headless:
                for port, target in service.ports.items():
                    await self._forward(service, port, target)
        pods = [self._place(pod) for pod in self.release.pods]
        await asyncio.gather(*(pod.start() for pod in pods))
        await self.wait_ready()

    async def wait_ready(self) -> None:
        await asyncio.gather(*(pod.wait_ready() for pod in self.running))

    async def _forward(self, service: Service, port: int, target: str | int) -> None:
        def endpoints() -> list[tuple[str, int]]:
            ready = [p for p in self.running if p.is_ready and service.selects(p.pod)]
            return [
                (p.address, p.pod.main.ports[target] if isinstance(target, str) else target)
                for p in ready
            ]

        forwarder = Forwarder(self.engine.gateway, port, endpoints)
        await forwarder.open()
        self.forwarders[service.name] = forwarder
        self.say(f"service {service.name}: {forwarder.url}")

    def _place(self, pod: Pod) -> RunningPod:
        # As cluster DNS has it: headless services' names, and a StatefulSet's pods' in theirs.
        headless = [s.name for s in self.release.services if s.is_headless and s.selects(pod)]
        own = [f"{pod.name}.{pod.subdomain}"] if pod.subdomain else []
        placed = RunningPod(pod, self.engine, self.volumes, [*headless, *own], self.say)
        self.running.append(placed)
        return placed

    async def before_replacing(self, pod: RunningPod) -> None:
        """A rolling update has a Deployment's new pod ready before the old one is deleted."""
        if pod.pod.subdomain is None:
            await self._start_another(pod)

    async def replace(self, pod: RunningPod, on_term: Callable[[], None]) -> int:
        """Delete the pod; a StatefulSet's new one follows under the same name. `on_term` is
        called when it gets SIGTERM. Returns the exit code."""
        code = await self._end(pod, on_term)
        if pod.pod.subdomain is not None:
            await self._start_another(pod)
        return code

    async def _start_another(self, pod: RunningPod) -> None:
        new = self._place(next(p for p in self.release.pods if p.name == pod.pod.name))
        await new.start()
        await new.wait_ready()

    async def _end(self, pod: RunningPod, on_term: Callable[[], None] = lambda: None) -> int:
        self.running.remove(pod)
        try:
            return await pod.end(on_term)
        finally:
            await pod.remove()

    async def end(self) -> dict[str, int]:
        """Delete everything; exit codes by pod."""
        pods = list(self.running)
        codes = await asyncio.gather(*(self._end(pod) for pod in pods))
        return dict(zip((pod.pod.name for pod in pods), codes, strict=True))

    async def close(self) -> None:
        """Leave nothing behind, whatever has happened."""
        for forwarder in self.forwarders.values():
            await forwarder.close()
        for pod in self.running:
            await pod.remove()
        with contextlib.suppress(Exception):
            await self.engine.close()
