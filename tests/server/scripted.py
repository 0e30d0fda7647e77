"""A real front end on a loopback port, and workers that answer what a test tells them to.

The workers are threads, but everything between is real: uvicorn, ZeroMQ, the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import socket
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.channel import WorkerChannel
from engine.messages import Abort, Drain, Goodbye, Heartbeat, Hello, Outputs, Submit
from engine.types import Load, MetricFamily, TokenLogprob, TokenOut
from server.app import create_app
from server.client import EngineClient
from server.config import ServeConfig
from server.generation import Limits
from server.tokenizer import Tokenizer

MODEL_NAME = "tiny"
ANSWER = "Paris is the capital of France; naïve café 日本 👩‍🚀 done."
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The capital of France is Paris. What is the capital of France? You are a helpful assistant. "
    "Hello world, user and system say hello to the assistant and count one two three four five. "
)

Script = Callable[[Submit], Iterator[TokenOut | None]]  # None: nothing to say yet


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
                prompt_logprobs=prompt_logprobs,
            )
            if reason is not None:
                return

    return script


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    top = [(token_id, -0.25), *((other, -3.0 - other) for other in range(num_top))]
    return TokenLogprob(token_id, -0.25, top[:num_top])


class ScriptedWorker:
    """A thread with a worker's channel. `submits` and `aborts` are what it was sent."""

    def __init__(
        self, address: str, script: Script, vocab_size: int, *, context_length: int = 2048
    ) -> None:
        self.instance_id = uuid.uuid4().hex
        self.script = script
        self.submits: queue.Queue[Submit] = queue.Queue()
        self.aborts: queue.Queue[str] = queue.Queue()
        self.families: list[MetricFamily] = []
        self._address = address
        self._hello = Hello(
            instance_id=self.instance_id,
            role="colocated",
            pid=next(_PIDS),
            model="tiny",
            vocab_size=vocab_size,
            context_length=context_length,
            page_size=64,
            total_pages=1024,
        )
        self._ending = threading.Event()
        self._says_goodbye = False
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._hello.pid

    def vanish(self) -> None:
        """As a killed process: no word, nothing sent any more."""
        self._ending.set()
        self._thread.join()

    def leave(self) -> None:
        self._says_goodbye = True
        self.vanish()

    def _run(self) -> None:
        channel = WorkerChannel(self._address, self.instance_id)
        channel.send(self._hello)
        running: dict[str, Iterator[TokenOut | None]] = {}
        while not self._ending.is_set():
            before = len(running)
            for message in channel.receive(0.002 if running else 0.02):
                if isinstance(message, Submit):
                    self.submits.put(message)
                    running[message.request.rid] = self.script(message)
                elif isinstance(message, Abort):
                    self.aborts.put(message.rid)
                    if running.pop(message.rid, None) is not None:
                        out = TokenOut(rid=message.rid, index=0, finish_reason="abort")
                        channel.send(Outputs([out]))
                elif isinstance(message, Drain):
                    self._says_goodbye = True
                    self._ending.set()
            outs = []
            for rid, script in list(running.items()):
                out = next(script, None)
                if out is not None:
                    outs.append(out)
                    if out.finish_reason is not None and out.rid == rid:
                        del running[rid]
            if outs:
                channel.send(Outputs(outs))
            if outs or len(running) != before:
                channel.send(Heartbeat(Load(num_running=len(running)), self.families))
        if self._says_goodbye:
            channel.send(Goodbye())
        channel.close()


_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_PIDS = itertools.count(1_000_000)


@dataclass
class Server:
    """A running front end. `workers` are those started so far."""

    base_url: str
    client: EngineClient
    tokenizer: Tokenizer
    loop: asyncio.AbstractEventLoop
    http: httpx.Client  # one for all requests: a new one costs more than most of them
    workers: list[ScriptedWorker] = field(default_factory=list)

    def add_worker(self, script: Script, **options: Any) -> ScriptedWorker:
        """Returns when the front end knows it."""
        known = len(self.client.fleet)
        worker = ScriptedWorker(self.client.address, script, self.tokenizer.vocab_size, **options)
        self.workers.append(worker)
        self.until(lambda: len(self.client.fleet) > known)
        return worker

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
def serving(limits: Limits | None = None, **options: Any) -> Iterator[Server]:
    """A front end without workers; `options` are ServeConfig's."""
    tokenizer = make_tokenizer()
    client = EngineClient("tcp://127.0.0.1:*", tokenizer.token_bytes, limits)
    config = ServeConfig(served_model_name=MODEL_NAME, **options)
    app = create_app(config, client, tokenizer)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    started: queue.Queue[asyncio.AbstractEventLoop] = queue.Queue()
    http = uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", log_config=None))

    async def main() -> None:
        client.start()
        started.put(asyncio.get_running_loop())
        await http.serve(sockets=[listener])
        await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="front end")
    thread.start()
    base_url = f"http://127.0.0.1:{port}"
    requests = httpx.Client(base_url=base_url, timeout=60, trust_env=False, verify=_NO_TLS)
    server = Server(base_url, client, tokenizer, started.get(timeout=60), requests)
    try:
        yield server
    finally:
        server.call(lambda: client.abort_all("the test is over"))
        requests.close()
        http.should_exit = True
        thread.join()
        for worker in server.workers:
            worker.vanish()
        tokenizer.close()
