// Requests to the server this page came from.

import { key } from "./settings.js";

export class Refused extends Error {}

function headers() {
  const found = { "Content-Type": "application/json" };
  if (key()) found.Authorization = `Bearer ${key()}`;
  return found;
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no error object: the status has to do
  }
  if (response.status === 401) message = "this server needs an API key: enter it in the settings";
  throw new Refused(message);
}

export async function get(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

export async function post(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  return (await checked(response)).json();
}

// The chunks of a stream of chat, as they come; ends early where `signal` aborts it.
export async function* chat(body, signal) {
  const response = await checked(
    await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify({ ...body, stream: true }),
      signal,
    }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) throw new Refused("the server broke off");
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Refused(chunk.error.message);
      yield chunk;
    }
  }
}

// One response: `onText` is called as it grows, and what is returned is what a rating records.
export async function respond(model, messages, fields, { signal, onText, logprobs = false } = {}) {
  const answer = { model, text: "", token_ids: [], seed: fields.seed, sampling: fields, finish: null, tokens: [] };
  const more = logprobs ? { logprobs: true, top_logprobs: 3 } : {};
  try {
    for await (const chunk of chat({ model, messages, ...fields, ...more, return_token_ids: true }, signal)) {
      answer.weights_hash = chunk.system_fingerprint.slice(3);
      for (const choice of chunk.choices) {
        answer.text += choice.delta.content ?? "";
        answer.token_ids.push(...(choice.token_ids ?? []));
        answer.tokens.push(...(choice.logprobs?.content ?? []));
        answer.finish = choice.finish_reason ?? answer.finish;
      }
      onText?.(answer);
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    answer.finish = "stopped";
  }
  return answer;
}
