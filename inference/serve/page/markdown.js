// Renders Markdown as elements: headings, lists, tables, code, bold and italics. Model output becomes text nodes.

import { element } from "./common.js";

const FENCE = /^ *(```+|~~~+)/;
const HEADING = /^ *#{1,6} +/;
const ITEM = /^ *(?:[-*+]|(\d{1,9})[.)]) +/;
const DIVIDER = /^[ |:]*-[-|: ]*$/;
// Each span ends at its own delimiter, so that the time is linear in the text.
const SPANS = /`([^`]+)`|\*\*((?:[^*]|\*(?!\*))+)\*\*|(?<![\w*])\*([^*\s](?:[^*]*[^*\s])?)\*(?![\w*])/g;
const MAX_DEPTH = 8; // nested lists

const indent = (line) => line.search(/\S|$/);
const beginsTable = (line, below) => line.includes("|") && DIVIDER.test(below ?? "");

export function markdown(text, depth = 0) {
  const lines = text.split("\n");
  const nodes = [];
  // Removes and returns the next lines that belong to a block.
  const takeWhile = (belongs) => {
    const end = lines.findIndex((line, index) => !belongs(line, lines[index + 1]));
    return lines.splice(0, end < 0 ? lines.length : end);
  };
  while (lines.length) {
    const line = lines.shift();
    const fence = line.match(FENCE)?.[1];
    const item = depth < MAX_DEPTH && line.match(ITEM);
    if (fence) {
      nodes.push(element("pre", {}, takeWhile((next) => !next.trim().startsWith(fence)).join("\n")));
      lines.shift();
    } else if (HEADING.test(line)) {
      nodes.push(element("h3", {}, ...spans(line.replace(HEADING, ""))));
    } else if (beginsTable(line, lines[0])) {
      const rows = takeWhile((next) => next.includes("|")).slice(1);
      nodes.push(element("table", {}, row("th", line), ...rows.map((cells) => row("td", cells))));
    } else if (item) {
      const isInside = (next) => {
        const other = next.match(ITEM);
        return indent(next) > indent(line) ? next.trim() : other && !other[1] === !item[1];
      };
      nodes.push(list([line, ...takeWhile((next, after) => isInside(next.trim() ? next : (after ?? "")))], item[1], depth));
    } else if (line.trim()) {
      const isText = (next, below) =>
        next.trim() && !beginsTable(next, below) && ![FENCE, HEADING, ITEM].some((pattern) => pattern.test(next));
      nodes.push(element("p", {}, ...spans([line, ...takeWhile(isText)].join("\n"))));
    }
  }
  return nodes;
}

function list(lines, start, depth) {
  const items = [];
  let width = 0;
  for (const line of lines) {
    const marker = indent(line) <= indent(lines[0]) + 1 && line.match(ITEM)?.[0];
    if (marker) items.push([line.slice((width = marker.length))]);
    else items.at(-1).push(line.slice(Math.min(indent(line), width)));
  }
  const nodes = items.map((item) => element("li", {}, ...markdown(item.join("\n"), depth + 1)));
  return element(start ? "ol" : "ul", { start }, ...nodes);
}

function row(tag, line) {
  const cells = line.trim().replace(/^\||\|$/g, "").split("|");
  return element("tr", {}, ...cells.map((cell) => element(tag, {}, ...spans(cell.trim()))));
}

function spans(text) {
  const nodes = [];
  let end = 0;
  for (const { 0: all, 1: code, 2: strong, 3: em, index } of text.matchAll(SPANS)) {
    const inner = code ? [code] : spans(strong ?? em);
    nodes.push(text.slice(end, index), element(code ? "code" : strong ? "strong" : "em", {}, ...inner));
    end = index + all.length;
  }
  return [...nodes, text.slice(end)];
}
