"""What the official Python client does with plait: `python openai_python.py [BASE_URL]`."""

import sys

from openai import BadRequestError, NotFoundError, OpenAI

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=BASE_URL, api_key="none")
(model,) = (found.id for found in client.models.list())
assert client.models.retrieve(model).id == model
ASK = [{"role": "user", "content": "What is the capital of France?"}]

whole = client.chat.completions.create(model=model, messages=ASK, temperature=0, max_tokens=24)
text = whole.choices[0].message.content
print(repr(text))
assert (
    text and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
)

pieces = []
for chunk in client.chat.completions.create(
    model=model,
    messages=ASK,
    temperature=0,
    max_tokens=24,
    stream=True,
    stream_options={"include_usage": True},
):
    pieces += [choice.delta.content or "" for choice in chunk.choices]
assert "".join(pieces) == text and chunk.usage.completion_tokens == whole.usage.completion_tokens

with client.chat.completions.stream(
    model=model, messages=ASK, temperature=0, max_tokens=24
) as events:
    assert events.get_final_completion().choices[0].message.content == text

several = client.chat.completions.create(
    model=model, messages=ASK, n=3, seed=7, max_tokens=8, logprobs=True, top_logprobs=2
)
assert [choice.index for choice in several.choices] == [0, 1, 2]
assert all(len(one.logprobs.content[0].top_logprobs) == 2 for one in several.choices)

stopped = client.chat.completions.create(
    model=model, messages=ASK, temperature=0, max_tokens=24, stop=[text.split()[2]]
)
assert stopped.choices[0].finish_reason == "stop"
assert stopped.choices[0].message.content == text[: text.index(text.split()[2])]

completion = client.completions.create(
    model=model, prompt=["One, two,", "A, B,"], max_tokens=4, temperature=0, logprobs=1, echo=True
)
assert [choice.text.split(",")[0] for choice in completion.choices] == ["One", "A"]

raw = client.chat.completions.with_raw_response.create(model=model, messages=ASK, max_tokens=1)
assert raw.headers["x-request-id"] and raw.parse().choices
for wrong, error in (({"model": "nobody's"}, NotFoundError), ({"temperature": 9}, BadRequestError)):
    try:
        client.chat.completions.create(**{"model": model, "messages": ASK, **wrong})
    except error as refused:
        print(refused.code, refused.param)
    else:
        raise AssertionError(wrong)
print("ok")
