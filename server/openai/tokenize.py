"""POST /tokenize and /detokenize: what a prompt becomes, and what ids say."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.openai import sampling
from server.openai.api import Api
from server.openai.errors import invalid
from server.openai.schema import DetokenizeRequest, TokenizeRequest, read_body


async def tokenize(api: Api, http: Request) -> Response:
    """Body: `prompt`, or `messages` as in chat. Answer: `tokens`, `count`, `max_model_len`."""
    body = await read_body(http, TokenizeRequest)
    if body.model is not None:
        api.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "exactly one of prompt and messages is needed")
    body.check_rest()
    if body.messages is not None:
        token_ids = await api.encode_chat(body.messages, body)
    else:
        assert body.prompt is not None
        token_ids = await api.tokenizer.run(
            api.tokenizer.encode,
            body.prompt,
            add_special_tokens=body.add_special_tokens is not False,
        )
    capabilities = api.client.fleet.capabilities
    answer = {
        "count": len(token_ids),
        "max_model_len": capabilities.context_length if capabilities else None,
        "tokens": token_ids,
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def detokenize(api: Api, http: Request) -> Response:
    """Body: `tokens`. Answer: `prompt`. Special tokens are shown unless asked otherwise, so that
    the ids of a prompt come back as its text."""
    body = await read_body(http, DetokenizeRequest)
    if body.model is not None:
        api.check_model(body.model)
    capabilities = await api.capabilities()
    sampling.check_token_ids("tokens", body.tokens, capabilities)
    text = await api.tokenizer.run(
        api.tokenizer.decode, body.tokens, skip_special_tokens=bool(body.skip_special_tokens)
    )
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
