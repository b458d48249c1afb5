// A square to draw on: strokes of points in [0, 1], y downwards.

const PEN = 1 / 22; // width of a line, as a share of the side

export function paint(canvas, strokes, pen = null) {
  const scale = devicePixelRatio || 1;
  const side = Math.round((canvas.clientWidth || 72) * scale);
  if (canvas.width !== side) canvas.width = canvas.height = side;
  const brush = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  brush.clearRect(0, 0, side, side);
  brush.lineWidth = side * PEN;
  brush.lineCap = brush.lineJoin = "round";
  brush.strokeStyle = brush.fillStyle = style.color;
  for (const stroke of strokes) {
    brush.beginPath();
    stroke.forEach(([x, y], index) => (index ? brush.lineTo(x * side, y * side) : brush.moveTo(x * side, y * side)));
    if (stroke.length === 1) brush.lineTo(stroke[0][0] * side + 0.01, stroke[0][1] * side);
    brush.stroke();
  }
  if (pen) {
    brush.strokeStyle = style.getPropertyValue("--warm");
    brush.lineWidth = 2 * scale;
    brush.beginPath();
    brush.arc(pen.at[0] * side, pen.at[1] * side, pen.down ? 4 * scale : 7 * scale, 0, 7);
    brush.stroke();
  }
}

export class Pad {
  constructor(label, onChange) {
    this.strokes = [];
    this.onChange = onChange;
    this.pen = { at: [0.5, 0.5], down: false };
    this.keys = false; // whether the pen of the keyboard is shown
    this.pointer = null;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "pad";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "drawing pad");
    this.name(label);
    const on = (name, handle) => this.canvas.addEventListener(name, (event) => handle.call(this, event));
    on("pointerdown", this.begin);
    on("pointermove", this.go);
    on("pointerup", this.end);
    on("pointercancel", this.end);
    on("keydown", this.key);
    on("blur", () => {
      this.pen.down = this.keys = false;
      this.paint();
    });
    new ResizeObserver(() => this.paint()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  name(label) {
    this.canvas.setAttribute("aria-label", `${label}. Arrow keys move a pen, Space puts it down or lifts it.`);
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const inside = (value) => Math.min(1, Math.max(0, value));
    const round = (value) => Math.round(value * 1000) / 1000;
    return [round(inside((event.clientX - box.left) / box.width)), round(inside((event.clientY - box.top) / box.height))];
  }

  begin(event) {
    if (event.button !== 0 || this.pointer !== null) return;
    this.pointer = event.pointerId;
    this.canvas.setPointerCapture(event.pointerId);
    this.keys = false;
    this.strokes.push([this.place(event)]);
    this.changed();
  }

  go(event) {
    if (event.pointerId !== this.pointer) return;
    const between = event.getCoalescedEvents?.() ?? [];
    for (const one of between.length ? between : [event]) this.extend(this.place(one));
    this.changed();
  }

  end(event) {
    if (event.pointerId === this.pointer) this.pointer = null;
  }

  extend(point) {
    const stroke = this.strokes.at(-1);
    const [x, y] = stroke.at(-1);
    if (stroke.length < 1500 && Math.hypot(point[0] - x, point[1] - y) > 0.004) stroke.push(point);
  }

  key(event) {
    const step = event.shiftKey ? 0.1 : 0.04;
    const way = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] }[event.key];
    if (way) {
      this.pen.at = this.pen.at.map((value, index) => Math.min(0.98, Math.max(0.02, value + way[index])));
      if (this.pen.down) this.extend([...this.pen.at]);
    } else if (event.key === " ") {
      this.pen.down = !this.pen.down;
      if (this.pen.down) this.strokes.push([[...this.pen.at]]);
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.pen.down = false;
      this.strokes = [];
    } else return;
    event.preventDefault();
    this.keys = true;
    this.changed();
  }

  changed() {
    this.paint();
    this.onChange();
  }

  clear() {
    this.strokes = [];
    this.pen.down = false;
    this.changed();
  }

  paint() {
    paint(this.canvas, this.strokes, this.keys ? this.pen : null);
    if (this.strokes.length || this.keys) return;
    const brush = this.canvas.getContext("2d");
    const style = getComputedStyle(this.canvas);
    brush.fillStyle = style.getPropertyValue("--soft");
    brush.font = `${14 * (devicePixelRatio || 1)}px ${style.fontFamily}`;
    brush.textAlign = "center";
    brush.fillText("draw here", this.canvas.width / 2, this.canvas.height / 2);
  }
}
