// Renders Markdown as elements: headings, lists, tables, code, bold and italics. Model output becomes text nodes.

import { element } from "./common.js";

const FENCE = /^ *(```+|~~~+)/;
const HEADING = /^ *#{1,6} +/;
const ITEM = /^ *(?:[-*+]|(\d{1,9})[.)]) +/;
const DIVIDER = /^[ |:]*-[-|: ]*$/;
// Each span ends at its own delimiter, so that the time is linear in the text.
const SPANS = /`([^`]+)`|\*\*((?:[^*]|\*(?!\*))+)\*\*|(?<![\w*])\*([^*\s](?:[^*]*[^*\s])?)\*(?![\w*])/g;
const DEEPEST = 8; // nested lists

const indent = (line) => line.search(/\S|$/);
const beginsTable = (line, below) => line.includes("|") && DIVIDER.test(below ?? "");

export function markdown(text, depth = 0) {
  const lines = text.split("\n");
  const made = [];
  // Takes the next lines that belong to a block.
  const take = (belongs) => {
    const end = lines.findIndex((line, at) => !belongs(line, lines[at + 1]));
    return lines.splice(0, end < 0 ? lines.length : end);
  };
  while (lines.length) {
    const line = lines.shift();
    const fence = line.match(FENCE)?.[1];
    const item = depth < DEEPEST && line.match(ITEM);
    if (fence) {
      made.push(element("pre", {}, take((next) => !next.trim().startsWith(fence)).join("\n")));
      lines.shift();
    } else if (HEADING.test(line)) {
      made.push(element("h3", {}, ...spans(line.replace(HEADING, ""))));
    } else if (beginsTable(line, lines[0])) {
      const rows = take((next) => next.includes("|")).slice(1);
      made.push(element("table", {}, row("th", line), ...rows.map((each) => row("td", each))));
    } else if (item) {
      const isInside = (next) => {
        const other = next.match(ITEM);
        return indent(next) > indent(line) ? next.trim() : other && !other[1] === !item[1];
      };
      made.push(list([line, ...take((next, after) => isInside(next.trim() ? next : (after ?? "")))], item[1], depth));
    } else if (line.trim()) {
      const isText = (next, below) =>
        next.trim() && !beginsTable(next, below) && ![FENCE, HEADING, ITEM].some((each) => each.test(next));
      made.push(element("p", {}, ...spans([line, ...take(isText)].join("\n"))));
    }
  }
  return made;
}

function list(lines, start, depth) {
  const items = [];
  let width = 0;
  for (const line of lines) {
    const marker = indent(line) <= indent(lines[0]) + 1 && line.match(ITEM)?.[0];
    if (marker) items.push([line.slice((width = marker.length))]);
    else items.at(-1).push(line.slice(Math.min(indent(line), width)));
  }
  const made = items.map((each) => element("li", {}, ...markdown(each.join("\n"), depth + 1)));
  return element(start ? "ol" : "ul", { start }, ...made);
}

function row(tag, line) {
  const cells = line.trim().replace(/^\||\|$/g, "").split("|");
  return element("tr", {}, ...cells.map((cell) => element(tag, {}, ...spans(cell.trim()))));
}

function spans(text) {
  const made = [];
  let end = 0;
  for (const { 0: all, 1: code, 2: strong, 3: em, index } of text.matchAll(SPANS)) {
    const inner = code ? [code] : spans(strong ?? em);
    made.push(text.slice(end, index), element(code ? "code" : strong ? "strong" : "em", {}, ...inner));
    end = index + all.length;
  }
  return [...made, text.slice(end)];
}
