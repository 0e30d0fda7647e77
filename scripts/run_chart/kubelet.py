"""A pod's life as the kubelet leads it: init containers, probes at the times and thresholds of the
manifest, restarts, and an end by preStop, SIGTERM and the grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import httpx

from scripts.run_chart.containers import Engine, EngineError, Volumes, run_flags, words
from scripts.run_chart.manifests import Container, ManifestError, Pod, Probe

RESTART_DELAY_S = 1.0


class RunningPod:
    """`start`, then `ready` says whether services send here, until `end`."""

    def __init__(
        self,
        pod: Pod,
        engine: Engine,
        volumes: Volumes,
        aliases: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self.address = engine.new_address()
        self.pod = pod.at(self.address)
        self.is_ready = False
        self.num_restarts = 0
        self.changed = asyncio.Event()  # set whenever is_ready changes
        self._engine = engine
        self._volumes = volumes
        self._aliases = aliases
        self._tell = say
        # The address as well: the one that takes a pod's place has the same name.
        self._name = f"{engine.network}-{pod.name}-{self.address.rpartition('.')[2]}"
        self._is_ending = False
        self._life: asyncio.Task[None] | None = None

    def _say(self, text: str) -> None:
        self._tell(f"{self.pod.name}: {text}")

    async def start(self) -> None:
        """Init containers to their ends, the main one, its probes. Raises ManifestError."""
        for container in self.pod.init:
            command = self._run_command(container, "--rm")
            self._say(f"init container {container.name}: {' '.join(words(container))}")
            try:
                await self._engine(*command)
            except EngineError as error:
                raise ManifestError(f"{self.pod.name}: {error}") from error
        main = self.pod.main
        self._say(f"{main.image} {' '.join(words(main))} at {self.address}")
        place = ("--detach", "--name", self._name, "--ip", self.address)
        await self._engine(*self._run_command(main, *place))
        self._life = asyncio.create_task(self._live())

    def _run_command(self, container: Container, *more: str) -> list[str]:
        flags = run_flags(self._engine, self.pod, container, self._aliases)
        volumes = self._volumes.flags(self.pod, container)
        return ["run", *more, *flags, *volumes, container.image, *words(container)]

    async def wait_ready(self) -> None:
        while not self.is_ready:
            self.changed.clear()
            await self.changed.wait()

    async def _live(self) -> None:
        """Probe while it runs; start it again where it ends or is found dead."""
        while True:
            probing = asyncio.create_task(self._probe_all())
            ending = asyncio.create_task(self._engine("wait", self._name))
            try:
                await asyncio.wait([probing, ending], return_when=asyncio.FIRST_COMPLETED)
                self._set_ready(False)
                if not ending.done():
                    self._say("liveness failed: killed")
                    await self._engine("kill", self._name)
                code = await ending
            finally:
                probing.cancel()
                ending.cancel()
            self.num_restarts += 1
            self._say(f"ended with exit code {code}; restart {self.num_restarts}")
            await asyncio.sleep(RESTART_DELAY_S)
            await self._engine("start", self._name)

    async def _probe_all(self) -> None:
        """Returns when the pod has to be restarted."""
        probes = self.pod.main.probes
        if startup := probes.get("startup"):
            num_asked = await self._until(startup, True)
            if num_asked is None:
                return
            self._say(f"startup probe {startup.path}: 200 at attempt {num_asked}")
        async with contextlib.AsyncExitStack() as stack:
            if readiness := probes.get("readiness"):
                task = asyncio.create_task(self._follow_readiness(readiness))
                stack.callback(task.cancel)
            else:
                self._set_ready(True)
            if liveness := probes.get("liveness"):
                await self._until(liveness, False)
            else:
                await asyncio.Event().wait()

    async def _until(self, probe: Probe, wanted: bool) -> int | None:
        """The number of the first probe that succeeds, where that is wanted; None at so many
        failures in a row as count."""
        num_asked = num_failed = 0
        while num_failed < probe.failures:
            num_asked += 1
            succeeded = await self._ask(probe)
            if succeeded and wanted:
                return num_asked
            num_failed = 0 if succeeded else num_failed + 1
            await asyncio.sleep(probe.period_s)
        return None

    async def _follow_readiness(self, probe: Probe) -> None:
        num_failed = 0
        while True:
            succeeded = await self._ask(probe)
            num_failed = 0 if succeeded else num_failed + 1
            if succeeded or num_failed >= probe.failures:
                self._set_ready(succeeded)
            await asyncio.sleep(probe.period_s)

    async def _ask(self, probe: Probe) -> bool:
        url = f"http://{self.address}:{probe.port}{probe.path}"
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=probe.timeout_s) as client:
                return 200 <= (await client.get(url)).status_code < 400
        except httpx.HTTPError:
            return False

    def _set_ready(self, is_ready: bool) -> None:
        is_ready = is_ready and not self._is_ending
        if is_ready != self.is_ready:
            self._say("ready" if is_ready else "not ready")
        self.is_ready = is_ready
        self.changed.set()

    async def end(self, on_term: Callable[[], None]) -> int:
        """The pod is deleted: out of its services at once, preStop, SIGTERM, and SIGKILL where it
        outstays its grace period. Returns the exit code."""
        self._is_ending = True
        if self._life is not None:
            self._life.cancel()
        self._set_ready(False)
        self._say(f"deleted, grace period {self.pod.grace_s:g} s")
        ending = asyncio.create_task(self._engine("wait", self._name))
        try:
            await asyncio.wait_for(self._ask_to_end(ending, on_term), self.pod.grace_s)
        except asyncio.TimeoutError:
            self._say("outstayed its grace period: SIGKILL")
            with contextlib.suppress(EngineError):
                await self._engine("kill", self._name)
        code = int(await ending)
        self._say(f"ended with exit code {code}")
        return code

    async def _ask_to_end(self, ending: asyncio.Task[str], on_term: Callable[[], None]) -> None:
        if hook := self.pod.main.pre_stop:
            self._say(f"preStop: {' '.join(hook)}")
            await self._engine("exec", self._name, *hook)
        self._say("SIGTERM")
        on_term()
        await self._engine("kill", "--signal", "TERM", self._name)
        await asyncio.shield(ending)

    async def logs(self) -> str:
        process = await asyncio.create_subprocess_exec(
            self._engine.command,
            "logs",
            self._name,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        return out.decode(errors="replace")

    async def remove(self) -> None:
        if self._life is not None:
            self._life.cancel()
        with contextlib.suppress(EngineError):
            await self._engine("rm", "--force", "--volumes", self._name)
