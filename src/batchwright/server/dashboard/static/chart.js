// A small chart of the last two minutes, drawn as SVG: two curves one above the other, each on a scale of its own, since
// one is often a hundred times the other.

import { byId, fill } from "./dom.js";
import { clock, count } from "./format.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const SPAN = 120; // seconds
const GAP = 3.5; // seconds without a point that interrupt the curve
const LEFT = 48;
const RIGHT = 10;
const TOP = 8;
const BETWEEN = 18;
const FOOT = 20;
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

/** The smallest 1, 2 or 5 times a power of ten that is not less than a value. */
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
  #current = [null, null];
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
    this.#current = current;
    this.#draw();
  }

  #build(title) {
    const root = svg("svg", { role: "img", "aria-label": title }, this.#box);
    const times = svg("g", { class: "times" }, root);
    const bands = ["first", "second"].map((name) => {
      const group = svg("g", { class: `band ${name}` }, root);
      const grid = svg("g", { class: "grid" }, group);
      return { grid, area: svg("path", { class: "area" }, group), curve: svg("path", { class: "curve" }, group) };
    });
    const cursor = svg("line", { class: "cursor", y1: TOP }, root);
    const nothing = svg("text", { class: "nothing", "text-anchor": "middle" }, root);
    return { root, times, bands, cursor, nothing };
  }

  #x(at) {
    return Math.max(LEFT, LEFT + (this.#width - LEFT - RIGHT) * (1 + (at - this.#now) / SPAN));
  }

  #draw() {
    this.#width = this.#box.clientWidth;
    this.#height = this.#box.clientHeight;
    if (!this.#width) return;
    const { root, times, nothing } = this.#parts;
    root.setAttribute("width", this.#width);
    root.setAttribute("height", this.#height);
    const room = (this.#height - TOP - BETWEEN - FOOT) / 2;
    const runs = this.#runs();
    const highest = this.#series.map((value, index) => {
      const most = Math.max(0, ...this.#points.map(value));
      this.#drawBand(index, value, runs, most, TOP + index * (room + BETWEEN), room);
      return most;
    });
    times.replaceChildren();
    for (const [offset, text, anchor] of TIMES) {
      const at = { x: this.#x(this.#now + offset), y: this.#height - 4, "text-anchor": anchor };
      svg("text", at, times).textContent = text;
    }
    nothing.setAttribute("x", (this.#width + LEFT) / 2);
    nothing.setAttribute("y", TOP + room + BETWEEN / 2 + 4);
    nothing.textContent = this.#now && Math.max(...highest) === 0 ? "Nothing in the last two minutes" : "";
    this.#drawPointed();
  }

  #drawBand(index, value, runs, most, top, room) {
    const { grid, area, curve } = this.#parts.bands[index];
    const scale = niceTop(most);
    const bottom = top + room;
    const y = (point) => bottom - room * (value(point) / scale);
    grid.replaceChildren();
    for (const [at, shown] of [[bottom, 0], [top, scale]]) {
      svg("line", { x1: LEFT, x2: this.#width - RIGHT, y1: at, y2: at }, grid);
      const text = svg("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, grid);
      text.textContent = shown % 1 ? String(Number(shown.toPrecision(1))) : count(shown);
    }
    const lines = runs.map((run) => this.#line(run, y));
    curve.setAttribute("d", lines.join(""));
    area.setAttribute("d", runs.map((run, number) => {
      const [from, to] = [run[0], run.at(-1)].map((point) => this.#x(point.at).toFixed(1));
      return `${lines[number]}L${to} ${bottom}L${from} ${bottom}Z`;
    }).join(""));
  }

  /** The points, split where there is a gap. */
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

  #line(run, y) {
    return run.map((point, index) =>
      `${index ? "L" : "M"}${this.#x(point.at).toFixed(1)} ${y(point).toFixed(1)}`).join("");
  }

  #point(event) {
    const room = this.#width - LEFT - RIGHT;
    const x = event ? event.clientX - this.#box.getBoundingClientRect().left - LEFT : -1;
    this.#pointed = event && x >= 0 && x <= room ? SPAN * (1 - x / room) : null;
    this.#drawPointed();
  }

  #drawPointed() {
    const { cursor } = this.#parts;
    const point = this.#pointed === null ? null : nearest(this.#points, this.#now - this.#pointed);
    cursor.setAttribute("visibility", point ? "visible" : "hidden");
    if (point) {
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, this.#x(point.at));
      cursor.setAttribute("y2", this.#height - FOOT);
    }
    const values = point ? this.#series.map((value) => value(point)) : this.#current;
    fill(this.#legend, {
      first: this.#format(values[0]), second: this.#format(values[1]), moment: point ? clock(point.at) : "",
    });
  }
}

function nearest(points, at) {
  const distance = (point) => Math.abs(point.at - at);
  return points.reduce((best, each) => (best && distance(best) <= distance(each) ? best : each), null);
}
