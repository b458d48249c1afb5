// The tabs: arrow keys move between them, and the address says which one is open.

import { startData } from "./data.js";
import { startDraw } from "./draw.js";
import { startFunctions } from "./functions.js";

// The token has become a cookie: it need not stay in the address, where others could read it.
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);

const tabs = [...document.querySelectorAll('[role="tab"]')];
const starts = { functions: startFunctions, draw: startDraw, data: startData };
const started = new Set();

function open(name, focus = false) {
  const chosen = tabs.find((tab) => tab.getAttribute("aria-controls") === name) ?? tabs[0];
  for (const tab of tabs) {
    const is = tab === chosen;
    tab.setAttribute("aria-selected", is);
    tab.tabIndex = is ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = !is;
  }
  const own = chosen.getAttribute("aria-controls");
  if (!started.has(own)) {
    started.add(own);
    starts[own]();
  }
  if (focus) chosen.focus();
}

function go(tab) {
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  open(tab.getAttribute("aria-controls"), true);
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => go(tab));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    go(tabs[(to + tabs.length) % tabs.length]);
  });
}
addEventListener("hashchange", () => open(location.hash.slice(1)));
open(location.hash.slice(1));
