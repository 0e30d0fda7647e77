// What the official JavaScript client does with plait: `node openai_node.mjs [BASE_URL]`.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] ?? "http://127.0.0.1:8000/v1", apiKey: "none" });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const asked = { model, messages, temperature: 0, max_tokens: 24 };

const whole = await client.chat.completions.create(asked);
const text = whole.choices[0].message.content;
console.log(JSON.stringify(text));

const stream = await client.chat.completions.create({
  ...asked, stream: true, stream_options: { include_usage: true },
});
let streamed = "", usage;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);

const runner = client.chat.completions.stream(asked);
assert.equal(await runner.finalContent(), text);

const left = await client.chat.completions.create({ ...asked, max_tokens: 400, stream: true });
for await (const _ of left) break;  // aborts the request

const completion = await client.completions.create({ model, prompt: "One, two,", max_tokens: 4 });
assert.ok(completion.choices[0].text);
await assert.rejects(client.chat.completions.create({ ...asked, model: "nobody's" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...asked, n: 0 }), OpenAI.BadRequestError);
console.log("ok");
