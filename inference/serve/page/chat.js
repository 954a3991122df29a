// A dialogue with one model: streaming, stop, regenerate, edit, and tokens tinted by log-probability.

import { button, composer, drawSeed, element, formatLength, loadStored, requestResponse, samplingFields, showStatus, system, tokenSpans } from "./common.js";
import { markdown } from "./markdown.js";
import { thumbs } from "./ratings.js";

export function chatView(container, server) {
  let turns = loadStored("dialogue", []);
  let running = null;
  const names = server.models.map((model) => model.id);
  const picker = element("select", { "aria-label": "Model" }, ...names.map((name) => element("option", {}, name)));
  const lastModel = localStorage.getItem("model");
  picker.value = names.includes(lastModel) ? lastModel : (names.at(-1) ?? "");
  picker.addEventListener("change", () => localStorage.setItem("model", picker.value));
  const showTokens = element("input", { type: "checkbox", onchange: () => draw() });
  const transcript = element("div", { class: "talk", role: "log", "aria-label": "Dialogue" });
  const hint = "Message: Enter sends, Shift+Enter starts a new line";
  const { input, sendButton, bar } = composer("Message", hint, "Send", send, () => running);

  container.append(
    element(
      "div",
      { class: "row bar talk-bar" },
      picker,
      button("New dialogue", () => setTurns([])),
      element("label", { class: "check" }, showTokens, "Show tokens"),
    ),
    transcript,
    bar,
  );
  draw();
  input.focus();

  function save() {
    localStorage.setItem("dialogue", JSON.stringify(turns));
  }

  function setTurns(next) {
    running?.abort();
    turns = next;
    save();
    draw();
  }

  function messages(until) {
    const before = turns.slice(0, until).map(({ role, content }) => ({ role, content }));
    return system() ? [{ role: "system", content: system() }, ...before] : before;
  }

  function draw() {
    const hint = "Nothing is stored outside this browser until you rate a response.";
    transcript.replaceChildren(...turns.map(drawTurn));
    if (!turns.length) transcript.append(element("p", { class: "hint" }, hint));
    container.scrollTop = container.scrollHeight;
  }

  function drawTurn(turn, index) {
    const isUser = turn.role === "user";
    const text = element("div", { class: "text" }, ...content(turn));
    const tools = element("div", { class: "row tools" });
    if (isUser) tools.append(button("Edit", () => edit(index)));
    else {
      tools.append(button("Copy", () => navigator.clipboard?.writeText(turn.content.trim())));
      if (index === turns.length - 1) tools.append(button("Regenerate", () => regenerate(index)));
      if (server.ratings && turn.answer) tools.append(thumbs(messages(index), turn.answer));
    }
    const { model, finish } = turn.answer ?? {};
    const ending = finish === "length" ? ` · ${formatLength(turn.answer)}` : finish === "stopped" ? " · stopped" : "";
    const speaker = isUser ? "You" : `${model ?? ""}${ending}`;
    return element("div", { class: `turn ${turn.role}` }, element("div", { class: "who" }, speaker), text, tools);
  }

  function content(turn) {
    const tokens = turn.answer?.tokens ?? [];
    if (turn.role === "user") return [turn.content];
    return [...markdown(turn.content.trim()), showTokens.checked && tokens.length > 0 && tokenSpans(tokens.map(describeToken))];
  }

  function regenerate(index) {
    setTurns(turns.slice(0, index));
    generate(true);
  }

  function edit(index) {
    input.value = turns[index].content;
    setTurns(turns.slice(0, index));
    input.focus();
  }

  function send() {
    const text = input.value.trim();
    if (!text) return;
    input.value = "";
    setTurns([...turns, { role: "user", content: text }]);
    generate(false);
  }

  async function generate(newSeed) {
    const controller = (running = new AbortController());
    const currentTurns = turns;
    const turn = { role: "assistant", content: "" };
    sendButton.textContent = "Stop";
    showStatus("");
    const fields = samplingFields();
    if (newSeed) fields.seed = drawSeed();
    const prompt = messages(currentTurns.length);
    currentTurns.push(turn);
    draw();
    const text = transcript.lastElementChild.querySelector(".text");
    try {
      turn.answer = await requestResponse(picker.value, prompt, fields, {
        signal: controller.signal,
        logprobs: true,
        onText: (answer) => {
          turn.content = answer.text;
          const isNearEnd = container.scrollHeight - container.scrollTop - container.clientHeight < 120;
          text.replaceChildren(...markdown(answer.text.trim()));
          if (isNearEnd) container.scrollTop = container.scrollHeight;
        },
      });
      turn.content = turn.answer.text;
    } catch (error) {
      if (currentTurns === turns) turns = currentTurns.slice(0, -1);
      showStatus(error.message, true);
    }
    if (running === controller) {
      running = null;
      sendButton.textContent = "Send";
    }
    if (currentTurns.at(-1) === turn || currentTurns !== turns) {
      save();
      draw();
    }
  }

  return () => running?.abort();
}

// Returns how to show a token: tinted by its log-probability, with alternatives in the tooltip.
function describeToken(token) {
  const level = token.logprob > -0.5 ? 0 : token.logprob > -1.5 ? 1 : token.logprob > -3 ? 2 : 3;
  const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)}%`;
  const alternatives = token.top_logprobs.map(({ token, logprob }) => `${JSON.stringify(token)} ${percent(logprob)}`);
  const title = [`${JSON.stringify(token.token)} ${percent(token.logprob)}`, "", ...alternatives].join("\n");
  return { token: token.token, level, title };
}
