// The headline figures: all limiters together.

import { Sparkline } from "./chart.js";
import { byId, el, setText, show } from "./dom.js";
import { RECENT, SPAN, decisionsOf, sumOf } from "./history.js";
import { count, moment, rateOf, share } from "./words.js";

const LEAST_SHARE = 0.1; // what the line of shares is at least drawn to, so that a flat one looks flat

const UNIT = `per second, last ${RECENT} s`;

const FIGURES = [
  { id: "decisions", label: "Decisions", of: decisionsOf },
  { id: "admitted", label: "Admitted", of: (sum) => sum.admitted },
  { id: "refused", label: "Refused", of: (sum) => sum.refused },
  { id: "degraded", label: "Without the store", of: (sum) => sum.degraded },
];

const tiles = new Map();

export function setUpOverview() {
  for (const { id, label } of FIGURES) tiles.set(id, tile(id, label, UNIT));
  tiles.set("share", tile("share", "Share refused", "last 5 min"));
  byId("figures").append(...[...tiles.values()].map(({ node }) => node));
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
  const since = `since ${moment(tick.started)}`;
  for (const { id, of } of FIGURES) {
    const { value, total, spark } = tiles.get(id);
    setText(value, rateOf(now, of));
    setText(total, `${count(of(totals))} ${since}`);
    spark.draw(bins.map((bin) => (bin.known ? of(bin) : null)));
  }
  show(tiles.get("degraded").node, totals.degraded > 0);
  drawShare(tiles.get("share"), history.sum(SPAN), totals, bins, since);
}

function drawShare({ value, total, spark }, recent, totals, bins, since) {
  setText(value, share(recent.refused, decisionsOf(recent)));
  setText(total, `${share(totals.refused, decisionsOf(totals))} ${since}`);
  const shares = bins.map((bin) => (bin.known ? bin.refused / (decisionsOf(bin) || 1) : null));
  spark.draw(shares, Math.max(LEAST_SHARE, ...shares));
}
