// k6 against plait: `k6 run -e BASE_URL=http://127.0.0.1:8000/v1 load.js`.
import http from "k6/http";
import { check } from "k6";

const BASE_URL = __ENV.BASE_URL || "http://127.0.0.1:8000/v1";
export const options = {
  vus: 4,
  iterations: 40,
  thresholds: { checks: ["rate==1"] },
};

export function setup() {
  return { model: http.get(`${BASE_URL}/models`).json("data.0.id") };
}

export default function ({ model }) {
  const stream = __ITER % 2 === 1;
  const body = {
    model, stream, max_tokens: 8, temperature: 0,
    messages: [{ role: "user", content: `Say ${__ITER}.` }],
  };
  const answer = http.post(`${BASE_URL}/chat/completions`, JSON.stringify(body), {
    headers: { "Content-Type": "application/json" },
  });
  check(answer, {
    "is 200": (r) => r.status === 200,
    "has text": (r) => (stream ? r.body.endsWith("data: [DONE]\n\n") : r.json("choices.0.message.content") !== ""),
  });
}
