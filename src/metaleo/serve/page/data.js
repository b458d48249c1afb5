// A table of one's own: rows with a label are learned from, the others are named.

import { ask, create, show } from "./calls.js";

const SHOWN = 200;

export function startData() {
  const choice = document.getElementById("data-model");
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

  async function send() {
    found.hidden = true;
    show(error, "");
    status.textContent = `Reading ${file.name} …`;
    try {
      const query = new URLSearchParams({ model: choice.value, name: file.name });
      const answer = await ask(`api/adapt-file?${query}`, await file.arrayBuffer(), "application/octet-stream");
      tell(answer);
    } catch (problem) {
      status.textContent = "";
      show(error, problem.message);
    }
  }

  function tell(answer) {
    const rows = answer.predictions.map((one, index) => [answer.rows[index] + 1, one]);
    const more = rows.length > SHOWN ? `, the first ${SHOWN} shown` : "";
    status.textContent = `${file.name}: learned from ${answer.examples} rows of ${answer.classes.length} classes, `
      + `named ${rows.length} others${more}.`;
    document.getElementById("classes").replaceChildren(
      ...answer.classes.map((name) => create("li", { textContent: `${name} · ${answer.counts[name]}` })));
    const cell = (tag, text, className = "") => create(tag, { textContent: text, className });
    const head = create("tr", {}, cell("th", "Row", "number"), cell("th", "Class"), cell("th", "Probability", "number"), cell("th", ""));
    const line = ([row, one]) => create("tr", { className: one.unsure ? "unsure" : "" },
      cell("td", row, "number"), cell("td", one.class), cell("td", `${(100 * one.probability).toFixed(1)} %`, "number"),
      cell("td", one.unsure ? "unsure" : ""));
    document.getElementById("predictions").replaceChildren(
      create("thead", {}, head), create("tbody", {}, ...rows.slice(0, SHOWN).map(line)));
    if (download.href) URL.revokeObjectURL(download.href);
    download.href = URL.createObjectURL(new Blob([table(answer, rows)], { type: "text/csv" }));
    found.hidden = false;
  }

  function table(answer, rows) {
    // A leading = + - @ would be a formula to a spreadsheet.
    const quoted = (text) => `"${String(text).replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
    const head = ["row", "class", "probability", "unsure", ...answer.classes.map((name) => quoted(`p(${name})`))];
    const body = rows.map(([row, one]) => [row, quoted(one.class), one.probability, one.unsure,
      ...answer.classes.map((name) => one.probabilities[name])]);
    return [head, ...body].map((line) => line.join(",")).join("\n") + "\n";
  }

  function take(files) {
    if (!files?.length) return;
    [file] = files;
    send();
  }

  choice.addEventListener("change", chosen);
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
