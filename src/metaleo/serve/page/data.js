// A table of one's own: rows with a label are learned from, the others are named.

import { ask, create, show } from "./calls.js";

const SHOWN = 200;

export function startData() {
  const choice = document.getElementById("data-model");
  const labels = document.getElementById("data-label");
  const link = document.getElementById("example-file");
  const drop = document.getElementById("drop");
  const input = document.getElementById("file");
  const status = document.getElementById("data-status");
  const error = document.getElementById("data-error");
  const found = document.getElementById("found");
  const download = document.getElementById("download");
  let models = [];
  let file = null;

  async function load() {
    try {
      models = (await ask("api/models")).filter((model) => model.kind === "vectors");
      const option = (model) => create("option", { value: model.name, textContent: `${model.name} (rows of ${model.dim} numbers)` });
      choice.replaceChildren(...models.map(option));
      chosen();
    } catch (problem) {
      show(error, problem.message);
    }
  }

  function chosen() {
    const model = models.find((one) => one.name === choice.value);
    link.hidden = !model?.example;
    link.href = `api/example.csv?model=${encodeURIComponent(choice.value)}`;
    if (file) send();
  }

  async function post(path, query) {
    found.hidden = true;
    show(error, "");
    status.textContent = `Reading ${file.name} …`;
    try {
      const address = `${path}?${new URLSearchParams({ name: file.name, ...query })}`;
      return await ask(address, await file.arrayBuffer(), "application/octet-stream");
    } catch (problem) {
      status.textContent = "";
      show(error, problem.message);
      return null;
    }
  }

  // A new file: which of its columns holds the labels?
  async function look() {
    document.getElementById("label-choice").hidden = true;
    const answer = await post("api/columns");
    if (!answer) return;
    const option = (name) => create("option", { value: name, textContent: name });
    const nothing = answer.label === null ? [create("option", { value: "", textContent: "(choose a column)" })] : [];
    labels.replaceChildren(...nothing, ...answer.columns.map(option));
    labels.value = answer.label ?? "";
    document.getElementById("label-choice").hidden = !answer.columns.length;
    send();
  }

  async function send() {
    if (!labels.value && labels.options.length > 1) {
      found.hidden = true;
      status.textContent = "Which column holds the labels?";
      return;
    }
    const guessed = !labels.value || labels.value === "label";
    const answer = await post("api/adapt-file", { model: choice.value, ...(guessed ? {} : { label: labels.value }) });
    if (answer) tell(answer);
  }

  function tell(answer) {
    const rows = answer.predictions.map((one, index) => [answer.rows[index] + 1, one]);
    const more = rows.length > SHOWN ? `, the first ${SHOWN} shown` : "";
    status.textContent = `${file.name}: learned from ${answer.examples} rows of ${answer.classes.length} classes, `
      + `named ${rows.length} others${more}.` + answer.notes.map((note) => ` ${note}.`).join("");
    document.getElementById("classes").replaceChildren(
      ...answer.classes.map((name) => create("li", { textContent: `${name} · ${answer.counts[name]}` })));
    const cell = (tag, text, className = "") => create(tag, { textContent: text, className });
    const texts = Object.entries(answer.texts);
    const head = create("tr", {}, cell("th", "Row", "number"), ...texts.map(([name]) => cell("th", name)), cell("th", "Class"),
      cell("th", "Probability", "number"), cell("th", ""));
    const line = ([row, one], index) => create("tr", { className: one.unsure ? "unsure" : "" },
      cell("td", row, "number"), ...texts.map(([, cells]) => cell("td", cells[index], "text")), cell("td", one.class, "class"),
      cell("td", `${(100 * one.probability).toFixed(1)} %`, "number"), cell("td", one.unsure ? "unsure" : ""));
    document.getElementById("predictions").replaceChildren(
      create("thead", {}, head), create("tbody", {}, ...rows.slice(0, SHOWN).map(line)));
    if (download.href) URL.revokeObjectURL(download.href);
    download.href = URL.createObjectURL(new Blob([table(answer, rows)], { type: "text/csv" }));
    found.hidden = false;
  }

  function table(answer, rows) {
    // As `metaleo predict` writes it: text that a spreadsheet would compute as a formula gets an apostrophe before it.
    const isNumber = (text) => text.trim() !== "" && !Number.isNaN(Number(text));
    const plain = (text) => (/^[=+\-@\t\r]/.test(text) && !isNumber(text) ? `'${text}` : text);
    const quoted = (cell) => `"${plain(String(cell)).replaceAll('"', '""')}"`;
    const texts = Object.entries(answer.texts);
    const head = ["row", ...texts.map(([name]) => quoted(name)), "class", "probability", "unsure",
      ...answer.classes.map((name) => quoted(`p(${name})`))];
    const body = rows.map(([row, one], index) => [row, ...texts.map(([, cells]) => quoted(cells[index])), quoted(one.class),
      one.probability, one.unsure, ...answer.classes.map((name) => one.probabilities[name])]);
    return [head, ...body].map((line) => line.join(",")).join("\n") + "\n";
  }

  function take(files) {
    if (!files?.length) return;
    [file] = files;
    look();
  }

  choice.addEventListener("change", chosen);
  labels.addEventListener("change", send);
  input.addEventListener("change", () => {
    take(input.files);
    input.value = "";
  });
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    take(event.dataTransfer.files);
  });
  load();
}
