// Elements made one by one: whatever a model writes becomes a text node.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null && child !== false));
  return made;
}

export function button(label, onclick, attributes = {}) {
  return element("button", { type: "button", onclick, ...attributes }, label);
}

export function say(text, bad = false) {
  const status = document.getElementById("status");
  status.textContent = text;
  status.classList.toggle("bad", bad);
}

// Text with fenced blocks and `code` set apart; nothing else of Markdown is read.
export function rich(text) {
  const parts = [];
  text.split(/^```[^\n]*\n?/m).forEach((block, number) => {
    if (number % 2) {
      parts.push(element("pre", {}, block.replace(/\n$/, "")));
      return;
    }
    block.split(/(`[^`\n]+`)/).forEach((piece) => {
      const isCode = /^`[^`\n]+`$/.test(piece);
      if (piece) parts.push(isCode ? element("code", {}, piece.slice(1, -1)) : piece);
    });
  });
  return parts;
}
