// Symbols with a few drawings each, and a pad whose drawing is named.

import { ask, create, later, latest, show } from "./calls.js";
import { Pad, paint } from "./pad.js";

const FEWEST = 2;
const MOST = 10;
const circle = Array.from({ length: 41 }, (_, i) => [0.5 + 0.36 * Math.sin(i * Math.PI / 20), 0.5 - 0.36 * Math.cos(i * Math.PI / 20)]);
const EXAMPLES = {
  ring: [circle],
  triangle: [[[0.5, 0.12], [0.86, 0.84], [0.14, 0.84], [0.5, 0.12]]],
  cross: [[[0.14, 0.14], [0.86, 0.86]], [[0.86, 0.14], [0.14, 0.86]]],
};

export function startDraw() {
  const list = document.getElementById("symbols");
  const bars = document.getElementById("bars");
  const status = document.getElementById("draw-status");
  const error = document.getElementById("draw-error");
  const addButton = document.getElementById("add-symbol");
  const symbols = [];
  let model = null;
  let task = null; // the last one adapted, with the version of the examples that it is of
  let examples = 0; // changes of the examples so far
  let made = 0; // symbols so far, for their names
  let changes = 0;

  const question = new Pad("What is this? Draw one of your symbols", soon);
  const clear = create("button", { type: "button", textContent: "Clear", onclick: () => question.clear() });
  clear.setAttribute("aria-label", "Clear the question");
  document.getElementById("question-pad").append(create("div", { className: "pad-box" }, question.canvas, clear));

  const examplesOf = (symbol) => (symbol.pad.strokes.length ? [...symbol.kept, symbol.pad.strokes] : symbol.kept);

  function addSymbol(name, kept = []) {
    if (symbols.length >= MOST) return null;
    made += 1;
    const symbol = { name: name ?? `symbol ${made}`, kept: [...kept] };
    const input = create("input", { type: "text", value: symbol.name, maxLength: 40 });
    input.setAttribute("aria-label", "Name of the symbol");
    input.addEventListener("input", () => {
      symbol.name = input.value.trim() || "(no name)";
      symbol.pad.name(`Example of ${symbol.name}`);
      drawBars();
      soon();
    });
    const remove = create("button", { type: "button", textContent: "Remove", className: "remove" });
    remove.addEventListener("click", () => {
      const index = symbols.indexOf(symbol);
      symbols.splice(index, 1);
      symbol.row.remove();
      count();
      changed();
      (symbols[Math.min(index, symbols.length - 1)]?.row.querySelector("input") ?? addButton).focus();
    });
    symbol.pad = new Pad(`Example of ${symbol.name}`, changed);
    const keep = create("button", { type: "button", textContent: "Add example", className: "keep" });
    keep.addEventListener("click", () => {
      if (!symbol.pad.strokes.length || symbol.kept.length >= 20) return;
      symbol.kept.push(symbol.pad.strokes);
      symbol.pad.clear();
      drawExamples(symbol);
    });
    const wipe = create("button", { type: "button", textContent: "Clear", onclick: () => symbol.pad.clear() });
    symbol.examples = create("div", { className: "examples" });
    symbol.row = create("div", { className: "symbol" },
      create("div", { className: "name" }, input, remove),
      create("div", { className: "pad-box" }, symbol.pad.canvas, create("div", { className: "bar" }, keep, wipe)),
      symbol.examples);
    symbol.row.setAttribute("role", "group");
    symbol.row.setAttribute("aria-label", "Symbol");
    list.append(symbol.row);
    symbols.push(symbol);
    drawExamples(symbol);
    count();
    return symbol;
  }

  function count() {
    addButton.disabled = symbols.length >= MOST;
    for (const symbol of symbols) symbol.row.querySelector(".remove").disabled = symbols.length <= FEWEST;
  }

  function drawExamples(symbol) {
    symbol.examples.replaceChildren(...symbol.kept.map((strokes, index) => {
      const canvas = create("canvas");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Example ${index + 1} of ${symbol.name}`);
      requestAnimationFrame(() => paint(canvas, strokes));
      const remove = create("button", { type: "button", textContent: "×" });
      remove.setAttribute("aria-label", `Remove example ${index + 1} of ${symbol.name}`);
      remove.addEventListener("click", () => {
        symbol.kept.splice(index, 1);
        drawExamples(symbol);
        changed();
      });
      return create("div", { className: "example" }, canvas, remove);
    }));
  }

  // Classes are called by number towards the server: two symbols may have the same name.
  function drawBars(probabilities = null) {
    const known = symbols.map((symbol, index) => [symbol, probabilities?.[index]]);
    const best = Math.max(...known.map(([, share]) => share ?? 0));
    while (bars.children.length > known.length) bars.lastChild.remove();
    while (bars.children.length < known.length) {
      const row = create("div", { className: "answer-row" }, create("span", { className: "label" }),
        create("div", { className: "track" }, create("div", { className: "fill" })), create("span", { className: "share" }));
      row.setAttribute("role", "listitem");
      bars.append(row);
    }
    known.forEach(([symbol, share], index) => {
      const row = bars.children[index];
      row.classList.toggle("best", share !== undefined && share === best);
      row.querySelector(".label").textContent = symbol.name;
      row.querySelector(".fill").style.width = `${100 * (share ?? 0)}%`;
      row.querySelector(".share").textContent = share === undefined ? "" : `${Math.round(100 * share)} %`;
    });
  }

  const guess = latest(async () => {
    const seen = changes;
    await answerQuestion();
    if (seen === changes) bars.setAttribute("aria-busy", "false");
  });

  // What is on the question's pad, by a task of these examples; it is adapted anew where the server has forgotten it.
  async function name(taught, version) {
    const drawings = [question.strokes];
    for (let again = false; ; again = true) {
      if (task?.version !== version) {
        const labels = taught.flatMap(([index, all]) => all.map(() => String(index)));
        const body = { model: model.name, drawings: taught.flatMap(([, all]) => all), labels };
        task = { version, id: (await ask("api/adapt", body)).task };
      }
      try {
        return (await ask("api/predict", { task: task.id, drawings })).predictions[0];
      } catch (problem) {
        if (problem.status !== 404 || again) throw problem;
        task = null;
      }
    }
  }

  async function answerQuestion() {
    const version = examples;
    const taught = symbols.map((symbol, index) => [index, examplesOf(symbol)]).filter(([, drawings]) => drawings.length);
    const missing = symbols.length - taught.length;
    if (taught.length < FEWEST || !question.strokes.length) {
      drawBars();
      show(error, "");
      if (taught.length < FEWEST) status.textContent = "Draw at least two of the symbols first.";
      else status.textContent = `Now draw one of them ${matchMedia("(max-width: 40rem)").matches ? "above" : "on the left"}.`;
      return;
    }
    try {
      if (model === null) model = (await ask("api/models")).find((one) => one.kind === "drawings");
      if (!model) throw new Error("No model of drawings is served.");
      const answer = await name(taught, version);
      drawBars(symbols.map((_, index) => answer.probabilities[index]));
      const guessed = symbols[Number(answer.class)]?.name;
      const rest = missing ? ` (${missing} without an example ${missing > 1 ? "are" : "is"} left out)` : "";
      status.textContent = `${answer.unsure ? "Perhaps" : "This is"} ${guessed}, ${Math.round(100 * answer.probability)} %${rest}.`;
      show(error, "");
    } catch (problem) {
      drawBars();
      status.textContent = "";
      show(error, problem.message);
    }
  }

  const guessLater = later(() => guess(), 120);
  function soon() {
    changes += 1;
    bars.setAttribute("aria-busy", "true");
    guessLater();
  }
  function changed() {
    examples += 1;
    soon();
  }

  addButton.addEventListener("click", () => {
    addSymbol()?.row.querySelector("input").focus();
    changed();
  });
  document.getElementById("example-symbols").addEventListener("click", () => {
    for (const symbol of symbols.splice(0)) symbol.row.remove();
    for (const [name, strokes] of Object.entries(EXAMPLES)) addSymbol(name, [strokes]);
    changed();
  });
  document.getElementById("clear-symbols").addEventListener("click", () => {
    for (const symbol of symbols.splice(0)) symbol.row.remove();
    made = 0;
    for (let index = 0; index < 3; index += 1) addSymbol();
    question.clear();
    changed();
  });
  for (let index = 0; index < 3; index += 1) addSymbol();
  soon();
}
