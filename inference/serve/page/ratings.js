// Ratings: responses side by side, buttons to choose, and requests to the server.

import { button, element, formatLength, post, rater, requestResponse, showStatus, system, tokenSpans } from "./common.js";
import { markdown } from "./markdown.js";

const ratingIds = [];

export function makeMessages(prompt) {
  const messages = [{ role: "user", content: prompt }];
  return system() ? [{ role: "system", content: system() }, ...messages] : messages;
}

export async function rate(rating) {
  const answers = rating.answers.map(({ tokens, ...answer }) => answer);
  const { id } = await post("/api/ratings", { rater: rater(), ...rating, answers });
  ratingIds.push(id);
  return id;
}

export async function undo() {
  const id = ratingIds.at(-1);
  if (!id) {
    showStatus("Nothing to undo");
    return false;
  }
  await post("/api/ratings/undo", { id, rater: rater() });
  ratingIds.pop();
  showStatus("Undid the last rating");
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
      showStatus(error.message, true);
      return;
    }
    good.setAttribute("aria-pressed", String(id !== null && up));
    bad.setAttribute("aria-pressed", String(id !== null && !up));
    showStatus(id ? "Rated" : "Removed the rating");
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
      showStatus("Saved as a demonstration");
    } catch (error) {
      showStatus(error.message, true);
    }
  });
  return element("span", { class: "row" }, good, bad, write, better);
}

const LETTERS = ["A", "B", "C", "D"];

export function shuffledIndices(count) {
  const order = [...Array(count).keys()];
  for (let last = count - 1; last > 0; last--) {
    const index = crypto.getRandomValues(new Uint32Array(1))[0] % (last + 1);
    [order[last], order[index]] = [order[index], order[last]];
  }
  return order;
}

// Builds one column per model, and returns functions that fill the columns. `order` maps columns to models.
export function responseColumns(models, order, hidden) {
  const columns = order.map((model, column) => ({
    name: element("h2", {}, hidden ? LETTERS[column] : `${LETTERS[column]}: ${models[model]}`),
    text: element("div", { class: "text" }),
    foot: element("div", { class: "foot" }),
  }));
  const grid = element(
    "div",
    { class: "columns" },
    ...columns.map(({ name, text, foot }) => element("article", { class: "card" }, name, text, foot)),
  );
  grid.style.setProperty("--count", String(models.length));

  async function request(model, messages, fields, signal) {
    const column = columns[order.indexOf(model)];
    column.text.textContent = "…";
    const onText = (answer) => column.text.replaceChildren(...markdown(answer.text.trim()));
    const answer = await requestResponse(models[model], messages, fields, { signal, onText });
    show(model, answer);
    return answer;
  }

  function show(model, answer) {
    const column = columns[order.indexOf(model)];
    column.text.replaceChildren(...markdown(answer.text.trim()));
    column.foot.textContent = formatLength(answer);
  }

  return {
    grid,
    // All models get the same seed, or consecutive ones if `separateSeeds`.
    requestAll: (messages, fields, signal, separateSeeds = false) =>
      Promise.all(
        models.map((_, model) =>
          request(model, messages, separateSeeds ? { ...fields, seed: fields.seed + model } : fields, signal),
        ),
      ),
    async score(messages, answers) {
      await Promise.all(
        answers.map(async (answer, model) => {
          if (answer.text.trim() === "") return;
          const dialogue = [...messages, { role: "assistant", content: answer.text.trim() }];
          answer.score = (await post("/v1/score", { messages: dialogue })).score;
          if (!hidden) columns[order.indexOf(model)].foot.append(` · score ${answer.score.toFixed(2)}`);
        }),
      );
    },
    async showKl(reference, messages, answers, signal) {
      await Promise.all(
        answers.map(async (answer, model) => {
          if (answer.model === reference || !answer.token_ids.length) return;
          const { tokens, summary } = await compareTokens(answer, messages, reference, signal);
          const column = columns[order.indexOf(model)];
          column.text.append(tokenSpans(tokens));
          column.foot.append(summary);
        }),
      );
    },
    reveal(answers) {
      columns.forEach((column, index) => {
        column.name.textContent = `${LETTERS[index]}: ${models[order[index]]}`;
        const score = answers?.[order[index]].score;
        if (hidden && score !== undefined) column.foot.append(` · score ${score.toFixed(2)}`);
      });
    },
  };
}

const CHOICES = [
  ["1", "A is better", { column: 0 }],
  ["2", "B is better", { column: 1 }],
  ["3", "Tie", { tie: true }],
  ["4", "Both bad", { bad: true }],
];

// Buttons to rate a pair, with keyboard shortcuts; `extraActions` adds more as [key, label, action].
export function ratingBar({ messages, answers, order, blind }, onRated, extraActions = []) {
  const start = performance.now();
  const strength = element(
    "select",
    { "aria-label": "How much better" },
    ...["a little", "clearly", "by far"].map((label, index) => element("option", { value: index + 1 }, label)),
  );
  let isSending = false;
  const choose = async (choice) => {
    if (isSending) return;
    isSending = true;
    const rating = { kind: "pair", messages, answers, shown: order, blind, choice: null, tie: Boolean(choice.tie) };
    rating.seconds = (performance.now() - start) / 1000;
    if ("column" in choice) Object.assign(rating, { choice: order[choice.column], strength: Number(strength.value) });
    try {
      await rate(rating);
      showStatus("Rated");
      onRated();
    } catch (error) {
      showStatus(error.message, true);
    }
    isSending = false;
  };
  const actions = [...CHOICES.map(([key, label, choice]) => [key, label, () => choose(choice)]), ...extraActions];
  const bar = element(
    "div",
    { class: "row choices", role: "group", "aria-label": "Rating" },
    ...actions.map(([key, label, action]) => button(element("span", {}, `${label} `, element("kbd", {}, key)), action)),
    strength,
  );
  const onKeydown = (event) => {
    const isTyping = event.target.closest("input, textarea, select");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || bar.hidden) return;
    const match = actions.find(([key]) => key === event.key.toLowerCase());
    if (match) {
      event.preventDefault();
      match[2]();
    }
  };
  addEventListener("keydown", onKeydown);
  return { bar, end: () => removeEventListener("keydown", onKeydown) };
}

// Returns the response's tokens, tinted by log(p / p_reference), and a text with their sum, which estimates the KL.
async function compareTokens(answer, messages, reference, signal) {
  const { tokens: prompt } = await post("/tokenize", { model: answer.model, messages }, signal);
  const body = { prompt: [...prompt, ...answer.token_ids], echo: true, max_tokens: 0, logprobs: 0 };
  const score = async (model) => (await post("/v1/completions", { model, ...body }, signal)).choices[0].logprobs;
  const [scored, baseline] = await Promise.all([score(answer.model), score(reference)]);
  if (scored.tokens.some((token, index) => token !== baseline.tokens[index])) {
    throw new Error(`${answer.model} and ${reference} have different tokens, so their KL can't be computed`);
  }
  let sum = 0;
  const tokens = scored.tokens.slice(prompt.length).map((token, index) => {
    const ratio = scored.token_logprobs[prompt.length + index] - baseline.token_logprobs[prompt.length + index];
    const level = [0.5, 1.5, 3].filter((limit) => Math.abs(ratio) >= limit).length;
    sum += ratio;
    const title = `${JSON.stringify(token)} ${ratio.toFixed(2)} nats, ${sum.toFixed(2)} so far`;
    return { token, level, less: ratio < 0, title };
  });
  const mean = (sum / tokens.length).toFixed(3);
  return { tokens, summary: ` · KL to ${reference} ${sum.toFixed(2)} nats, ${mean} per token` };
}
