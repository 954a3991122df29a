// A run in progress: the server reads its files and draws the report's charts; this page shows them.

import { button, element, get, say } from "./common.js";

const EVERY = 2000; // milliseconds between requests

export function watchView(place, server) {
  if (!server.watch) {
    place.append(element("p", { class: "hint" }, "No run is watched. Start the server with --watch OUT or --run OUT."));
    return null;
  }
  const steps = element("div", { class: "row bar", role: "group", "aria-label": "Steps" });
  const alarms = element("div", {});
  const charts = element("div", { class: "charts" });
  const samples = element("div", {});
  place.append(steps, alarms, charts, samples);
  let chosen = "";
  let version = "";
  let timer = null;
  let ended = false;

  async function look() {
    clearTimeout(timer);
    try {
      const seen = await get(`/api/watch?${new URLSearchParams({ step: chosen, version })}`);
      if (ended) return;
      if (!seen.unchanged) draw(seen);
      say(seen.notice ?? "");
    } catch (error) {
      say(error.message, true);
    }
    if (!ended) timer = setTimeout(look, EVERY);
  }

  function choose(name) {
    chosen = name;
    version = "";
    look();
  }

  function draw(seen) {
    chosen = seen.step;
    version = seen.version;
    steps.replaceChildren(
      ...seen.steps.map((each) =>
        button(`${each.name} · ${each.state}`, () => choose(each.name), { "aria-pressed": String(each.name === chosen) }),
      ),
    );
    alarms.replaceChildren(...seen.alarms.map((sentence) => element("p", { class: "alarm" }, sentence)));
    charts.replaceChildren(...seen.charts.map(chartCard));
    samples.replaceChildren(...(seen.samples.length ? [sampleTable(seen.samples)] : []));
  }

  look();
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}

function chartCard(chart) {
  const markup = chart.picture.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"');
  const picture = new DOMParser().parseFromString(markup, "image/svg+xml").documentElement;
  const names = chart.names.length > 1 ? chart.names.map((name, at) => element("span", { class: `key c${at}` }, name)) : [];
  const title = element("h2", {}, chart.title, element("span", {}, chart.last));
  return element("div", { class: "card" }, title, element("p", {}, chart.note, ...names), document.importNode(picture, true));
}

function sampleTable(samples) {
  const models = Object.keys(samples[0].answers);
  const head = element("tr", {}, element("th", {}, "Prompt"), ...models.map((name) => element("th", {}, name)));
  const rows = samples.map((sample) =>
    element("tr", {}, element("td", {}, sample.prompt), ...models.map((name) => element("td", {}, sample.answers[name] ?? ""))),
  );
  return element("div", { class: "card" }, element("h2", {}, "Held-out prompts"), element("table", {}, head, ...rows));
}
