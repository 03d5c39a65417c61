// One card per limiter: its rules in words, its last five minutes, its totals.
//
// From a few limiters on, those that refuse and fail most come first, and one without decisions is a line that opens its card.

import { RateChart } from "./chart.js";
import { byId, copyText, el, entry, keyed, setText, show } from "./dom.js";
import { RANGES, RECENT, decisionsOf, sumOf } from "./history.js";
import { count, failureWords, heldWords, moment, plural, rate, rateOf, share, span } from "./words.js";

const FILTER_FROM = 7; // limiters: fewer are seen at a glance, in the order of the file
const MOST_CARDS = 12; // of limiters that decide; the others are lines

let limiters = [];
let onTry = () => {};
let latest = null;
let range = RANGES.minutes;
let cards = new Map();
let lines = new Map();
const opened = new Set(); // names of limiters whose card somebody wants to see
const widths = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) target.chart.resize(contentRect.width);
});
// Charts out of sight are not painted; they catch up when they are scrolled to. Text is always true: people print, search
// and listen to what is out of sight.
const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.chart.inSight(isIntersecting);
}, { rootMargin: "200px" });

/** `tryLimiter(name)` is what the button of a card does. */
export function setUpLimiters(tryLimiter) {
  onTry = tryLimiter;
  byId("filter").addEventListener("input", showCards);
  addEventListener("beforeprint", () => cards.forEach(({ chart }) => chart.inSight(true)));
}

/** Show these limiters, as GET /v1/limiters describes them. */
export function setLimiters(described) {
  limiters = described;
  setText(byId("no-limiters"), described.length ? "" : "The policy file has no limiters yet.");
  show(byId("filter-label"), described.length >= FILTER_FROM);
  showCards();
}

function showCards() {
  arrange();
  drawAll();
}

function arrange() {
  const label = byId("filter-label");
  const wanted = label.hidden ? "" : byId("filter").value.trim().toLowerCase();
  const shown = limiters.filter(({ name }) => name.toLowerCase().includes(wanted));
  const empty = byId("no-limiters");
  if (limiters.length) setText(empty, shown.length ? "" : "No limiter has a name like that.");
  show(empty, shown.length === 0);
  const { first, rest, idle } = ranked(shown);
  cards = keyed(byId("cards"), first, ({ name }) => name, createCard, describeCard);
  lines = keyed(byId("lines"), rest, ({ name }) => name, createLine, describeLine);
  show(byId("more"), rest.length > 0);
  setText(byId("more-title"), moreWords(rest.length, idle));
}

function moreWords(all, idle) {
  const quiet = `without a decision in ${range.words}`;
  if (all === idle) return `${plural(all, "limiter")} ${quiet}`;
  return `${plural(all, "more limiter")}${idle ? `, ${count(idle)} ${quiet}` : ""}`;
}

/** Which limiters are shown as cards, which as lines, and how many of these decided nothing. */
function ranked(shown) {
  if (limiters.length < FILTER_FROM) return { first: shown, rest: [], idle: 0 };
  if (!latest?.newest) return { first: [], rest: [], idle: 0 }; // which will be known in a second
  const sums = latest.sums(range);
  const trouble = ({ name }) => (sums.get(name)?.refused ?? 0) + (sums.get(name)?.degraded ?? 0);
  const isBusy = ({ name }) => sums.has(name) || heldWords(entry(latest.newest.held, name) ?? {}) !== "";
  const busy = shown.filter(isBusy).sort((one, other) => trouble(other) - trouble(one));
  const idle = shown.filter((limiter) => !isBusy(limiter));
  const isFirst = ({ name }, place) => place < MOST_CARDS || opened.has(name);
  const isOpened = ({ name }) => opened.has(name);
  return {
    first: [...busy.filter(isFirst), ...idle.filter(isOpened)],
    rest: [...busy.filter((limiter, place) => !isFirst(limiter, place)), ...idle.filter((limiter) => !isOpened(limiter))],
    idle: idle.filter((limiter) => !isOpened(limiter)).length,
  };
}

/** Whether somebody points at limiters or has moved the focus there: then they stay where they are. */
const isInUse = () => cards.size > 0 && [byId("cards"), byId("lines")].some((node) => node.matches(":hover, :focus-within"));

function createLine({ name }) {
  const line = {
    name,
    quotas: el("span", { class: "line-quotas", dir: "auto" }),
    badge: el("span", { class: "badge badge-bad", hidden: true }),
    now: el("span", { class: "line-now" }),
  };
  const open = el("button", { type: "button", class: "line-open", click: () => openCard(name) }, el("bdi", {}, name));
  open.setAttribute("aria-label", `Show ${name}`);
  line.node = el("li", { class: "line" }, open, line.quotas, line.badge, line.now);
  return line;
}

function describeLine(line, { rules }) {
  setText(line.quotas, rules.map(({ quota }) => quota).join(", "));
}

function openCard(name) {
  opened.add(name);
  showCards();
  const { node } = cards.get(name);
  node.tabIndex = -1;
  node.focus();
  node.scrollIntoView({ block: "nearest" });
}

function drawLine(line, { newest: tick }) {
  const now = latest.sum(RECENT, line.name);
  setText(line.now, decisionsOf(now) ? `${rateOf(now, decisionsOf)}/s` : "");
  const down = isDown(tick, line.name);
  setText(line.badge, down ? "Store down" : "");
  show(line.badge, down);
}

const isDown = (tick, name) => tick.stores.some((store) => store.limiter === name && !store.up);

function createCard({ name }) {
  const card = {
    name,
    rules: el("ul", { class: "rules" }),
    store: el("p", { class: "store-line" }),
    badge: el("span", { class: "badge badge-bad", hidden: true }),
    now: el("p", { class: "card-now" }, "–"),
    totals: el("dl", { class: "totals" }),
    when: el("span", { class: "readout-time" }),
    admitted: el("b"),
    refused: el("b"),
    degraded: el("b"),
    table: el("tbody"),
    details: el("details", { class: "figures-table" }, el("summary", {}, "Figures as a table")),
    chartNode: el("div", { class: "chart" }),
  };
  card.totalAdmitted = total(card.totals, "Admitted", "total-admitted");
  card.totalRefused = total(card.totals, "Refused", "total-refused");
  card.totalShare = total(card.totals, "Share refused", "total-share");
  card.totalDegraded = total(card.totals, "Without the store", "total-degraded");
  card.totalHeld = total(card.totals, "Held now", "held");
  card.chart = new RateChart(card.chartNode, name, (bin) => {
    card.read = bin;
    readOut(card);
  });
  card.chartNode.chart = card.chart;
  widths.observe(card.chartNode);
  card.details.append(tableAround(card.table, name));
  card.details.addEventListener("toggle", () => latest && drawCard(card, latest));
  card.node = assemble(card);
  sight.observe(card.chartNode);
  return card;
}

function assemble(card) {
  const tryButton = el("button", { class: "quiet", type: "button", click: () => onTry(card.name) }, "Try it");
  tryButton.setAttribute("aria-label", `Try ${card.name}`);
  return el(
    "article",
    { class: "card", "data-limiter": card.name },
    el("header", { class: "card-head" }, el("h3", { dir: "auto" }, card.name), card.badge, card.now),
    card.rules,
    el(
      "p",
      { class: "readout" },
      legend("admitted", "Admitted ", card.admitted),
      legend("refused", "Refused ", card.refused),
      (card.degradedLegend = legend("degraded", "of both without the store ", card.degraded)),
      card.when,
    ),
    card.chartNode,
    card.totals,
    el("footer", { class: "card-foot" }, card.store, tryButton),
    card.details,
  );
}

function legend(name, label, value) {
  return el("span", { class: `legend-${name}` }, el("span", { class: "key-mark", "aria-hidden": "true" }), label, value);
}

function total(list, label, name) {
  const value = el("dd", { "data-figure": name }, "–");
  list.append(el("div", {}, el("dt", {}, label), value));
  return value;
}

/** Write a figure that matters only if it is not zero. */
function setRare(value, number) {
  setText(value, count(number));
  show(value.parentElement, number > 0);
}

function tableAround(body, name) {
  const heads = ["From", "Admitted per second", "Refused per second", "Without the store"].map((text) => el("th", { scope: "col" }, text));
  const caption = el("caption", { class: "visually-hidden" }, `${name}: means, newest first`);
  return el("table", {}, caption, el("thead", {}, el("tr", {}, ...heads)), body);
}

function describeCard(card, limiter) {
  card.ruleRows = keyed(card.rules, limiter.rules, (rule) => JSON.stringify(rule), createRule);
  const failure = `If it cannot be asked, ${failureWords(limiter.on_store_error)}.`;
  setText(card.store, `Counts in ${limiter.store}. ${failure}`);
}

function createRule(rule) {
  const tiers = Object.entries(rule.tiers ?? {}).map(([tier, quota]) =>
    el("span", { class: "tier", dir: "auto" }, `${tier} ${quota}`),
  );
  const words = el("span", { dir: "auto" }, rule.words);
  const refused = el("span", { class: "rule-refused", "data-rule": rule.name });
  const held = el("span", { class: "rule-held" });
  const unit = rule.unit === "requests" ? "" : el("span", { class: "unit" }, `counts ${rule.unit}`);
  const parts = [words, " ", el("code", {}, rule.name), " ", unit, ...tiers, held, refused, inFile(rule)];
  return { rule, refused, held, node: el("li", {}, ...parts) };
}

/** Where the policy file has a rule, and the rule as the file could have it, to copy. */
function inFile({ name, source, toml }) {
  const text = el("pre", { tabindex: 0, role: "group", "aria-label": `${name} for the policy file` }, toml);
  const copied = el("span", { class: "sub", role: "status" });
  const copy = el("button", { class: "quiet", type: "button", click: () => copyText(text, copied) }, "Copy");
  copy.setAttribute("aria-label", `Copy ${name}`);
  const where = el("p", { class: "sub" }, source ?? ""); // the whole path: it would fill a card that shows it always
  const short = source?.split("/").at(-1) ?? "For the file";
  return el("details", { class: "in-file" }, el("summary", {}, short), where, text, copy, copied);
}

/** Let the charts look back as far as this. */
export function showRange(chosen) {
  range = chosen;
  showCards();
}

export function drawLimiters(history) {
  latest = history;
  if (limiters.length >= FILTER_FROM && !isInUse()) arrange();
  drawAll();
}

function drawAll() {
  const history = latest;
  if (!history) return;
  if (history.newest) setText(byId("totals-since"), `Totals since ${moment(history.newest.started)}.`);
  for (const card of cards.values()) drawCard(card, history);
  if (history.newest) for (const line of lines.values()) drawLine(line, history);
}

function drawCard(card, history) {
  const tick = history.newest;
  if (!tick) return;
  const bins = history.bins(card.name, range);
  card.chart.draw(bins, range);
  const now = history.sum(RECENT, card.name);
  card.recent = now;
  readOut(card);
  setText(card.now, `${rateOf(now, decisionsOf)}/s`);
  const totals = sumOf([entry(tick.totals, card.name)]);
  setText(card.totalAdmitted, count(totals.admitted));
  setText(card.totalRefused, count(totals.refused));
  setText(card.totalShare, share(totals.refused, decisionsOf(totals)));
  setRare(card.totalDegraded, totals.degraded);
  drawHeld(card, entry(tick.held, card.name) ?? {});
  drawRefusals(card, tick.refusals.filter(({ limiter }) => limiter === card.name));
  show(card.degradedLegend, bins.some((bin) => bin.degraded));
  drawBadge(card, tick, now);
  if (card.details.open) drawTable(card.table, bins);
}

function drawBadge(card, tick, now) {
  const down = isDown(tick, card.name);
  setText(card.badge, down ? "Store down" : now.degraded ? "Store was not asked" : "");
  show(card.badge, down || now.degraded > 0);
  card.badge.title = now.degraded ? `${plural(now.degraded, "decision")} without the store in the last ${RECENT} s` : "";
}

/**
 * The units of open holds, and beside a rule of places how many are held: by all keys together, for its limit is for each. A place
 * may be free before its hold is over, when its lease ends, so these are the most.
 */
function drawHeld(card, units) {
  const words = heldWords(units);
  setText(card.totalHeld, words || "0");
  show(card.totalHeld.parentElement, words !== "");
  for (const { rule, held } of card.ruleRows.values()) {
    const places = entry(units, rule.unit) ?? 0;
    if (rule.kind === "concurrent") setText(held, `${places ? "up to " : ""}${plural(places, "place")} held now`);
  }
}

/** Beside every rule: how often it has refused, and callers of which tiers. */
function drawRefusals(card, refusals) {
  for (const { rule, refused } of card.ruleRows.values()) {
    const own = refusals.filter((entry) => entry.rule === rule.name);
    const all = own.reduce((sum, entry) => sum + entry.refused, 0);
    const byTier = own.map((entry) => `${entry.tier ?? "no tier"} ${count(entry.refused)}`).join(", ");
    const tiers = own.some(({ tier }) => tier !== null) ? ` (${byTier})` : "";
    setText(refused, all ? `refused ${count(all)}${tiers}` : "");
  }
}

/** The chosen bar in words, or what "now" is: the same seconds as everywhere else in the page. */
function readOut(card) {
  const { read, recent } = card;
  const parts = read ? { ...read, seconds: read.known ? 1 : 0 } : (recent ?? { seconds: 0 });
  setText(card.when, read ? span(read.from, range.bin) : `Last ${RECENT} s`);
  for (const part of ["admitted", "refused", "degraded"]) setText(card[part], `${rateOf(parts, (sum) => sum[part])}/s`);
}

function drawTable(body, bins) {
  const rows = [];
  for (let end = bins.length; end > 0; end -= range.row) {
    const part = bins.slice(end - range.row, end).filter((bin) => bin.known);
    if (!part.length) continue;
    const mean = (pick) => rate(part.reduce((sum, bin) => sum + pick(bin), 0) / part.length);
    const means = ["admitted", "refused", "degraded"].map((name) => mean((bin) => bin[name]));
    const cells = [moment(part[0].from), ...means];
    rows.push({ index: rows.length, cells });
  }
  keyed(body, rows, ({ index }) => index, createTableRow, (row, { cells }) => {
    cells.forEach((text, index) => setText(row.node.children[index], text));
  });
}

function createTableRow() {
  return { node: el("tr", {}, el("th", { scope: "row" }), el("td"), el("td"), el("td")) };
}
