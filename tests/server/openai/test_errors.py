"""One shape of error everywhere, the right status, before and after a stream began."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from engine.messages import Submit
from engine.types import TokenOut
from server.generation import Limits
from tests.server.scripted import MODEL_NAME, Server, make_tokenizer, reply, serving

BODY: dict[str, Any] = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(max_body_bytes=20_000) as running:
        running.add_worker(reply(running.tokenizer.encode("fine")))
        yield running


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert "x-request-id" in response.headers
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/no/such"),
        ("GET", "/v1/models/"),
        ("GET", "/v1/models/other"),
        ("POST", f"{CHAT}/"),
        ("GET", "/docs"),
    ],
)
def test_routes_that_are_not_there(server: Server, method: str, path: str) -> None:
    response = server.http.request(method, path)
    assert response.status_code == 404
    error_of(response)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/live", "GET, HEAD"),
        ("OPTIONS", "/ready", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
    ],
)
def test_methods_that_a_route_has_not(server: Server, method: str, path: str, allowed: str) -> None:
    response = server.http.request(method, path)
    assert response.status_code == 405
    error_of(response)
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"5", b"null", b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff\xfe", b"[" * 9000],
    ids=str,
)
def test_bodies_that_are_no_json_object(server: Server, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
        response = server.http.post(path, content=content, headers=headers)
        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_json"


def test_other_content_types_are_refused(server: Server) -> None:
    response = server.http.post(
        CHAT, content=json.dumps(BODY), headers={"content-type": "text/plain"}
    )
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]
    response = server.http.post(
        CHAT,
        content=json.dumps({**BODY, "max_tokens": 1}),
        headers={"content-type": "application/json; charset=utf-8"},
    )
    assert response.status_code == 200


def test_bodies_above_the_limit(server: Server) -> None:
    url = CHAT
    announced = server.http.post(url, content=b"x" * 20_001)
    assert announced.status_code == 413
    error = error_of(announced)
    assert "20001" in error["message"]
    assert "20000" in error["message"]
    counted = server.http.post(url, content=iter([b"x" * 15_000, b"x" * 15_000]))
    assert counted.status_code == 413
    assert "20000" in error_of(counted)["message"]


def test_an_unknown_model(server: Server) -> None:
    for path, body in (
        (CHAT, BODY),
        ("/v1/completions", {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        response = server.http.post(path, json={**body, "model": "gpt-x"})
        assert response.status_code == 404
        error = error_of(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert MODEL_NAME in error["message"]


def test_the_client_sees_message_param_and_code(server: Server) -> None:
    with (
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="x", max_retries=0) as sdk,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        sdk.chat.completions.create(**BODY, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_value"
    assert "less than or equal to 2" in caught.value.message


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_that_is_too_large_is_told(server: Server, number: str) -> None:
    given = json.dumps({**BODY, "temperature": 0}).replace(
        '"temperature": 0', f'"temperature": {number}'
    )
    response = server.http.post(CHAT, content=given, headers={"content-type": "application/json"})
    assert response.status_code == 400
    sign = "-" if number.startswith("-") else ""
    assert error_of(response)["message"].startswith(f"temperature is {sign}inf: ")


def test_an_error_nobody_foresaw(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> list[int]:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server.tokenizer, "encode_chat", broken)
    response = server.http.post(CHAT, json=BODY)
    assert response.status_code == 500
    error = error_of(response)
    assert error["type"] == "server_error"
    assert "secret" not in response.text


def failing_after(num_tokens: int) -> Any:
    """A worker whose requests fail after some tokens."""
    token_ids = make_tokenizer().encode("one two three")

    def script(submit: Submit) -> Iterator[TokenOut | None]:
        rid = submit.request.rid
        for index in range(num_tokens):
            yield TokenOut(rid=rid, index=index, ids=[token_ids[index]])
        yield TokenOut(rid=rid, index=num_tokens, finish_reason="error", error="out of pages")

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_before_the_first_token_has_a_real_status(stream: bool, n: int) -> None:
    with serving() as server:
        server.add_worker(failing_after(0))
        response = server.http.post(CHAT, json={**BODY, "stream": stream, "n": n})
        assert response.status_code == 500
        error = error_of(response)
        assert error["message"] == "out of pages"
        assert error["code"] == "worker_error"
        assert len(server.client.requests) == 0


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_failure_within_a_stream_is_an_event_of_its_own(route: str) -> None:
    with serving() as server:
        server.add_worker(failing_after(2))
        with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="x", max_retries=0) as sdk:
            create: Any = sdk.chat.completions.create
            body = {**BODY, "stream": True}
            if route == "completions":
                create = sdk.completions.create
                body = {"model": MODEL_NAME, "prompt": "x", "stream": True}
            num_chunks = 0
            with pytest.raises(openai.APIError, match="out of pages"):
                for chunk in create(**body):
                    num_chunks += 1
                    assert chunk.choices[0].finish_reason is None
            assert num_chunks > 0
        path = CHAT if route == "chat" else "/v1/completions"
        lines = server.http.post(path, json=body).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        error = json.loads(lines[-3].removeprefix("data: "))
        assert set(error) == {"error"}
        assert set(error["error"]) == {"message", "type", "param", "code"}


def test_no_worker_is_503_with_retry_after() -> None:
    with serving(Limits(worker_wait_s=0)) as server:
        response = server.http.post(CHAT, json=BODY)
        assert response.status_code == 503
        assert 0 < int(response.headers["retry-after"]) <= 120
        assert error_of(response)["code"] == "unavailable"
        assert server.http.get("/live").status_code == 200
        for path in ("/ready", "/health"):
            assert server.http.get(path).status_code == 503
        assert server.http.get("/v1/models").json()["data"] == []
        response = server.http.get(f"/v1/models/{MODEL_NAME}")
        assert response.status_code == 503


def test_draining_refuses_what_is_new() -> None:
    with serving() as server:
        server.add_worker(reply(server.tokenizer.encode("fine")))
        server.call(server.client.start_draining)
        assert server.http.post(CHAT, json=BODY).status_code == 503
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/v1/models").json()["data"] == []


def silent(submit: Submit) -> Iterator[TokenOut | None]:
    while True:
        yield None


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        (Limits(max_queued_requests=2), "requests"),
        (Limits(max_queued_tokens=40), "tokens"),
    ],
)
def test_a_full_queue_is_503_and_empties_again(limits: Limits, word: str) -> None:
    with serving(limits) as server:
        worker = server.add_worker(silent)
        body = {"model": MODEL_NAME, "prompt": [5] * 16, "n": 2, "stream": True}
        with httpx.Client(base_url=server.base_url, timeout=60) as client:
            task = threaded_post(client, body)
            server.until(lambda: len(server.client.requests) == 2)
            response = server.http.post("/v1/completions", json=body)
            assert response.status_code == 503
            assert "retry-after" in response.headers
            error = error_of(response)
            assert error["code"] == "overloaded"
            assert word in error["message"]
            worker.script = reply(server.tokenizer.encode("fine"))
            server.call(lambda: server.client.requests.fail_all("that is enough"))
            assert task().status_code == 503
        response = server.http.post("/v1/completions", json=body)
        assert response.status_code == 200


def threaded_post(client: httpx.Client, body: dict[str, Any]) -> Any:
    """Posts in a thread; the value waits for the response."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    future = pool.submit(client.post, "/v1/completions", json=body)

    def result() -> httpx.Response:
        response = future.result(timeout=60)
        pool.shutdown()
        return response

    return result


def test_the_openapi_document_describes_the_bodies(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
        body = document["paths"][path]["post"]["requestBody"]
        name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert schemas[name]["type"] == "object"
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]
    whole = next(
        branch["items"]
        for branch in schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
        if branch.get("items", {}).get("type") == "integer"
    )
    assert whole["minimum"] == 0
    refused = {"model": MODEL_NAME, "prompt": [whole["minimum"] - 1]}
    assert server.http.post("/v1/completions", json=refused).status_code == 400
    ways = schemas["TokenizeRequest"]["oneOf"]
    assert [way["required"] for way in ways] == [["prompt"], ["messages"]]
    assert server.http.post("/tokenize", json={"model": MODEL_NAME}).status_code == 400
    assert "422" not in server.http.get("/openapi.json").text


def test_the_openapi_document_describes_what_is_answered(server: Server) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    wrong = {CHAT: 400, "/tokenize": 400, "/v1/models/{name}": 404}
    for path, status in wrong.items():
        ((method, operation),) = paths[path].items()
        assert server.http.request(method, path, content=b"{").status_code == status
        (content,) = operation["responses"]["4XX"]["content"].items()
        assert content == ("application/json", {"schema": {"$ref": "#/components/schemas/Error"}})
    for path in ("/metrics", "/live", "/openapi.json"):
        told = paths.get(path, {"get": {"responses": {"200": {"content": ["application/json"]}}}})
        (media_type,) = told["get"]["responses"]["200"]["content"]
        assert server.http.get(path).headers["content-type"].split(";")[0] == media_type
    streamed = server.http.post(CHAT, json=BODY | {"stream": True, "max_tokens": 1})
    media_type = streamed.headers["content-type"].split(";")[0]
    assert media_type in paths[CHAT]["post"]["responses"]["200"]["content"]
    assert "503" in paths["/ready"]["get"]["responses"]
