// The headline figures: all limiters together.

import { Sparkline } from "./chart.js";
import { byId, el, setText } from "./dom.js";
import { SPAN } from "./history.js";
import { count, rate, share } from "./words.js";

const RECENT = 10; // seconds: long enough to be calm, short enough to be now

const LEAST_SHARE = 0.1; // what the line of shares is at least drawn to, so that a flat one looks flat

const FIGURES = [
  { id: "decisions", label: "Decisions", unit: "per second", of: (sum) => sum.admitted + sum.refused },
  { id: "admitted", label: "Admitted", unit: "per second", of: (sum) => sum.admitted },
  { id: "refused", label: "Refused", unit: "per second", of: (sum) => sum.refused },
];

const tiles = [];

export function setUpOverview() {
  for (const figure of FIGURES) tiles.push(tile(figure.id, figure.label, figure.unit));
  tiles.push(tile("share", "Share refused", "last 5 min"));
  byId("figures").append(...tiles.map(({ node }) => node));
}

function tile(id, label, unit) {
  const value = el("span", { class: "figure-value", id: `figure-${id}` }, "–");
  const total = el("p", { class: "figure-total", id: `total-${id}` }, "\u00a0");
  const spark = new Sparkline();
  const node = el(
    "article",
    { class: `figure figure-${id}` },
    el("h3", {}, el("span", { class: "key-mark", "aria-hidden": "true" }), label),
    el("p", { class: "figure-line" }, value, " ", el("span", { class: "figure-unit" }, unit)),
    total,
    spark.node,
  );
  return { node, value, total, spark };
}

export function drawOverview(history) {
  const tick = history.newest;
  if (!tick) return;
  const bins = history.bins();
  const now = history.sum(RECENT);
  const totals = sumOf(Object.values(tick.totals));
  FIGURES.forEach((figure, index) => {
    setText(tiles[index].value, rate(now.seconds ? figure.of(now) / now.seconds : 0));
    setText(tiles[index].total, `${count(figure.of(totals))} since start`);
    tiles[index].spark.draw(bins.map((bin) => (bin.known ? figure.of(bin) : null)));
  });
  drawShare(tiles[FIGURES.length], history.sum(SPAN), totals, bins);
}

function drawShare(last, recent, totals, bins) {
  setText(last.value, share(recent.refused, recent.admitted + recent.refused));
  setText(last.total, `${share(totals.refused, totals.admitted + totals.refused)} since start`);
  const shares = bins.map((bin) => (bin.known ? bin.refused / (bin.admitted + bin.refused || 1) : null));
  last.spark.draw(shares, Math.max(LEAST_SHARE, ...shares));
}

function sumOf(counts) {
  const sum = { admitted: 0, refused: 0 };
  for (const one of counts) {
    sum.admitted += one.admitted;
    sum.refused += one.refused;
  }
  return sum;
}
