"""What langchain-openai does with plait: `python chain.py [BASE_URL]`."""

import asyncio
import sys

import openai
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
(model,) = (found.id for found in openai.OpenAI(base_url=BASE_URL, api_key="none").models.list())
given = {"base_url": BASE_URL, "api_key": "none", "model": model, "temperature": 0}
chat = ChatOpenAI(**given, max_tokens=24, stream_usage=True)

answer = chat.invoke([("system", "You answer in one sentence."), ("human", "Who wrote Faust?")])
print(repr(answer.content), answer.usage_metadata)
assert answer.content and answer.usage_metadata["output_tokens"] <= 24

prompt = ChatPromptTemplate.from_messages([("human", "Name a {thing}.")])
chain = prompt | chat | StrOutputParser()
things = [{"thing": thing} for thing in ("river", "city", "bird")]
together = chain.batch(things)
assert together == [chain.invoke(thing) for thing in things]
assert "".join(chain.stream(things[0])) == together[0]


async def streamed() -> str:
    return "".join([piece async for piece in chain.astream(things[1])])


assert asyncio.run(streamed()) == together[1]

last = None
for piece in chat.stream("Name a river."):
    last = piece if last is None else last + piece
assert last.usage_metadata["output_tokens"] <= 24

assert OpenAI(**given, max_tokens=6).invoke("One, two, three,")
print("ok")
