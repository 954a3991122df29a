// A run as it learns, from its files: curves, alarms, samples. The server reads, this draws.

import { get } from "./api.js";
import { button, element, say } from "./dom.js";

const EVERY = 2000; // milliseconds between two looks
const COLORS = ["#1a5fb4", "#c2540a"];
const DARK = ["#8ab8f5", "#f0a36b"];

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
  let chosen = null;
  let timer = null;
  let ended = false;
  let version = "";
  const drawn = new Map();

  async function look() {
    clearTimeout(timer);
    try {
      const seen = await get(`/api/watch?${new URLSearchParams({ step: chosen ?? "", version })}`);
      if (ended) return;
      if (!seen.unchanged) {
        version = seen.version;
        draw(seen);
      }
      say(seen.notice ?? "");
    } catch (error) {
      say(error.message, true);
    }
    if (!ended) timer = setTimeout(look, EVERY);
  }

  function choose(name) {
    chosen = name;
    version = "";
    drawn.clear();
    charts.replaceChildren();
    look();
  }

  function draw(seen) {
    if (chosen !== seen.step) drawn.clear(), charts.replaceChildren();
    chosen = seen.step;
    steps.replaceChildren(
      ...seen.steps.map((each) =>
        button(`${each.name} · ${each.state}`, () => choose(each.name), { "aria-pressed": String(each.name === chosen) }),
      ),
    );
    alarms.replaceChildren(...seen.alarms.map((sentence) => element("p", { class: "alarm" }, sentence)));
    for (const chart of seen.charts) drawChart(chart);
    samples.replaceChildren(...(seen.samples.length ? [sampleTable(seen.samples)] : []));
  }

  function drawChart(chart) {
    let parts = drawn.get(chart.title);
    if (!parts) {
      const canvas = element("canvas", { role: "img" });
      const last = element("span", {});
      const card = element("div", { class: "card" }, element("h2", {}, chart.title, last), canvas, element("p", {}, chart.note));
      parts = { canvas, last };
      drawn.set(chart.title, parts);
      charts.append(card);
    }
    const ends = chart.curves.map((curve) => `${short(curve.points.at(-1)[1], 4)}`);
    parts.last.textContent = ends.join(" / ");
    const names = chart.curves.map((curve, at) => `${curve.name} ${ends[at]}`).join(", ");
    parts.canvas.setAttribute("aria-label", `${chart.title} by step; last ${names}`);
    paint(parts.canvas, chart);
  }

  const repaint = () => {
    version = "";
    look();
  };
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  addEventListener("resize", repaint);
  scheme.addEventListener("change", repaint);
  look();
  return () => {
    ended = true;
    clearTimeout(timer);
    removeEventListener("resize", repaint);
    scheme.removeEventListener("change", repaint);
  };
}

function sampleTable(samples) {
  const models = Object.keys(samples[0].answers);
  const head = element("tr", {}, element("th", {}, "Prompt"), ...models.map((name) => element("th", {}, name)));
  const rows = samples.map((sample) =>
    element("tr", {}, element("td", {}, sample.prompt), ...models.map((name) => element("td", {}, sample.answers[name] ?? ""))),
  );
  return element("div", { class: "card" }, element("h2", {}, "Held-out prompts"), element("table", {}, head, ...rows));
}

function paint(canvas, { curves, logarithmic }) {
  const scale = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.body);
  const dim = style.getPropertyValue("--dim");
  const colors = matchMedia("(prefers-color-scheme: dark)").matches ? DARK : COLORS;
  const size = (value) => (logarithmic ? Math.log10(Math.max(value, 1e-12)) : value);
  const all = curves.flatMap((curve) => curve.points);
  const [left, right] = extent(all.map(([step]) => step));
  const [low, high] = extent(all.map(([, value]) => size(value)));
  const inner = { left: 48, right: width - 6, top: 8, bottom: height - 18 };
  const x = (step) => inner.left + ((step - left) / (right - left)) * (inner.right - inner.left);
  const y = (value) => inner.bottom - ((size(value) - low) / (high - low)) * (inner.bottom - inner.top);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = dim;
  context.strokeStyle = style.getPropertyValue("--line");
  for (const share of [0, 0.5, 1]) {
    const value = low + share * (high - low);
    const place = inner.bottom - share * (inner.bottom - inner.top);
    context.fillText(short(logarithmic ? 10 ** value : value), 2, place + 4);
    context.beginPath();
    context.moveTo(inner.left, place);
    context.lineTo(inner.right, place);
    context.stroke();
  }
  context.fillText(`step ${left}`, inner.left, height - 4);
  context.textAlign = "right";
  context.fillText(String(right), inner.right, height - 4);
  curves.forEach(({ points }, at) => {
    context.strokeStyle = colors[at % colors.length];
    context.lineWidth = 1.6;
    context.beginPath();
    points.forEach(([step, value], index) => context[index ? "lineTo" : "moveTo"](x(step), y(value)));
    context.stroke();
  });
}

function short(value, digits = 3) {
  return String(Number(value.toPrecision(digits)));
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low < high ? [low, high] : [low - 0.5, low + 0.5];
}
