// The chat page: asks /v1/chat/completions as any client does and shows what streams in.
// Knows nothing that the API does not say. All text is put in as text, never as markup.

const part = (id) => document.getElementById(id);
const KEY = "plait.api-key";

let messages = []; // of the conversation, as the API takes them; a new one is a new array
let asking = null; // the AbortController of the request under way

// -- the API

function headers() {
  const key = part("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// What the server says went wrong, in its own words where it has some.
async function refusal(response) {
  const body = await response.json().catch(() => null);
  const said = body?.error?.message ?? `the server answers ${response.status}`;
  return new Error(response.status === 401 ? `${said} (under Settings)` : said);
}

async function fetchModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data.map((model) => model.id);
}

function body() {
  const system = part("system").value.trim();
  const asked = {
    model: part("model").value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (part("temperature").value !== "") asked.temperature = Number(part("temperature").value);
  if (part("max-tokens").value !== "") asked.max_tokens = Number(part("max-tokens").value);
  return asked;
}

// The values of a stream of events; throws where it does not come to its end.
async function* events(response) {
  let rest = "";
  for await (const piece of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    const blocks = (rest + piece).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block === "data: [DONE]") return;
      if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
    }
  }
  throw new Error("the answer was cut off");
}

async function* pieces(stream) {
  const reader = stream.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

// -- one answer

class Answer {
  constructor(element) {
    this.text = "";
    this.usage = null;
    this.reason = null; // why it ended
    this.wasStopped = false;
    this.began = performance.now();
    this.first = this.last = null; // when text came
    this.element = element;
  }

  take(value) {
    if (value.error) throw new Error(value.error.message);
    if (value.usage) this.usage = value.usage;
    const choice = value.choices[0];
    const text = choice?.delta?.content ?? "";
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    if (text) {
      this.last = performance.now();
      this.first ??= this.last;
      this.text += text;
      this.element.querySelector(".text").append(text);
    }
  }

  figures() {
    const said = [];
    if (this.first !== null) said.push(`first token after ${seconds(this.first - this.began)}`);
    if (this.usage) {
      const { prompt_tokens: asked, completion_tokens: answered } = this.usage;
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      said.push(`${asked} prompt tokens, ${cached} cached`, `${answered} answer tokens`);
      if (answered > 1 && this.last > this.first) {
        const rate = ((answered - 1) * 1000) / (this.last - this.first);
        said.push(`${rate.toFixed(1)} tokens/s`);
      }
    }
    if (this.reason === "length") said.push("ended at its most tokens");
    if (this.wasStopped) said.push("stopped");
    return said.join(" · ");
  }
}

function seconds(milliseconds) {
  return milliseconds < 1000
    ? `${Math.round(milliseconds)} ms`
    : `${(milliseconds / 1000).toFixed(2)} s`;
}

async function ask(text) {
  showError(null);
  const conversation = messages;
  conversation.push({ role: "user", content: text });
  const question = show("user", "You", text);
  const answer = new Answer(show("assistant", part("model").value || "Answer", ""));
  answer.element.setAttribute("aria-busy", "true");
  asking = new AbortController();
  showAsking();
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(body()),
      signal: asking.signal,
    });
    if (!response.ok) throw await refusal(response);
    for await (const value of events(response)) answer.take(value);
  } catch (error) {
    answer.wasStopped = asking.signal.aborted;
    if (!answer.wasStopped) showError(explain(error));
  }
  asking = null;
  showAsking();
  if (messages === conversation) finish(answer, question, text);
}

// Without a word of an answer the question is taken back, to be asked again.
function finish(answer, question, text) {
  answer.element.removeAttribute("aria-busy");
  if (answer.text) {
    messages.push({ role: "assistant", content: answer.text });
  } else if (!answer.usage) {
    messages.pop();
    question.remove();
    answer.element.remove();
    part("prompt").value ||= text;
    showEmpty();
    return;
  }
  answer.element.querySelector(".figures").textContent = answer.figures();
  part("announcer").textContent = `${answer.text} (${answer.figures()})`;
  scroll();
}

function explain(error) {
  return error instanceof TypeError ? "the server cannot be reached" : error.message;
}

// -- the page

function show(role, who, text) {
  const item = document.createElement("li");
  item.className = role;
  for (const [name, content] of [["who", who], ["text", text], ["figures", ""]]) {
    const line = document.createElement("p");
    line.className = name;
    line.textContent = content;
    item.append(line);
  }
  part("log").append(item);
  showEmpty();
  scroll();
  return item;
}

function scroll() {
  window.scrollTo(0, document.body.scrollHeight);
}

function showEmpty() {
  part("empty").hidden = part("log").children.length > 0;
}

function showAsking() {
  part("send").disabled = asking !== null;
  part("stop").disabled = asking === null;
}

function showError(message) {
  part("error").hidden = message === null;
  part("error").textContent = message ?? "";
}

async function showModels() {
  const chosen = part("model").value;
  try {
    const models = await fetchModels();
    part("model").replaceChildren(...models.map((name) => new Option(name, name)));
    if (models.includes(chosen)) part("model").value = chosen;
    showError(null);
  } catch (error) {
    showError(explain(error));
    part("settings").open = true;
  }
}

function stop() {
  asking?.abort();
}

async function submit() {
  const text = part("prompt").value.trim();
  if (!text || asking) return;
  if (!part("ask").checkValidity()) {
    part("settings").open = true; // a field that is not shown cannot say what it accepts
    part("ask").reportValidity();
    return;
  }
  if (!part("model").value) await showModels();
  if (!part("model").value || asking) return;
  part("prompt").value = "";
  part("prompt").focus();
  await ask(text);
}

part("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
part("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
part("stop").addEventListener("click", () => {
  stop();
  part("prompt").focus();
});
part("new").addEventListener("click", () => {
  stop();
  messages = [];
  part("log").replaceChildren();
  part("announcer").textContent = "";
  showError(null);
  showEmpty();
  part("prompt").focus();
});
part("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, part("key").value);
  showModels();
});

part("key").value = sessionStorage.getItem(KEY) ?? "";
showModels();
