// Drawings of rates: bars with a readout for a limiter, a line for a headline figure.

import { setAttribute, setText, svg } from "./dom.js";
import { RANGES, decisionsOf } from "./history.js";
import { rate, span } from "./words.js";

const HEIGHT = 148;
const TOP = 8;
const BOTTOM = 22;
const LEFT = 40;
const PARTS = ["admitted", "refused", "degraded"]; // from the bottom up

/**
 * Decisions per second, stacked, as bars over a range of time: admitted and refused by the store, and degraded ones.
 *
 * Pointer and arrow keys choose a bar; `onRead(bin)` is called with the bar to put into words, null while none is chosen. To assistive technology the chart is a slider over time whose value is that text.
 */
export class RateChart {
  #svg;
  #grid = svg("g", { class: "grid" });
  #cursor = svg("rect", { class: "cursor", y: TOP, height: HEIGHT - TOP - BOTTOM, visibility: "hidden" });
  #parts = PARTS.map((part) => svg("path", { class: `bar-${part}` }));
  #nothing = svg("text", { class: "nothing", y: (HEIGHT - BOTTOM + TOP) / 2 - 12, "text-anchor": "middle" });
  #name;
  #bins = [];
  #range = RANGES.minutes;
  #chosen = null;
  #width = 0;
  #isInSight = false;
  #drawnScale = "";
  #onRead;

  constructor(node, name, onRead) {
    this.node = node;
    this.#name = name;
    this.#onRead = onRead;
    this.#svg = svg("svg", { class: "bars", height: HEIGHT, "aria-hidden": "true", focusable: "false" });
    this.#svg.append(this.#grid, this.#cursor, ...this.#parts, this.#nothing);
    node.append(this.#svg);
    for (const [attribute, value] of Object.entries({
      tabindex: 0,
      role: "slider",
      "aria-valuemin": 0,
      "aria-valuetext": "no figures yet",
    })) {
      node.setAttribute(attribute, value);
    }
    this.#setRange(RANGES.minutes);
    this.#listen();
  }

  /** Show these bars. Out of sight they are only put into words. */
  draw(bins, range) {
    if (range !== this.#range) this.#setRange(range);
    const moved = this.#bins.length ? (bins[0].from - this.#bins[0].from) / range.bin : 0;
    // A chosen bar stays the same time while time moves on, until it leaves on the left.
    if (this.#chosen !== null && this.#chosen !== this.#newest && moved > 0) this.#chosen = Math.max(0, this.#chosen - moved);
    this.#bins = bins;
    this.#paint();
    this.#read(this.#chosen !== null && moved === 0 && document.activeElement === this.node);
  }

  get #newest() {
    return this.#range.bins - 1;
  }

  #setRange(range) {
    this.#range = range;
    this.#chosen = null;
    this.#bins = [];
    setAttribute(this.node, "aria-label", `${this.#name}: decisions per second in ${range.words}`);
    setAttribute(this.node, "aria-valuemax", this.#newest);
    setAttribute(this.node, "aria-valuenow", this.#newest);
  }

  resize(width) {
    this.#width = Math.floor(width);
    this.#paint();
  }

  inSight(isInSight) {
    this.#isInSight = isInSight;
    this.#paint();
  }

  #paint() {
    if (!this.#isInSight || !this.#bins.length || this.#width <= LEFT) return;
    const highest = Math.max(...this.#bins.map(decisionsOf));
    const top = niceTop(highest);
    this.#paintGrid(top);
    setText(this.#nothing, highest ? "" : `Nothing decided in ${this.#range.words}`);
    const step = (this.#width - LEFT) / this.#range.bins;
    const gap = step > 4 ? 1.5 : step > 2.5 ? 1 : 0;
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    const drawn = PARTS.map(() => "");
    this.#bins.forEach((bin, index) => {
      let below = 0;
      partsOf(bin).forEach((value, place) => {
        if (value) drawn[place] += bar(LEFT + index * step, step - gap, y(below + value), y(below));
        below += value;
      });
    });
    this.#parts.forEach((path, place) => setAttribute(path, "d", drawn[place]));
    this.#placeCursor(step);
  }

  #paintGrid(top) {
    const scale = `${this.#width} ${top} ${this.#range.span}`;
    if (scale === this.#drawnScale) return;
    this.#drawnScale = scale;
    setAttribute(this.#svg, "viewBox", `0 0 ${this.#width} ${HEIGHT}`);
    setAttribute(this.#svg, "width", this.#width);
    setAttribute(this.#nothing, "x", LEFT + (this.#width - LEFT) / 2);
    this.#grid.replaceChildren(...yAxis(top, this.#width), ...xAxis(this.#width, this.#range));
  }

  #placeCursor(step) {
    setAttribute(this.#cursor, "visibility", this.#chosen === null ? "hidden" : "visible");
    if (this.#chosen === null) return;
    setAttribute(this.#cursor, "x", (LEFT + this.#chosen * step).toFixed(2));
    setAttribute(this.#cursor, "width", step.toFixed(2));
  }

  /** Put the chosen bar into words; `quietly` changes nothing for a screen reader. */
  #read(quietly = false) {
    const index = this.#chosen ?? this.#newest;
    const bin = this.#bins[index];
    if (!bin) return;
    this.#onRead(this.#chosen === null ? null : bin);
    if (quietly) return;
    setAttribute(this.node, "aria-valuenow", index);
    setAttribute(this.node, "aria-valuetext", spoken(bin, this.#range));
  }

  #choose(index) {
    this.#chosen = index === null ? null : Math.min(this.#newest, Math.max(0, index));
    if (!this.#bins.length) return;
    this.#placeCursor((this.#width - LEFT) / this.#range.bins);
    this.#read();
  }

  #listen() {
    const at = (event) => {
      const x = event.clientX - this.#svg.getBoundingClientRect().left - LEFT;
      this.#choose(Math.floor((x / (this.#width - LEFT)) * this.#range.bins));
    };
    this.node.addEventListener("pointermove", at);
    this.node.addEventListener("pointerdown", at);
    this.node.addEventListener("pointerleave", () => this.#choose(null));
    this.node.addEventListener("blur", () => this.#choose(null));
    this.node.addEventListener("keydown", (event) => {
      const from = this.#chosen ?? this.#newest;
      const to = {
        ArrowLeft: from - 1,
        ArrowDown: from - 1,
        ArrowRight: from + 1,
        ArrowUp: from + 1,
        PageUp: from + 12,
        PageDown: from - 12,
        Home: 0,
        End: this.#newest,
        Escape: null,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.#choose(to);
    });
  }
}

function spoken(bin, range) {
  const when = span(bin.from, range.bin, "to");
  if (!bin.known) return `${when}: no figures`;
  const degraded = bin.degraded ? `, ${rate(bin.degraded)} of both without the store` : "";
  return `${when}: ${rate(bin.admitted)} admitted, ${rate(bin.refused)} refused${degraded} per second`;
}

function partsOf({ admitted, refused, degraded, degraded_refused: both }) {
  return [admitted - (degraded - both), refused - both, degraded];
}

function bar(x, width, top, bottom) {
  // At least a hair: one refusal among thousands is what people look for.
  const height = Math.max(bottom - top, 1);
  return `M${x.toFixed(2)} ${(bottom - height).toFixed(2)}h${width.toFixed(2)}v${height.toFixed(2)}h${(-width).toFixed(2)}z`;
}

/** The smallest round number that is not below the highest bar; its half makes a readable label, too. */
function niceTop(highest) {
  if (highest <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(highest));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((top) => top >= highest);
}

function yAxis(top, width) {
  return [0, top / 2, top].flatMap((value) => {
    const y = Math.round(HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM)) + 0.5;
    const label = svg("text", { x: LEFT - 8, y: y + 3.5, "text-anchor": "end" });
    setText(label, compact(value));
    return [svg("line", { x1: LEFT, x2: width, y1: y, y2: y, class: value ? "rule" : "base" }), label];
  });
}

function compact(value) {
  return value >= 10_000 ? `${value / 1000}k` : value.toLocaleString("en");
}

function xAxis(width, { span: length }) {
  const [unit, seconds] = length > 3600 ? ["h", 3600] : ["min", 60];
  const parts = length === 300 ? 5 : 6;
  const places = Array.from({ length: parts + 1 }, (_, index) => index).filter((index) => width >= 420 || index % 2 === 0 || index === parts);
  return places.map((index) => {
    const before = Math.round((length * (parts - index)) / parts / seconds);
    const x = LEFT + ((width - LEFT) * index) / parts;
    const anchor = index === 0 ? "start" : index === parts ? "end" : "middle";
    const label = svg("text", { x, y: HEIGHT - 4, "text-anchor": anchor });
    setText(label, before ? `−${before} ${unit}` : "now");
    return label;
  });
}

/** A line without axes: the shape of the last five minutes beside a figure. */
export class Sparkline {
  #line = svg("path", { class: "spark-line" });
  #area = svg("path", { class: "spark-area" });

  constructor() {
    const shape = { viewBox: "0 0 100 32", preserveAspectRatio: "none", class: "spark" };
    this.node = svg("svg", { ...shape, "aria-hidden": "true", focusable: "false" }, this.#area, this.#line);
  }

  /** Draw these values, oldest first, up to `top`. Nothing is known before the first that is not null. */
  draw(values, top = Math.max(...values)) {
    const step = 100 / (values.length - 1);
    const y = (value) => (top ? 30 - (value / top) * 27 : 30).toFixed(2);
    const points = values.map((value, index) => (value === null ? null : `${(index * step).toFixed(2)} ${y(value)}`));
    const known = points.filter((point) => point !== null);
    if (known.length < 2) return;
    setAttribute(this.#line, "d", `M${known.join("L")}`);
    setAttribute(this.#area, "d", `M${known.join("L")}V32H${known[0].split(" ")[0]}Z`);
  }
}
