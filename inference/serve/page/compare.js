// Two views: one prompt sent to two to four models, and blind ratings of pairs of responses to a list of prompts.

import { button, composer, drawSeed, element, get, samplingFields, showStatus } from "./common.js";
import { makeMessages, ratingBar, responseColumns, shuffledIndices, undo } from "./ratings.js";

// All models get the same seed; names can be hidden to avoid bias.
export function compareView(container, server, query) {
  const names = server.models.map((model) => model.id);
  if (names.length < 2) {
    container.append(element("p", { class: "hint" }, "Only one model is served. To compare several, start the server with --run OUT or with more than one --path."));
    return null;
  }
  const chosen = new Set((query.get("models") ?? "").split(",").filter((name) => names.includes(name)));
  if (!chosen.size) names.slice(-4).forEach((name) => chosen.add(name));
  const checkbox = (name) =>
    element("input", {
      type: "checkbox",
      checked: chosen.has(name),
      onchange: (event) => (event.target.checked ? chosen.add(name) : chosen.delete(name)),
    });
  const blind = element("input", { type: "checkbox", checked: localStorage.getItem("blind") === "1" });
  blind.addEventListener("change", () => localStorage.setItem("blind", blind.checked ? "1" : "0"));
  const klCheckbox = element("input", { type: "checkbox" });
  let controller = null;
  let rating = null;
  const hint = "Prompt: Enter sends it to the chosen models";
  const { input, sendButton, bar } = composer("Prompt", hint, "Compare", run, () => controller, true);
  input.value = query.get("prompt") ?? "";
  const results = element("div", {});
  container.append(
    element(
      "div",
      { class: "row bar" },
      ...names.map((name) => element("label", { class: "check" }, checkbox(name), name)),
      element("label", { class: "check" }, blind, "Blind"),
      element("label", { class: "check" }, klCheckbox, `KL to ${names[0]}`),
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
      showStatus("Choose two to four models", true);
      return;
    }
    rating?.end();
    history.replaceState(null, "", `#compare?${new URLSearchParams({ prompt, models: models.join() })}`);
    const current = (controller = new AbortController());
    sendButton.textContent = "Stop";
    showStatus("");
    const isBlind = blind.checked;
    const order = isBlind ? shuffledIndices(models.length) : [...models.keys()];
    const panel = responseColumns(models, order, isBlind);
    const messages = makeMessages(prompt);
    const fields = samplingFields();
    results.replaceChildren(element("div", { class: "prompt" }, prompt), panel.grid);
    try {
      const answers = await panel.requestAll(messages, fields, current.signal);
      if (server.reward) await panel.score(messages, answers);
      if (klCheckbox.checked && !isBlind) await panel.showKl(names[0], messages, answers, current.signal);
      showStatus(`Seed ${fields.seed}`);
      if (!current.signal.aborted && server.ratings && models.length === 2) showRating(panel, messages, answers, order, isBlind);
      else if (isBlind) results.append(button("Show the names", () => panel.reveal(answers)));
    } catch (error) {
      showStatus(error.message, true);
    }
    controller = null;
    sendButton.textContent = "Compare";
  }

  function showRating(panel, messages, answers, order, isBlind) {
    rating = ratingBar({ messages, answers, order, blind: isBlind }, () => {
      panel.reveal(answers);
      rating.end();
      rating.bar.replaceChildren(button("Undo", async () => (await undo()) && rating.bar.remove()));
    });
    results.append(rating.bar);
    sendButton.blur();
    input.blur();
  }

  return () => {
    controller?.abort();
    rating?.end();
  };
}

export function parsePrompts(text) {
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

export function rateView(container, server) {
  let controller = null;
  let rating = null;
  let queue = [];
  let index = 0;
  let numRated = 0;
  const names = server.models.map((model) => model.id);
  const pickers = [0, 1].map((side) => {
    const options = names.map((name) => element("option", {}, name));
    const picker = element("select", { "aria-label": `Model ${side + 1}` }, ...options);
    picker.value = names.at(side === 1 ? -1 : -2) ?? names[0];
    return picker;
  });
  const input = element("textarea", { rows: 5, "aria-label": "Prompts", placeholder: "One prompt per line, as text or as a line of a .jsonl file" });
  input.value = localStorage.getItem("prompts") ?? "";
  const file = element("input", { type: "file", accept: ".txt,.jsonl", "aria-label": "File of prompts" });
  file.addEventListener("change", async () => (input.value = await file.files[0].text()));
  const summary = element("p", { class: "hint" });
  const startPanel = element(
    "div",
    { class: "talk" },
    element("p", { class: "hint" }, "You see two responses to each prompt, without names and in random order. 1 and 2 choose a response, 3 is a tie, 4 means both are bad, S skips, and U undoes. You can also compare two samples from one model."),
    element("p", { class: "hint" }, "Each choice is a preference: step 2 trains a reward model on it, --method dpo trains the model itself on it, and step 1 trains on the better response. Ties and pairs rated “both bad” are not used for training."),
    element("div", { class: "row bar" }, ...pickers, button("Begin", () => start(), { class: "main" })),
    input,
    element("div", { class: "row bar" }, file),
    summary,
  );
  const stage = element("div", { hidden: true });
  container.append(startPanel, stage);
  summarize();

  async function summarize() {
    try {
      summary.textContent = describeRatings(await get("/api/ratings/summary"));
    } catch (error) {
      showStatus(error.message, true);
    }
  }

  function describeRatings(statistics) {
    const number = `${statistics.ratings} ratings in ${statistics.path}, ${statistics.pairs} of them pairs`;
    return `${number}. To train on them: train.py --step 2 --data-path ${statistics.path}`;
  }

  function start() {
    const prompts = parsePrompts(input.value);
    if (!prompts.length) {
      showStatus("Enter at least one prompt", true);
      return;
    }
    localStorage.setItem("prompts", input.value.slice(0, 200_000));
    queue = prompts;
    index = numRated = 0;
    startPanel.hidden = true;
    stage.hidden = false;
    next();
  }

  async function next() {
    rating?.end();
    if (index >= queue.length) return finish();
    const models = pickers.map((picker) => picker.value);
    const messages = makeMessages(queue[index]);
    const order = shuffledIndices(2);
    const panel = responseColumns(models, order, true);
    const current = (controller = new AbortController());
    stage.replaceChildren(
      element("div", { class: "row bar" }, `${index + 1} of ${queue.length}, ${numRated} rated`, button("End", finish)),
      element("div", { class: "prompt" }, messages.at(-1).content),
      panel.grid,
    );
    document.activeElement?.blur();
    try {
      const fields = { ...samplingFields(), seed: drawSeed() };
      const answers = await panel.requestAll(messages, fields, current.signal, models[0] === models[1]);
      if (current.signal.aborted) return;
      showRating(messages, answers, order);
    } catch (error) {
      showStatus(error.message, true);
    }
  }

  function showRating(messages, answers, order) {
    const advance = () => {
      index += 1;
      next();
    };
    const extraActions = [
      ["s", "Skip", advance],
      ["u", "Undo", undoLast],
    ];
    const record = () => {
      numRated += 1;
      advance();
    };
    rating = ratingBar({ messages, answers, order, blind: true }, record, extraActions);
    stage.append(rating.bar);
  }

  async function undoLast() {
    try {
      if (!(await undo())) return;
      numRated -= 1;
      index = Math.max(0, index - 1);
      next();
    } catch (error) {
      showStatus(error.message, true);
    }
  }

  async function finish() {
    controller?.abort();
    rating?.end();
    stage.hidden = true;
    startPanel.hidden = false;
    showStatus(`${numRated} rated`);
    await summarize();
  }

  return () => {
    controller?.abort();
    rating?.end();
  };
}
