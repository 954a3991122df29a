// Shared by all views: elements, settings stored in this browser, and requests to the server.

// Builds elements without parsing HTML, so that model output becomes only text nodes.
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null && child !== false));
  return node;
}

export function button(label, onclick, attributes = {}) {
  return element("button", { type: "button", onclick, ...attributes }, label);
}

export function showStatus(text, isError = false) {
  const status = document.getElementById("status");
  status.textContent = text;
  status.classList.toggle("bad", isError);
}

// Builds a text field and a button. Enter submits, and Shift+Enter starts a new line. While `running`
// returns an AbortController, Enter does nothing and the button aborts the request.
export function composer(label, placeholder, action, submit, running, wide = false) {
  const input = element("textarea", { rows: 2, "aria-label": label, placeholder });
  const sendButton = button(action, () => (running() ? running().abort() : submit()), { class: "main" });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running()) submit();
  });
  return { input, sendButton, bar: element("div", { class: wide ? "composer wide" : "composer" }, input, sendButton) };
}

// Shows a response's tokens, each tinted at a level from 0 to 3 in one of two colors.
export function tokenSpans(tokens) {
  const spans = tokens.map(({ token, level, less, title }) =>
    element("span", { class: `token t${level}${less ? " less" : ""}`, title }, token),
  );
  return element("div", { class: "tokens" }, ...spans);
}

export function loadStored(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

// The settings panel, stored in this browser; the API key is kept only until the tab is closed.
const DEFAULTS = { temperature: "0.7", top_p: "1", top_k: "", max_tokens: "", seed: "", system: "", rater: "" };
export const settings = document.getElementById("settings");
const values = { ...DEFAULTS, ...loadStored("settings", {}), key: sessionStorage.getItem("key") ?? "" };

export function initialize() {
  for (const field of settings.elements) {
    if (!field.name) continue;
    field.value = values[field.name] ?? "";
    field.addEventListener("input", () => {
      values[field.name] = field.value;
      const { key, ...others } = values;
      localStorage.setItem("settings", JSON.stringify(others));
      sessionStorage.setItem("key", key);
    });
  }
  settings.addEventListener("submit", (event) => event.preventDefault());
}

export function formatLength({ token_ids, finish }) {
  return `${finish === "length" ? "cut off at " : ""}${token_ids.length} tokens`;
}

export const key = () => values.key.trim();
export const rater = () => values.rater.trim();
export const system = () => values.system.trim();

// Returns the fields of a request; the seed is drawn here, so that several models can share it.
export function samplingFields() {
  const fields = { seed: values.seed === "" ? drawSeed() : Math.trunc(Number(values.seed)) };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens"]) {
    if (values[name] !== "" && Number.isFinite(Number(values[name]))) fields[name] = Number(values[name]);
  }
  return fields;
}

export function drawSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
}

export class RequestError extends Error {}

function headers() {
  const fields = { "Content-Type": "application/json" };
  if (key()) fields.Authorization = `Bearer ${key()}`;
  return fields;
}

async function checkResponse(response) {
  if (response.ok) return response;
  let message = `the server returned ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no error object: report the status
  }
  if (response.status === 401) message = "this server needs an API key: enter it in the settings";
  throw new RequestError(message);
}

export async function get(path) {
  return (await checkResponse(await fetch(path, { headers: headers() }))).json();
}

export async function post(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  return (await checkResponse(response)).json();
}

// Yields the chunks of a chat stream; ends early if `signal` aborts it.
export async function* chat(body, signal) {
  const response = await checkResponse(
    await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify({ ...body, stream: true }),
      signal,
    }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) throw new RequestError("the server closed the connection");
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new RequestError(chunk.error.message);
      yield chunk;
    }
  }
}

// Requests a response: calls `onText` as it grows, and returns the record that a rating stores.
export async function requestResponse(model, messages, fields, { signal, onText, logprobs = false } = {}) {
  const answer = { model, text: "", token_ids: [], seed: fields.seed, sampling: fields, finish: null, tokens: [] };
  const options = logprobs ? { logprobs: true, top_logprobs: 3 } : {};
  try {
    for await (const chunk of chat({ model, messages, ...fields, ...options, return_token_ids: true }, signal)) {
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
