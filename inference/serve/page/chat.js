// A dialogue with one model: streaming, stop, regenerate, edit, and tokens tinted by log-probability.

import { button, composer, drawSeed, element, length, respond, sampling, say, stored, system, tinted } from "./common.js";
import { markdown } from "./markdown.js";
import { thumbs } from "./ratings.js";

export function chatView(place, server) {
  let turns = stored("dialogue", []);
  let running = null;
  const names = server.models.map((model) => model.id);
  const picker = element("select", { "aria-label": "Model" }, ...names.map((name) => element("option", {}, name)));
  const last = localStorage.getItem("model");
  picker.value = names.includes(last) ? last : (names.at(-1) ?? "");
  picker.addEventListener("change", () => localStorage.setItem("model", picker.value));
  const showTokens = element("input", { type: "checkbox", onchange: () => draw() });
  const talk = element("div", { class: "talk", role: "log", "aria-label": "Dialogue" });
  const hint = "Message: Enter sends, Shift+Enter starts a new line";
  const { input, sender, bar } = composer("Message", hint, "Send", send, () => running);

  place.append(
    element(
      "div",
      { class: "row bar talk-bar" },
      picker,
      button("New dialogue", () => change([])),
      element("label", { class: "check" }, showTokens, "Show tokens"),
    ),
    talk,
    bar,
  );
  draw();
  input.focus();

  function save() {
    localStorage.setItem("dialogue", JSON.stringify(turns));
  }

  function change(next) {
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
    talk.replaceChildren(...turns.map(drawTurn));
    if (!turns.length) talk.append(element("p", { class: "hint" }, hint));
    place.scrollTop = place.scrollHeight;
  }

  function drawTurn(turn, at) {
    const isUser = turn.role === "user";
    const text = element("div", { class: "text" }, ...content(turn));
    const tools = element("div", { class: "row tools" });
    if (isUser) tools.append(button("Edit", () => edit(at)));
    else {
      tools.append(button("Copy", () => navigator.clipboard?.writeText(turn.content.trim())));
      if (at === turns.length - 1) tools.append(button("Regenerate", () => again(at)));
      if (server.ratings && turn.answer) tools.append(thumbs(messages(at), turn.answer));
    }
    const { model, finish } = turn.answer ?? {};
    const why = finish === "length" ? ` · ${length(turn.answer)}` : finish === "stopped" ? " · stopped" : "";
    const who = isUser ? "You" : `${model ?? ""}${why}`;
    return element("div", { class: `turn ${turn.role}` }, element("div", { class: "who" }, who), text, tools);
  }

  function content(turn) {
    const tokens = turn.answer?.tokens ?? [];
    if (turn.role === "user") return [turn.content];
    return [...markdown(turn.content.trim()), showTokens.checked && tokens.length > 0 && tinted(tokens.map(byChance))];
  }

  function again(at) {
    change(turns.slice(0, at));
    generate(true);
  }

  function edit(at) {
    input.value = turns[at].content;
    change(turns.slice(0, at));
    input.focus();
  }

  function send() {
    const text = input.value.trim();
    if (!text) return;
    input.value = "";
    change([...turns, { role: "user", content: text }]);
    generate(false);
  }

  async function generate(fresh) {
    const controller = (running = new AbortController());
    const own = turns;
    const turn = { role: "assistant", content: "" };
    sender.textContent = "Stop";
    say("");
    const fields = sampling();
    if (fresh) fields.seed = drawSeed();
    const asked = messages(own.length);
    own.push(turn);
    draw();
    const text = talk.lastElementChild.querySelector(".text");
    try {
      turn.answer = await respond(picker.value, asked, fields, {
        signal: controller.signal,
        logprobs: true,
        onText: (answer) => {
          turn.content = answer.text;
          const near = place.scrollHeight - place.scrollTop - place.clientHeight < 120;
          text.replaceChildren(...markdown(answer.text.trim()));
          if (near) place.scrollTop = place.scrollHeight;
        },
      });
      turn.content = turn.answer.text;
    } catch (error) {
      if (own === turns) turns = own.slice(0, -1);
      say(error.message, true);
    }
    if (running === controller) {
      running = null;
      sender.textContent = "Send";
    }
    if (own.at(-1) === turn || own !== turns) {
      save();
      draw();
    }
  }

  return () => running?.abort();
}

// Tinted by its log-probability; the tooltip lists the alternatives.
function byChance(token) {
  const level = token.logprob > -0.5 ? 0 : token.logprob > -1.5 ? 1 : token.logprob > -3 ? 2 : 3;
  const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  const others = token.top_logprobs.map((each) => `${JSON.stringify(each.token)} ${percent(each.logprob)}`);
  const title = [`${JSON.stringify(token.token)} ${percent(token.logprob)}`, "", ...others].join("\n");
  return { token: token.token, level, title };
}
