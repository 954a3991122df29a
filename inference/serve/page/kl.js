// How far a response is from another model: what both say of the same tokens, in nats.

import { post } from "./api.js";
import { element } from "./dom.js";

// The response's tokens, tinted by log p / p_reference, and their sum, which estimates KL, in words.
export async function related(answer, messages, reference, signal) {
  const { tokens: prompt } = await post("/tokenize", { model: answer.model, messages }, signal);
  const body = { prompt: [...prompt, ...answer.token_ids], echo: true, max_tokens: 0, logprobs: 0 };
  const say = async (model) => (await post("/v1/completions", { model, ...body }, signal)).choices[0].logprobs;
  const [own, other] = await Promise.all([say(answer.model), say(reference)]);
  if (own.tokens.some((token, at) => token !== other.tokens[at])) {
    throw new Error(`${answer.model} and ${reference} have different tokens`);
  }
  let sum = 0;
  const spans = own.tokens.slice(prompt.length).map((token, at) => {
    const ratio = own.token_logprobs[prompt.length + at] - other.token_logprobs[prompt.length + at];
    const level = [0.5, 1.5, 3].filter((limit) => Math.abs(ratio) >= limit).length;
    sum += ratio;
    const title = `${JSON.stringify(token)} ${ratio.toFixed(2)} nats, ${sum.toFixed(2)} until here`;
    return element("span", { class: `token t${level}${ratio < 0 ? " less" : ""}`, title }, token);
  });
  const mean = (sum / spans.length).toFixed(3);
  return { spans, words: ` · KL to ${reference} ${sum.toFixed(2)} nats, ${mean} a token` };
}
