"""A real front end on a loopback port, and workers that answer what a test tells them to.

The workers are threads, but everything between is real: uvicorn, ZeroMQ, the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.messages import Submit
from engine.tracing import NO_TRACER, Tracer
from engine.types import TokenLogprob, TokenOut
from server.app import create_app
from server.dispatch.client import EngineClient
from server.generation import Limits
from server.http_server import HttpServer
from server.options.config import ServeConfig
from server.tokenizer import Tokenizer
from tests.server.worker import Script, ScriptedWorker

MODEL_NAME = "tiny"
ANSWER = "Paris is the capital of France; naïve café 日本 👩‍🚀 done."
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['reasoning_content'] %}({{ message['reasoning_content'] }}) {% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The capital of France is Paris. What is the capital of France? You are a helpful assistant. "
    "Hello world, user and system say hello to the assistant and count one two three four five. "
)


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE: every text has tokens, most characters beyond ASCII need several."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS] * 4, trainer)
    backend.add_tokens(["<think>", "</think>"])
    return backend


def make_tokenizer() -> Tokenizer:
    backend = tiny_tokenizer()
    return Tokenizer(
        backend,
        chat_template=TEMPLATE,
        special_tokens={"eos_token": "<|im_end|>"},
        eos_token_ids=[backend.token_to_id("<|im_end|>")],
    )


def reply(token_ids: list[int], *, step: int = 1) -> Script:
    """Says `token_ids` over and over, `step` at a time, as SamplingParams ask: the token at a
    position depends on the position alone, so a replay goes on as the first run would have."""

    def script(submit: Submit) -> Iterator[TokenOut | None]:
        sampling = submit.request.sampling
        position = len(submit.output_ids)
        prompt_logprobs: list[TokenLogprob | None] = []
        if sampling.prompt_logprobs is not None:
            ids = submit.request.token_ids
            prompt_logprobs = [None, *(_logprob(i, sampling.prompt_logprobs) for i in ids[1:])]
        while True:
            ids = []
            reason: Any = "length" if position >= sampling.max_tokens else None
            while reason is None and len(ids) < step:
                token_id = token_ids[position % len(token_ids)]
                ids.append(token_id)
                position += 1
                if token_id in sampling.stop_token_ids and position > sampling.min_tokens:
                    reason = "stop"
                elif position >= sampling.max_tokens:
                    reason = "length"
            yield TokenOut(
                rid=submit.request.rid,
                index=position - len(ids),
                ids=ids,
                logprobs=[_logprob(i, sampling.logprobs) for i in ids]
                if sampling.logprobs is not None
                else [],
                finish_reason=reason,
                stop_token=reason == "stop",
                cached_tokens=len(submit.request.token_ids) // 2,
                cached_host_tokens=len(submit.request.token_ids) // 4,
                prompt_logprobs=prompt_logprobs,
            )
            if reason is not None:
                return

    return script


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    top = [(token_id, -0.25), *((other, -3.0 - other) for other in range(num_top))]
    return TokenLogprob(token_id, -0.25, top[:num_top])


_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass
class Server:
    """A running front end. `workers` are those started so far."""

    base_url: str
    client: EngineClient
    tokenizer: Tokenizer
    loop: asyncio.AbstractEventLoop
    http: httpx.Client  # one for all requests: a new one costs more than most of them
    folder: Path  # of the workers' sockets
    http_server: HttpServer
    workers: list[ScriptedWorker] = field(default_factory=list)

    def add_worker(self, script: Script, *, address: str = "", **options: Any) -> ScriptedWorker:
        """Returns when the front end knows it. `address`: of one that is gone, for the next."""
        address = address or f"ipc://{self.folder}/{len(self.workers)}"
        worker = ScriptedWorker(address, script, self.tokenizer.vocab_size, **options)
        self.workers.append(worker)
        self.call(lambda: self.client.roster.add(address))
        self.until(lambda: self.knows(worker))
        return worker

    def knows(self, worker: ScriptedWorker) -> bool:
        fleet = self.client.fleet
        known = fleet.at(worker.address) or fleet.refused.get(worker.address)
        return known is not None and known.hello == worker.hello

    def until(self, holds: Callable[[], bool]) -> None:
        """Blocks until the front end's state says so; the test's timeout bounds it."""

        async def wait() -> None:
            while not holds():
                await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(timeout=60)

    def call(self, function: Callable[[], Any]) -> Any:
        """`function` on the event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout=60)


@contextlib.contextmanager
def serving(
    limits: Limits | None = None,
    *,
    tracer: Tracer = NO_TRACER,
    fingerprint: str = "",
    **options: Any,
) -> Iterator[Server]:
    """A front end without workers; `options` are ServeConfig's."""
    tokenizer = make_tokenizer()
    client = EngineClient(tokenizer.token_bytes, limits, tracer=tracer, fingerprint=fingerprint)
    config = ServeConfig(served_model_name=MODEL_NAME, **options)
    app = create_app(config, client, tokenizer)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    started: queue.Queue[asyncio.AbstractEventLoop] = queue.Queue()
    http = HttpServer(app)

    async def main() -> None:
        client.start()
        started.put(asyncio.get_running_loop())
        await http.serve(sockets=[listener])
        await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="front end")
    thread.start()
    base_url = f"http://127.0.0.1:{port}"
    requests = httpx.Client(base_url=base_url, timeout=60, trust_env=False, verify=_NO_TLS)
    folder = tempfile.TemporaryDirectory(prefix="plait-")
    loop = started.get(timeout=60)
    server = Server(base_url, client, tokenizer, loop, requests, Path(folder.name), http)
    try:
        yield server
    finally:
        server.call(lambda: client.requests.fail_all("the test is over"))
        requests.close()
        http.should_exit = True
        thread.join()
        for worker in server.workers:
            worker.vanish()
        folder.cleanup()
        tokenizer.close()
