"""What the tests of streams have in common: a text to say, a worker that stalls, a client."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

from engine.messages import Submit
from engine.types import TokenOut
from tests.server.scripted import MODEL_NAME, Script, Server, make_tokenizer, reply

TOKENIZER = make_tokenizer()
TEXT = "one two three four five six seven 日本 eight"
SPOKEN = [*TOKENIZER.encode(TEXT), TOKENIZER.eos_token_ids[0]]
BODY: dict[str, Any] = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def stalling(num_tokens: int) -> tuple[Script, threading.Event]:
    """Says the first tokens of SPOKEN as `reply` does; the event is set once they are out."""
    reached = threading.Event()

    def script(submit: Submit) -> Iterator[TokenOut | None]:
        yield from itertools.islice(reply(SPOKEN)(submit), num_tokens)
        reached.set()
        while True:
            yield None

    return script, reached


class Stream:
    """A streaming request in a thread: `text` once it is over."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self.status = 0
        self.lines: list[str] = []
        self._http = server.http
        self._body = {**BODY, "stream": True, **fields}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        response = self._http.post(CHAT, json=self._body)
        self.status = response.status_code
        self.lines = [line for line in response.text.split("\n\n") if line]

    def join(self) -> None:
        self._thread.join()

    def values(self) -> list[Any]:
        self.join()
        assert self.lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in self.lines[:-1]]

    def answer(self) -> tuple[str, list[str]]:
        choices = [value["choices"][0] for value in self.values()]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return text, [c["finish_reason"] for c in choices if c["finish_reason"]]
