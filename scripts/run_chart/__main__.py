"""Runs plait's chart without a cluster: `python -m scripts.run_chart`, by root, with docker.

Renders the chart and starts what it says as containers, with the kubelet's and kube-proxy's parts
played here: probes, restarts, services, deletion. Then streams run while each kind of pod is
replaced, and have to come out as if nothing had happened. Exit code 0: they did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from scripts.run_chart.containers import Engine, EngineError, Volumes
from scripts.run_chart.fleet import Fleet
from scripts.run_chart.manifests import ManifestError, Release, parse, render

ROOT = Path(__file__).parents[2]
TOPICS = ("a river", "a lighthouse", "two foxes", "a clockmaker")
FIRST_TOKENS = 3  # a stream has begun


class Transcript:
    """What happens, with the seconds since the start."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"{time.monotonic() - self._started_s:7.1f} s  {text}", flush=True)


class StreamError(Exception):
    """The stream ended with an error of the server's."""


class Stream:
    """One streamed chat completion; `text` grows, `has_begun` is set early in it."""

    def __init__(self, url: str, headers: dict[str, str], body: dict[str, object]) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.has_begun = asyncio.Event()
        self._request = (url, headers, body)
        self._num_chunks = 0

    async def run(self) -> None:
        url, headers, body = self._request
        try:
            async with (
                httpx.AsyncClient(trust_env=False, timeout=300, headers=headers) as client,
                client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
            ):
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    self._take(line.removeprefix("data: "))
        finally:
            self.has_begun.set()

    def _take(self, data: str) -> None:
        if not data.startswith("{"):
            return
        event = json.loads(data)
        if "error" in event:
            raise StreamError(event["error"]["message"])
        choice = event["choices"][0]
        self.text += choice["delta"].get("content") or ""
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        self._num_chunks += 1
        if self._num_chunks >= FIRST_TOKENS:
            self.has_begun.set()


class Check:
    """The scenario on a fleet that runs; `faults` says what went wrong."""

    def __init__(self, fleet: Fleet, say: Transcript, num_tokens: int) -> None:
        self.faults: list[str] = []
        self._fleet = fleet
        self._say = say
        self._num_tokens = num_tokens
        self._url = next(iter(fleet.forwarders.values())).url
        arguments = [arg.partition("=") for pod in fleet.release.pods for arg in pod.main.args]
        self._model = next(v for name, _, v in arguments if name == "--served-model-name")
        keys = [data["api-keys"] for data in fleet.release.secrets.values() if "api-keys" in data]
        self._headers = {"Authorization": f"Bearer {keys[0].decode().split()[0]}"} if keys else {}

    def _streams(self) -> list[Stream]:
        common = {
            "model": self._model,
            "stream": True,
            "temperature": 0,
            "max_tokens": self._num_tokens,
        }
        bodies = [
            {**common, "messages": [{"role": "user", "content": f"Tell me a story about {topic}."}]}
            for topic in TOPICS
        ]
        return [Stream(self._url, self._headers, body) for body in bodies]

    async def run(self) -> None:
        undisturbed = self._streams()
        await asyncio.gather(*(stream.run() for stream in undisturbed))
        for stream, topic in zip(undisturbed, TOPICS, strict=True):
            self._say(f"about {topic}: {stream.text[:70]!r}… ({stream.finish_reason})")
        for workload in dict.fromkeys(pod.workload for pod in self._fleet.release.pods):
            await self._replace(workload, undisturbed)
        for name, code in (await self._fleet.end()).items():
            if code != 0:
                self.faults.append(f"{name}: exit code {code} at the end")

    async def _replace(self, workload: str, undisturbed: list[Stream]) -> None:
        pod = next(p for p in self._fleet.running if p.pod.workload == workload)
        self._say(f"--- {pod.pod.name} is replaced under {len(TOPICS)} streams")
        await self._fleet.before_replacing(pod)
        # A front end takes a moment to see a new worker, and is not ready before.
        await self._fleet.wait_ready()
        streams = self._streams()
        tasks = [asyncio.create_task(stream.run()) for stream in streams]
        await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
        num_running: list[int] = []
        code = await self._fleet.replace(
            pod, lambda: num_running.append(sum(not task.done() for task in tasks))
        )
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if code != 0:
            self.faults.append(f"{pod.pod.name}: exit code {code}")
        if not any(num_running):
            self.faults.append(f"{workload}: no stream was left at SIGTERM; expected more --tokens")
        self._compare(workload, streams, undisturbed, results)
        num_whole = sum(s.text == e.text for s, e in zip(streams, undisturbed, strict=True))
        self._say(
            f"--- {sum(num_running)} streams ran at SIGTERM; {num_whole} of {len(TOPICS)} came out"
            " the same"
        )

    def _compare(
        self,
        workload: str,
        streams: list[Stream],
        undisturbed: list[Stream],
        results: list[BaseException | None],
    ) -> None:
        for stream, expected, topic, result in zip(
            streams, undisturbed, TOPICS, results, strict=True
        ):
            if result is not None:
                self.faults.append(f"{workload}: the stream about {topic} broke: {result!r}")
            elif (stream.text, stream.finish_reason) != (expected.text, expected.finish_reason):
                self.faults.append(f"{workload}: the stream about {topic} came out otherwise")
        restarts = {p.pod.name: p.num_restarts for p in self._fleet.running if p.num_restarts}
        if restarts:
            self.faults.append(f"{workload}: containers ended by themselves: {restarts}")


async def run(options: argparse.Namespace, release: Release, root: Path) -> int:
    say = Transcript()
    for pod in release.pods:
        say(f"pod {pod.name}: {pod.main.image}, {' '.join(pod.main.args)}")
    say(f"not run: {', '.join(release.kinds_left_out)}")
    claims = dict(claim.split("=", 1) for claim in options.claim)
    volumes = Volumes(root, release, {name: Path(path) for name, path in claims.items()})
    engine = Engine(options.engine, options.release, options.subnet)
    fleet = Fleet(release, engine, volumes, say)
    await engine.open()
    try:
        await fleet.start()
        check = Check(fleet, say, options.tokens)
        await check.run()
    except BaseException:
        for running in fleet.running:
            print(f"--- log of {running.pod.name}\n{await running.logs()}", file=sys.stderr)
        raise
    finally:
        await fleet.close()
    for fault in check.faults:
        say(f"FAULT {fault}")
    say("no stream was broken" if not check.faults else f"{len(check.faults)} faults")
    return 1 if check.faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.run_chart", description=__doc__)
    parser.add_argument(
        "--values", default=str(ROOT / "helm/examples/cpu-demo.yaml"), metavar="FILE"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--release", default="demo", help="also the network's name")
    parser.add_argument("--helm", metavar="COMMAND", help="default: what scripts/helm.sh finds")
    parser.add_argument("--engine", default="docker", help="the command")
    parser.add_argument("--discovery", default="dns", choices=("dns", "static"))
    parser.add_argument("--subnet", default="10.213.77.0/24", help="of the containers' network")
    parser.add_argument(
        "--claim", action="append", default=[], metavar="NAME=DIR", help="a volume claim's folder"
    )
    parser.add_argument("--tokens", type=int, default=120, help="of each stream")
    options = parser.parse_args()
    # There is no API server to ask for EndpointSlices, but the network's DNS knows the pods.
    flags = ["--values", options.values, "--set", f"discovery={options.discovery}"]
    for pair in options.set:
        flags += ["--set", pair]
    root = Path(tempfile.mkdtemp(prefix="run-chart-"))
    try:
        helm = (
            options.helm or subprocess.check_output([ROOT / "scripts/helm.sh"], text=True).strip()
        )
        release = parse(render(helm, options.release, str(ROOT / "helm"), flags))
        return asyncio.run(run(options, release, root))
    except (ManifestError, EngineError) as error:
        print(f"run_chart: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
