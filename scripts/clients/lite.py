"""What litellm does with plait: `python lite.py [BASE_URL]`."""

import asyncio
import sys

import litellm
import openai

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
(model,) = (found.id for found in openai.OpenAI(base_url=BASE_URL, api_key="none").models.list())
given = {"api_base": BASE_URL, "api_key": "none", "temperature": 0, "max_tokens": 24}
ask = [{"role": "user", "content": "What is the capital of France?"}]

whole = litellm.completion(model=f"openai/{model}", messages=ask, **given)
text = whole.choices[0].message.content
print(repr(text), whole.usage.total_tokens)
# hosted_vllm is litellm's other way to a server of one's own.
assert (
    litellm.completion(model=f"hosted_vllm/{model}", messages=ask, **given)
    .choices[0]
    .message.content
    == text
)
stream = litellm.completion(
    model=f"openai/{model}",
    messages=ask,
    stream=True,
    stream_options={"include_usage": True},
    **given,
)
chunks = list(stream)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
assert litellm.stream_chunk_builder(chunks, messages=ask).usage.total_tokens


async def together() -> list[str]:
    asked = [litellm.acompletion(model=f"openai/{model}", messages=ask, **given) for _ in range(4)]
    return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]


assert asyncio.run(together()) == [text] * 4
completion = litellm.text_completion(
    model=f"text-completion-openai/{model}", prompt="One, two,", **{**given, "max_tokens": 4}
)
assert completion.choices[0].text
try:
    litellm.completion(model="openai/nobody's", messages=ask, **given)
except litellm.NotFoundError as error:
    print(error.status_code)
else:
    raise AssertionError("an unknown model was accepted")
print("ok")
