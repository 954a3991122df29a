// Two views: one prompt for two to four models, and pairs of responses to a list of prompts, rated blind.

import { button, composer, drawSeed, element, get, sampling, say } from "./common.js";
import { cards, choices, shuffled, undo, withSystem } from "./ratings.js";

// All models get the same seed; names can be hidden to avoid bias.
export function compareView(place, server, query) {
  const names = server.models.map((model) => model.id);
  if (names.length < 2) {
    place.append(element("p", { class: "hint" }, "One model is served. Start the server with --run OUT, or with more than one --path, to compare several."));
    return null;
  }
  const chosen = new Set((query.get("models") ?? "").split(",").filter((name) => names.includes(name)));
  if (!chosen.size) names.slice(-4).forEach((name) => chosen.add(name));
  const pick = (name) =>
    element("input", {
      type: "checkbox",
      checked: chosen.has(name),
      onchange: (event) => (event.target.checked ? chosen.add(name) : chosen.delete(name)),
    });
  const blind = element("input", { type: "checkbox", checked: localStorage.getItem("blind") === "1" });
  blind.addEventListener("change", () => localStorage.setItem("blind", blind.checked ? "1" : "0"));
  const relative = element("input", { type: "checkbox" });
  let controller = null;
  let rating = null;
  const hint = "Prompt: Enter sends it to all models";
  const { input, sender, bar } = composer("Prompt", hint, "Compare", run, () => controller, true);
  input.value = query.get("prompt") ?? "";
  const results = element("div", {});
  place.append(
    element(
      "div",
      { class: "row bar" },
      ...names.map((name) => element("label", { class: "check" }, pick(name), name)),
      element("label", { class: "check" }, blind, "Blind"),
      element("label", { class: "check" }, relative, `KL to ${names[0]}`),
    ),
    bar,
    results,
  );
  input.focus();

  async function run() {
    const prompt = input.value.trim();
    const models = names.filter((name) => chosen.has(name));
    if (!prompt) return;
    if (models.length < 2 || models.length > 4) {
      say("Choose two to four models", true);
      return;
    }
    rating?.end();
    history.replaceState(null, "", `#compare?${new URLSearchParams({ prompt, models: models.join() })}`);
    const own = (controller = new AbortController());
    sender.textContent = "Stop";
    say("");
    const hidden = blind.checked;
    const order = hidden ? shuffled(models.length) : [...models.keys()];
    const shown = cards(models, order, hidden);
    const messages = withSystem(prompt);
    const fields = sampling();
    results.replaceChildren(element("div", { class: "prompt" }, prompt), shown.grid);
    try {
      const answers = await shown.ask(messages, fields, own.signal);
      if (server.reward) await shown.score(messages, answers);
      if (relative.checked && !hidden) await shown.relate(names[0], messages, answers, own.signal);
      say(`Seed ${fields.seed}`);
      if (!own.signal.aborted && server.ratings && models.length === 2) offer(shown, messages, answers, order, hidden);
      else if (hidden) results.append(button("Show the names", () => shown.reveal(answers)));
    } catch (error) {
      say(error.message, true);
    }
    controller = null;
    sender.textContent = "Compare";
  }

  function offer(shown, messages, answers, order, hidden) {
    rating = choices({ messages, answers, order, blind: hidden }, () => {
      shown.reveal(answers);
      rating.end();
      rating.bar.replaceChildren(button("Undo", async () => (await undo()) && rating.bar.remove()));
    });
    results.append(rating.bar);
    sender.blur();
    input.blur();
  }

  return () => {
    controller?.abort();
    rating?.end();
  };
}

const AGAIN = 10; // one in so many prompts is repeated, to measure a rater's self-agreement

export function promptsIn(text) {
  const lines = text.split("\n").filter((line) => line.trim());
  return lines.map((line) => {
    try {
      const row = JSON.parse(line);
      return typeof row === "string" ? row : (row.prompt ?? row.question ?? row.messages?.[0]?.content ?? line);
    } catch {
      return line.trim();
    }
  });
}

export function rateView(place, server) {
  let controller = null;
  let rating = null;
  let queue = [];
  let at = 0;
  let rated = 0;
  const done = [];
  const names = server.models.map((model) => model.id);
  const pickers = [0, 1].map((at) => {
    const options = names.map((name) => element("option", {}, name));
    const picker = element("select", { "aria-label": `Model ${at + 1}` }, ...options);
    picker.value = names.at(at === 1 ? -1 : -2) ?? names[0];
    return picker;
  });
  const input = element("textarea", { rows: 5, "aria-label": "Prompts", placeholder: "One prompt per line, or lines of a .jsonl file, each with a prompt" });
  input.value = localStorage.getItem("prompts") ?? "";
  const file = element("input", { type: "file", accept: ".txt,.jsonl", "aria-label": "File of prompts" });
  file.addEventListener("change", async () => (input.value = await file.files[0].text()));
  const summary = element("p", { class: "hint" });
  const begin = element(
    "div",
    { class: "talk" },
    element("p", { class: "hint" }, "Two responses to each prompt, without names and in random order. 1 and 2 choose, 3 is a tie, 4 both bad, S skips, U undoes. Two samples of one model can be compared, too."),
    element("p", { class: "hint" }, "Each choice is a preference: step 2 trains a reward model on them, --method dpo the model itself, and step 1 on the better responses. Ties and both bad train nothing."),
    element("div", { class: "row bar" }, ...pickers, button("Begin", () => start(), { class: "main" })),
    input,
    element("div", { class: "row bar" }, file),
    summary,
  );
  const stage = element("div", { hidden: true });
  place.append(begin, stage);
  summarize();

  async function summarize() {
    try {
      summary.textContent = sentence(await get("/api/ratings/summary"));
    } catch (error) {
      say(error.message, true);
    }
  }

  function sentence(found) {
    const parts = [`${found.ratings} ratings in ${found.path}`];
    if (found.left !== null) parts.push(`of ${found.blind} blind choices ${Math.round(100 * found.left)} % chose the left response`);
    if (found.self_agreement !== null) parts.push(`raters agree with themselves ${Math.round(100 * found.self_agreement)} % of the time`);
    if (found.kappa !== null) parts.push(`and with each other with a kappa of ${found.kappa.toFixed(2)}`);
    return `${parts.join("; ")}. To train on them: train.py --step 2 --data-path ${found.path}`;
  }

  function start() {
    const prompts = promptsIn(input.value);
    if (!prompts.length) {
      say("Enter at least one prompt", true);
      return;
    }
    localStorage.setItem("prompts", input.value.slice(0, 200_000));
    queue = prompts;
    at = rated = 0;
    begin.hidden = true;
    stage.hidden = false;
    next();
  }

  async function next() {
    rating?.end();
    if (at >= queue.length) return finish();
    // Repeat an earlier pair with its responses, in a new order.
    const repeats = done.length >= AGAIN && done.length % AGAIN === 0 && !done.at(-1).again;
    const old = repeats ? done[done.length - AGAIN] : null;
    const models = old?.models ?? pickers.map((picker) => picker.value);
    const messages = old?.messages ?? withSystem(queue[at]);
    const order = shuffled(2);
    const shown = cards(models, order, true);
    const own = (controller = new AbortController());
    const title = `${at + 1} of ${queue.length}, ${rated} rated`;
    const leave = button("End", finish);
    stage.replaceChildren(
      element("div", { class: "row bar" }, title, leave),
      element("div", { class: "prompt" }, messages.at(-1).content),
      shown.grid,
    );
    document.activeElement?.blur();
    try {
      const fields = { ...sampling(), seed: drawSeed() };
      const answers = old?.answers ?? (await shown.ask(messages, fields, own.signal, models[0] === models[1]));
      if (own.signal.aborted) return;
      if (old) shown.show(answers);
      offer(messages, models, answers, order, Boolean(old));
    } catch (error) {
      say(error.message, true);
    }
  }

  function offer(messages, models, answers, order, again) {
    const step = () => {
      if (!again) at += 1;
      next();
    };
    const others = [
      ["s", "Skip", step],
      ["u", "Undo", back],
    ];
    const count = () => {
      rated += 1;
      done.push({ messages, models, answers, again });
      step();
    };
    rating = choices({ messages, answers, order, blind: true }, count, others);
    stage.append(rating.bar);
  }

  async function back() {
    try {
      if (!(await undo())) return;
      rated -= 1;
      if (!done.pop()?.again) at = Math.max(0, at - 1);
      next();
    } catch (error) {
      say(error.message, true);
    }
  }

  async function finish() {
    controller?.abort();
    rating?.end();
    stage.hidden = true;
    begin.hidden = false;
    say(`${rated} rated`);
    await summarize();
  }

  return () => {
    controller?.abort();
    rating?.end();
  };
}
