// A small chart of the last two minutes: two curves over time, drawn as SVG.

import { byId, fill } from "./dom.js";
import { clock, count } from "./format.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const SPAN = 120; // seconds
const GAP = 3.5; // seconds without a point that interrupt the curve
const MARGIN = { left: 48, right: 10, top: 8, bottom: 20 };
const TIMES = [
  [-120, "2 min ago", "start"],
  [-60, "1 min", "middle"],
  [0, "now", "end"],
];

function svg(tag, attributes, parent) {
  const node = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent?.append(node);
  return node;
}

/** The smallest of 1, 2, 5 times a power of ten that is not less. */
export function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value * 0.9999);
}

export class Chart {
  #box;
  #legend;
  #series;
  #format;
  #points = [];
  #now = 0;
  #pointed = null; // seconds before now, where the pointer is
  #parts;
  #width = 0;
  #height = 0;

  /** `series`: two functions from a point of the history to its value. `title` says what the chart shows. */
  constructor(id, legend, { title, series, format }) {
    this.#box = byId(id);
    this.#legend = byId(legend);
    this.#series = series;
    this.#format = format;
    this.#parts = this.#build(title);
    new ResizeObserver(() => this.#draw()).observe(this.#box);
    this.#box.addEventListener("pointermove", (event) => this.#point(event));
    this.#box.addEventListener("pointerleave", () => this.#point(null));
  }

  /** `current`: the two values of the legend when the pointer is elsewhere. */
  update(history, now, current) {
    this.#points = history.filter((point) => point.at > now - SPAN - GAP);
    this.#now = now;
    this.#parts.current = current;
    this.#draw();
  }

  #build(title) {
    const root = svg("svg", { role: "img", "aria-label": title }, this.#box);
    const grid = svg("g", { class: "grid" }, root);
    const times = svg("g", { class: "times" }, root);
    const area = svg("path", { class: "area" }, root);
    const second = svg("path", { class: "curve second" }, root);
    const first = svg("path", { class: "curve first" }, root);
    const cursor = svg("line", { class: "cursor", y1: MARGIN.top }, root);
    const nothing = svg("text", { class: "nothing", "text-anchor": "middle" }, root);
    return { root, grid, times, area, curves: [first, second], cursor, nothing, current: [null, null] };
  }

  #x(at) {
    const room = this.#width - MARGIN.left - MARGIN.right;
    return MARGIN.left + room * (1 + (at - this.#now) / SPAN);
  }

  #draw() {
    this.#width = this.#box.clientWidth;
    this.#height = this.#box.clientHeight;
    if (!this.#width) return;
    const { root, area, curves, nothing } = this.#parts;
    root.setAttribute("width", this.#width);
    root.setAttribute("height", this.#height);
    const most = Math.max(0, ...this.#points.flatMap((point) => this.#series.map((value) => value(point))));
    const top = niceTop(most);
    const bottom = this.#height - MARGIN.bottom;
    const y = (value) => bottom - (bottom - MARGIN.top) * (value / top);
    this.#drawAxes(top, y);
    const runs = this.#runs();
    this.#series.forEach((value, index) => {
      curves[index].setAttribute("d", runs.map((run) => this.#line(run, value, y)).join(""));
    });
    area.setAttribute("d", runs.map((run) => this.#filled(run, this.#series[0], y, bottom)).join(""));
    nothing.setAttribute("x", (this.#width + MARGIN.left) / 2);
    nothing.setAttribute("y", this.#height / 2);
    nothing.textContent = most > 0 || !this.#now ? "" : "Nothing in the last two minutes";
    this.#drawPointed();
  }

  #drawAxes(top, y) {
    const { grid, times } = this.#parts;
    grid.replaceChildren();
    times.replaceChildren();
    for (const value of top === 1 ? [0, 1] : [0, top / 2, top]) {
      svg("line", { x1: MARGIN.left, x2: this.#width - MARGIN.right, y1: y(value), y2: y(value) }, grid);
      svg("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, grid).textContent =
        value % 1 ? value.toFixed(1) : count(value);
    }
    for (const [offset, text, anchor] of TIMES) {
      const x = this.#x(this.#now + offset);
      svg("text", { x, y: this.#height - 4, "text-anchor": anchor }, times).textContent = text;
    }
  }

  /** The points in stretches without a gap. */
  #runs() {
    const runs = [];
    let last = -Infinity;
    for (const point of this.#points) {
      if (point.at - last > GAP) runs.push([]);
      runs.at(-1).push(point);
      last = point.at;
    }
    return runs;
  }

  #line(run, value, y) {
    return run.map((point, index) =>
      `${index ? "L" : "M"}${Math.max(MARGIN.left, this.#x(point.at)).toFixed(1)} ${y(value(point)).toFixed(1)}`,
    ).join("");
  }

  #filled(run, value, y, bottom) {
    const [from, to] = [run[0], run.at(-1)].map((point) => Math.max(MARGIN.left, this.#x(point.at)).toFixed(1));
    return `${this.#line(run, value, y)}L${to} ${bottom}L${from} ${bottom}Z`;
  }

  #point(event) {
    const room = this.#width - MARGIN.left - MARGIN.right;
    const x = event ? event.clientX - this.#box.getBoundingClientRect().left - MARGIN.left : -1;
    this.#pointed = event && x >= 0 && x <= room ? SPAN * (1 - x / room) : null;
    this.#drawPointed();
  }

  #drawPointed() {
    const { cursor, current } = this.#parts;
    const wanted = this.#now - (this.#pointed ?? 0);
    const point = this.#pointed === null ? null : this.#points.reduce(
      (best, each) => (!best || Math.abs(each.at - wanted) < Math.abs(best.at - wanted) ? each : best), null);
    cursor.setAttribute("visibility", point ? "visible" : "hidden");
    const values = point ? this.#series.map((value) => value(point)) : current;
    if (point) {
      const x = Math.max(MARGIN.left, this.#x(point.at));
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.setAttribute("y2", this.#height - MARGIN.bottom);
    }
    fill(this.#legend, {
      first: this.#format(values[0]), second: this.#format(values[1]), moment: point ? clock(point.at) : "",
    });
  }
}
