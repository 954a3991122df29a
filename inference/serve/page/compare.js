// One prompt, two to four models, the same seed; blind where names would bias.

import { cards, choices, pairRating, shuffled } from "./cards.js";
import { button, element, say } from "./dom.js";
import { rate, undo, withSystem } from "./ratings.js";
import { sampling } from "./settings.js";

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
  const input = element("textarea", { rows: 2, "aria-label": "Prompt", placeholder: "Prompt: Enter asks every model" });
  input.value = query.get("prompt") ?? "";
  const results = element("div", {});
  const sender = button("Compare", () => (controller ? controller.abort() : run()), { class: "main" });
  let controller = null;
  let rating = null;

  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!controller) run();
  });
  place.append(
    element(
      "div",
      { class: "row bar" },
      ...names.map((name) => element("label", { class: "check" }, pick(name), name)),
      element("label", { class: "check" }, blind, "Blind"),
      element("label", { class: "check" }, relative, `KL to ${names[0]}`),
    ),
    element("div", { class: "composer wide" }, input, sender),
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
    const since = performance.now();
    rating = choices(
      async (choice, strength) => {
        const seconds = (performance.now() - since) / 1000;
        try {
          await rate(pairRating(messages, answers, order, choice, strength, hidden, seconds));
          shown.reveal(answers);
          rating.end();
          rating.bar.replaceChildren(button("Undo", async () => (await undo()) && rating.bar.remove()));
          say("Rated");
        } catch (error) {
          say(error.message, true);
        }
      },
    );
    results.append(rating.bar);
    sender.blur();
    input.blur();
  }

  return () => {
    controller?.abort();
    rating?.end();
  };
}
