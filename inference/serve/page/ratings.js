// Sending ratings, and taking the last one back.

import { post } from "./api.js";
import { button, element, say } from "./dom.js";
import { rater, system } from "./settings.js";

const sent = [];

export function withSystem(prompt) {
  const messages = [{ role: "user", content: prompt }];
  return system() ? [{ role: "system", content: system() }, ...messages] : messages;
}

export async function rate(rating) {
  const answers = rating.answers.map(({ tokens, ...answer }) => answer);
  const { id } = await post("/api/ratings", { rater: rater(), ...rating, answers });
  sent.push(id);
  return id;
}

export async function undo() {
  const id = sent.at(-1);
  if (!id) {
    say("There is nothing to undo");
    return false;
  }
  await post("/api/ratings/undo", { id, rater: rater() });
  sent.pop();
  say("The last rating is undone");
  return true;
}

// Two buttons below a response; pressing one again, or the other, replaces the rating.
export function thumbs(messages, answer) {
  let id = null;
  const press = async (event, up) => {
    const pressed = event.currentTarget.getAttribute("aria-pressed") === "true";
    try {
      if (id) await post("/api/ratings/undo", { id, rater: rater() });
      id = pressed ? null : await rate({ kind: "thumb", messages, answers: [answer], choice: up ? 1 : 0 });
    } catch (error) {
      say(error.message, true);
      return;
    }
    good.setAttribute("aria-pressed", String(id !== null && up));
    bad.setAttribute("aria-pressed", String(id !== null && !up));
    say(id ? "Rated" : "The rating is undone");
  };
  const good = button("Good", (event) => press(event, true), { "aria-pressed": "false" });
  const bad = button("Bad", (event) => press(event, false), { "aria-pressed": "false" });
  const better = element("textarea", { rows: 3, "aria-label": "Better response", hidden: true });
  const write = button("Write a better one", async () => {
    if (better.hidden) {
      better.hidden = false;
      better.value = answer.text.trim();
      write.textContent = "Save";
      better.focus();
      return;
    }
    try {
      await rate({ kind: "edit", messages, answers: [answer], edit: better.value.trim() });
      better.hidden = true;
      write.textContent = "Write a better one";
      say("Saved as a demonstration");
    } catch (error) {
      say(error.message, true);
    }
  });
  return element("span", { class: "row" }, good, bad, write, better);
}
