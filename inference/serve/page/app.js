// Shows the selected view. Each view is a function that fills its element and returns its cleanup function.

import { chatView } from "./chat.js";
import { Refused, get, initialize, say, settings } from "./common.js";
import { compareView, rateView } from "./compare.js";

const VIEWS = { chat: chatView, compare: compareView, rate: rateView };
let leave = () => {};
let latest = 0;

async function show() {
  leave();
  leave = () => {};
  settings.hidePopover();
  say("");
  const own = ++latest;
  const place = document.getElementById("view");
  place.replaceChildren();
  try {
    const server = await get("/api/server");
    if (own !== latest) return; // another view was selected in the meantime
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
    leave = VIEWS[view](place, server, new URLSearchParams(query)) ?? (() => {});
  } catch (error) {
    if (!(error instanceof Refused) && error.name !== "TypeError") throw error;
    say(error instanceof Refused ? error.message : "the server can't be reached", true);
  }
}

initialize();
addEventListener("hashchange", show);
settings.elements.key.addEventListener("change", show);
show();
