// Points on a plane, and the functions that a model imagines through them.

import { ask, calm, latest, show } from "./calls.js";

const X = [-5, 5];
const Y = [-6, 6];
const REACH = 0.45; // how near to a point is near, in units of the plane
const EXAMPLES = {
  sine: [[-4.2, 2.6], [-2.4, -2.3], [-0.6, -1.4], [1.1, 2.4], [3.4, -0.9]],
  line: [[-3.8, -3.1], [-1.6, -1.4], [0.4, 0.2], [2.2, 1.9], [4.1, 3.2]],
  both: [[1.3, 2.8], [1.8, 3.1], [1.85, 3.4], [1.9, 3.2], [2.0, 3.5]],
};
const SVG = "http://www.w3.org/2000/svg";

export function startFunctions() {
  const plane = document.getElementById("plane");
  const slider = document.getElementById("stage");
  const stageName = document.getElementById("stage-name");
  const play = document.getElementById("play");
  const status = document.getElementById("functions-status");
  const error = document.getElementById("functions-error");
  const hint = document.getElementById("plane-hint");
  let points = [];
  let found = null; // the server's answer
  let shown = null; // stage on the screen; between two stages while moving
  let cross = [0, 0];
  let dragged = null;
  let chosen = null;
  let moving = 0;
  let playing = false;

  const layers = Object.fromEntries(["grid", "curves", "points", "cross"].map((name) => [name, add("g", {})]));

  function add(tag, attributes, parent = plane) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    parent.append(element);
    return element;
  }

  const size = () => [plane.clientWidth || 600, plane.clientHeight || 400];
  const toScreen = ([x, y]) => {
    const [width, height] = size();
    return [((x - X[0]) / (X[1] - X[0])) * width, ((Y[1] - y) / (Y[1] - Y[0])) * height];
  };
  const limit = (value, [least, most]) => Math.min(most, Math.max(least, value));
  const fromEvent = (event) => {
    const [width, height] = size();
    const box = plane.getBoundingClientRect();
    const x = X[0] + ((event.clientX - box.left - plane.clientLeft) / width) * (X[1] - X[0]);
    const y = Y[1] - ((event.clientY - box.top - plane.clientTop) / height) * (Y[1] - Y[0]);
    return [limit(x, X), limit(y, Y)];
  };
  const distance = (one, other) => {
    const [a, b] = [toScreen(one), toScreen(other)];
    return Math.hypot(a[0] - b[0], a[1] - b[1]);
  };
  function nearest(place, reach) {
    let best = null;
    for (const point of points) {
      const far = distance(point, place);
      if (far <= reach && (best === null || far < distance(best, place))) best = point;
    }
    return best;
  }

  function drawGrid() {
    layers.grid.replaceChildren();
    const [width, height] = size();
    for (let x = X[0]; x <= X[1]; x += 1) {
      const [at] = toScreen([x, 0]);
      add("line", { x1: at, x2: at, y1: 0, y2: height, class: x === 0 ? "axis" : "grid" }, layers.grid);
      if (x % 2 === 0 && x !== 0) add("text", { x: at + 3, y: toScreen([0, 0])[1] + 13 }, layers.grid).textContent = x;
    }
    for (let y = Y[0]; y <= Y[1]; y += 1) {
      const [, at] = toScreen([0, y]);
      add("line", { x1: 0, x2: width, y1: at, y2: at, class: y === 0 ? "axis" : "grid" }, layers.grid);
      if (y % 2 === 0 && y !== 0 && Math.abs(y) < Y[1]) {
        add("text", { x: toScreen([0, 0])[0] + 4, y: at - 3 }, layers.grid).textContent = y;
      }
    }
  }

  // A smooth curve through all points: a cubic between each two, whose slope at a point is that between its neighbours.
  function path(x, y, start = "M") {
    const at = x.map((value, index) => toScreen([value, y[index]]));
    const show = (point) => point.map((value) => value.toFixed(2)).join(" ");
    const slope = (index) => {
      const [before, after] = [at[Math.max(index - 1, 0)], at[Math.min(index + 1, at.length - 1)]];
      return (after[1] - before[1]) / (after[0] - before[0]);
    };
    const parts = at.slice(1).map((to, index) => {
      const from = at[index];
      const third = (to[0] - from[0]) / 3;
      return `C${show([from[0] + third, from[1] + third * slope(index)])} ${show([to[0] - third, to[1] - third * slope(index + 1)])} ${show(to)}`;
    });
    return `${start}${show(at[0])}${parts.join("")}`;
  }

  function drawCurves() {
    layers.curves.replaceChildren();
    if (!found || shown === null || !points.length) return;
    const low = Math.floor(shown);
    const share = shown - low;
    const [before, after] = [found.stages[low], found.stages[Math.min(low + 1, found.stages.length - 1)]];
    const mix = (one, other) => one.map((value, index) => value + share * (other[index] - value));
    const mean = mix(before.mean, after.mean);
    const spread = mix(before.spread, after.spread);
    const upper = path(found.x, mean.map((value, index) => value + 2 * spread[index]));
    const lower = path([...found.x].reverse(), mean.map((value, index) => value - 2 * spread[index]).reverse(), "L");
    add("path", { d: `${upper}${lower}Z`, class: "band" }, layers.curves);
    before.functions.forEach((values, index) => {
      add("path", { d: path(found.x, mix(values, after.functions[index])), class: "function" }, layers.curves);
    });
    add("path", { d: path(found.x, mean), class: "mean" }, layers.curves);
  }

  function drawPoints() {
    layers.points.replaceChildren();
    for (const point of points) {
      const [cx, cy] = toScreen(point);
      add("circle", { cx, cy, r: 7, class: point === chosen ? "point chosen" : "point" }, layers.points);
    }
    layers.cross.replaceChildren();
    const [x, y] = toScreen(cross);
    add("line", { x1: x - 12, x2: x + 12, y1: y, y2: y, class: "cross" }, layers.cross);
    add("line", { x1: x, x2: x, y1: y - 12, y2: y + 12, class: "cross" }, layers.cross);
    hint.hidden = points.length > 0;
  }

  function drawAll() {
    drawGrid();
    drawCurves();
    drawPoints();
  }

  const fetchFunctions = latest(async () => {
    if (!points.length) return;
    try {
      const answer = await ask("api/functions", { points, functions: 24, seed: 0 });
      if (!points.length) return;
      const first = found === null;
      found = answer;
      slider.max = answer.stages.length - 1;
      slider.disabled = false;
      if (first) slider.value = slider.max;
      if (shown === null || !playing) shown = Number(slider.value);
      nameStage();
      drawCurves();
      const last = answer.stages.at(-1);
      const typical = last.spread.reduce((sum, value) => sum + value, 0) / last.spread.length;
      const count = `${points.length} point${points.length > 1 ? "s" : ""}`;
      status.textContent = `${count}: ${last.functions.length} functions, which differ by ±${(2 * typical).toFixed(1)} on average.`;
      show(error, "");
    } catch (problem) {
      show(error, problem.message);
    }
  });

  function changed() {
    drawPoints();
    if (points.length) {
      fetchFunctions();
    } else {
      found = null;
      shown = null;
      slider.disabled = true;
      status.textContent = "";
      drawCurves();
    }
    play.disabled = !points.length;
  }

  function nameStage() {
    stageName.textContent = found ? found.stages[Number(slider.value)].name : "";
    slider.setAttribute("aria-valuetext", stageName.textContent);
  }

  // Moves from what is shown to the stage of the slider; at once where motion is not wanted.
  function move(done = () => {}) {
    cancelAnimationFrame(moving);
    nameStage();
    const target = Number(slider.value);
    if (calm() || shown === null) {
      shown = target;
      drawCurves();
      done();
      return;
    }
    const [from, begin] = [shown, performance.now()];
    const frame = (now) => {
      const share = Math.min(1, Math.max(0, (now - begin) / 450));
      shown = from + (target - from) * share * share * (3 - 2 * share);
      drawCurves();
      if (share < 1) moving = requestAnimationFrame(frame);
      else done();
    };
    moving = requestAnimationFrame(frame);
  }

  function playOn() {
    if (!playing) return;
    if (Number(slider.value) >= Number(slider.max)) {
      playing = false;
      play.textContent = "▶ Play";
      return;
    }
    slider.value = Number(slider.value) + 1;
    move(() => setTimeout(playOn, 350));
  }

  function addPoint(place) {
    if (points.length >= 60) return;
    chosen = place.map((value) => Math.round(value * 100) / 100);
    points.push(chosen);
    changed();
  }

  function removePoint(point) {
    points = points.filter((other) => other !== point);
    chosen = null;
    changed();
  }

  plane.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const place = fromEvent(event);
    dragged = nearest(place, event.pointerType === "touch" ? 22 : 14);
    if (dragged) chosen = dragged;
    else {
      addPoint(place);
      dragged = chosen;
    }
    plane.setPointerCapture(event.pointerId);
    drawPoints();
  });
  plane.addEventListener("pointermove", (event) => {
    if (!dragged) return;
    const place = fromEvent(event);
    dragged[0] = Math.round(place[0] * 100) / 100;
    dragged[1] = Math.round(place[1] * 100) / 100;
    changed();
  });
  for (const name of ["pointerup", "pointercancel"]) plane.addEventListener(name, () => { dragged = null; });
  plane.addEventListener("dblclick", (event) => {
    const point = nearest(fromEvent(event), 16);
    if (point) removePoint(point);
  });
  plane.addEventListener("keydown", (event) => {
    const step = event.shiftKey ? 1 : 0.25;
    const way = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] }[event.key];
    if (way) {
      cross = [limit(cross[0] + way[0], X), limit(cross[1] + way[1], Y)];
      status.textContent = `Crosshair at x ${cross[0].toFixed(2)}, y ${cross[1].toFixed(2)}`;
      drawPoints();
    } else if (event.key === "Enter" || event.key === " ") {
      addPoint(cross);
    } else if (event.key === "Delete" || event.key === "Backspace") {
      const point = nearest(cross, REACH * 60) ?? chosen;
      if (point) removePoint(point);
    } else return;
    event.preventDefault();
  });

  slider.addEventListener("input", () => {
    playing = false;
    play.textContent = "▶ Play";
    move();
  });
  play.addEventListener("click", () => {
    if (!found) return;
    playing = !playing;
    play.textContent = playing ? "❚❚ Pause" : "▶ Play";
    if (!playing) return;
    if (Number(slider.value) >= Number(slider.max)) {
      slider.value = 0;
      shown = 0;
      nameStage();
      drawCurves();
      setTimeout(playOn, 700);
    } else playOn();
  });
  for (const button of document.querySelectorAll("[data-example]")) {
    button.addEventListener("click", () => {
      points = EXAMPLES[button.dataset.example].map((point) => [...point]);
      chosen = null;
      changed();
    });
  }
  document.getElementById("clear-points").addEventListener("click", () => {
    points = [];
    changed();
  });
  new ResizeObserver(drawAll).observe(plane);
  play.disabled = true;
  stageName.textContent = "";
  drawAll();
}
