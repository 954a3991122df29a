// Shows the selected view. Each view is a function that fills its element and returns its cleanup function.

import { chatView } from "./chat.js";
import { RequestError, get, initialize, showStatus, settings } from "./common.js";
import { compareView, rateView } from "./compare.js";

const VIEWS = { chat: chatView, compare: compareView, rate: rateView };
let cleanUp = () => {};
let latestRequest = 0;

async function show() {
  cleanUp();
  cleanUp = () => {};
  settings.hidePopover();
  showStatus("");
  const request = ++latestRequest;
  const container = document.getElementById("view");
  container.replaceChildren();
  try {
    const server = await get("/api/server");
    if (request !== latestRequest) return; // another view was selected in the meantime
    settings.elements.max_tokens.placeholder = server.max_tokens;
    const [name, query] = location.hash.slice(1).split("?");
    const view = VIEWS[name] ? name : "chat";
    document.title = view[0].toUpperCase() + view.slice(1);
    document.getElementById("title").textContent = document.title; // for screen readers
    for (const link of document.querySelectorAll("nav a")) {
      const target = link.getAttribute("href").slice(1);
      link.hidden = target === "rate" && !server.ratings;
      if (target === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    cleanUp = VIEWS[view](container, server, new URLSearchParams(query)) ?? (() => {});
  } catch (error) {
    if (!(error instanceof RequestError) && error.name !== "TypeError") throw error;
    showStatus(error instanceof RequestError ? error.message : "the server can't be reached", true);
  }
}

initialize();
addEventListener("hashchange", show);
settings.elements.key.addEventListener("change", show);
show();
