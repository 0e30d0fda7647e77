"""One run: prepare prompts, warm up, send the load, report."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.bench import client, workload
from server.bench.client import RequestResult
from server.bench.options import BenchOptions
from server.bench.summary import Summary, latency_table, summarise, to_json, totals_table
from server.bench.workload import Job

CONNECT_TIMEOUT_S = 10.0


class BenchError(Exception):
    """The run could not start; the message says what the server answered."""


def main(options: BenchOptions) -> int:
    """Run and report. Exit code 0, or 1 where the run could not start or a request failed."""
    console = Console()
    try:
        model, results = asyncio.run(run(options))
    except BenchError as error:
        print(f"plait bench: {error}", file=sys.stderr)
        return 1
    summary = summarise(results)
    console.print(latency_table(summary), totals_table(summary), sep="\n")
    try:
        _write_files(options, model, summary, results)
    except (OSError, ValueError) as error:
        print(f"plait bench: {error}", file=sys.stderr)
        return 1
    return 1 if summary.num_failed else 0


async def run(options: BenchOptions) -> tuple[str, list[RequestResult]]:
    """(the model's name, one result a measured request in sending order).

    Raises BenchError where the server cannot be reached or names no model.
    """
    async with connect(options) as http:
        try:
            model = options.model or await first_model(http)
            text = workload.corpus()
            cutter = workload.TextCutter(http, model, text)
            jobs = await workload.make_jobs(options, cutter, text)
        except httpx.HTTPError as error:
            raise BenchError(
                f"--base-url {options.base_url}: {type(error).__name__} {error}; expected an"
                " OpenAI-compatible server there"
            ) from error
        if not cutter.is_exact:
            print("plait bench: no /tokenize there; prompt lengths are estimates", file=sys.stderr)
        return model, await measure(options, http, model, jobs)


def connect(options: BenchOptions) -> httpx.AsyncClient:
    """An HTTP client for the server's root, with as many connections as the load needs."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    return httpx.AsyncClient(
        base_url=options.base_url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=httpx.Timeout(options.timeout_s, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def first_model(http: httpx.AsyncClient) -> str:
    answer = await http.get("/v1/models")
    if answer.status_code != 200:
        raise BenchError(f"GET /v1/models: HTTP {answer.status_code} {answer.text[:200]}")
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"GET /v1/models: no model in {answer.text[:200]}") from error


async def measure(
    options: BenchOptions, http: httpx.AsyncClient, model: str, jobs: Sequence[Job]
) -> list[RequestResult]:
    """Send the warm-up jobs one by one, then the load; results in the jobs' order."""
    path = "/v1/chat/completions" if options.endpoint == "chat" else "/v1/completions"
    for job in jobs[: options.num_warmup]:
        await client.send(http, path, client.body_of(job, options, model), time.perf_counter())
    measured = jobs[options.num_warmup :]
    bodies = [client.body_of(job, options, model) for job in measured]
    with _progress() as progress:
        task = progress.add_task("requests", total=len(measured), rate="")
        started_s = time.perf_counter()
        num_chunks = 0

        def on_chunk() -> None:
            nonlocal num_chunks
            num_chunks += 1
            rate = num_chunks / (time.perf_counter() - started_s)
            progress.update(task, rate=f"{rate:.1f} tokens/s")

        async def send(index: int) -> RequestResult:
            result = await client.send(http, path, bodies[index], started_s, on_chunk)
            progress.advance(task)
            return result

        arrivals_s = [job.arrival_s for job in measured]
        return await _paced(send, arrivals_s, started_s, options.concurrency)


async def _paced(
    send: Callable[[int], Any],
    arrivals_s: Sequence[float],
    started_s: float,
    concurrency: int | None,
) -> list[RequestResult]:
    """Start request i at arrivals_s[i], or later where `concurrency` are in flight already."""
    free = asyncio.Semaphore(concurrency or len(arrivals_s))

    async def send_and_free(index: int) -> RequestResult:
        try:
            result: RequestResult = await send(index)
            return result
        finally:
            free.release()

    tasks = []
    for index, arrival_s in enumerate(arrivals_s):
        if (wait_s := started_s + arrival_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        await free.acquire()
        tasks.append(asyncio.create_task(send_and_free(index)))
    return list(await asyncio.gather(*tasks))


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def _write_files(
    options: BenchOptions, model: str, summary: Summary, results: Sequence[RequestResult]
) -> None:
    run_options = dataclasses.asdict(options) | {"model": model, "api_key": None}
    if options.json_path is not None:
        content = to_json(summary, results, run_options)
        options.json_path.parent.mkdir(parents=True, exist_ok=True)
        options.json_path.write_text(json.dumps(content, indent=1, default=str) + "\n")
        print(f"wrote {options.json_path}")
    if options.plot_path is not None:
        from server.bench import plot

        load = f"concurrency {options.concurrency}"
        if options.request_rate:
            load = f"{options.request_rate:g} requests/s"
        title = f"{model}: {load}, {summary.output_tokens_per_s:.1f} output tokens/s"
        options.plot_path.parent.mkdir(parents=True, exist_ok=True)
        plot.draw(results, title, options.plot_path)
        print(f"wrote {options.plot_path}")
