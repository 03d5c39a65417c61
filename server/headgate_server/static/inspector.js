// The state of one key in every rule, kept fresh while the page is live; reset by an administrator.

import { call } from "./api.js";
import { byId, el, keyed, setAttribute, setText, setVariable, show } from "./dom.js";
import { fits, keyOf, partOf, readKey, writtenKey } from "./keys.js";
import { count, duration, plural, timeAfter, timeIn } from "./words.js";

let described = new Map();
let shown = null; // the key and tier that are inspected
let asking = false;
let answerDialog = () => {}; // resolves the question that the dialog is open for
let touched = new Set(); // limiters that have counted something: they stay on top, so that nothing jumps about

export function setUpInspector() {
  byId("inspect-form").addEventListener("submit", (event) => {
    event.preventDefault();
    begin(readKey(byId("inspect-key").value), byId("inspect-tier").value);
  });
}

/** Take note of the limiters, as GET /v1/limiters describes them: a reset must name their scopes. */
export function knowLimiters(limiters) {
  described = new Map(limiters.map((limiter) => [limiter.name, limiter]));
}

/** Inspect a key that was chosen elsewhere in the page, and go there. */
export function inspect(key) {
  byId("inspect-key").value = writtenKey(key);
  byId("inspect").scrollIntoView();
  byId("inspect-key").focus({ preventScroll: true });
  begin(key, byId("inspect-tier").value);
}

async function begin(key, tier) {
  shown = { key, tier: tier.trim() || null };
  touched = new Set();
  setText(byId("inspect-status"), "Asking…");
  await ask(shown);
}

/** Ask again, unless an answer is still under way. Called once a second. */
export async function refreshInspector() {
  if (shown && !asking) await ask(shown);
}

async function ask(wanted) {
  asking = true;
  try {
    const { limiters } = await call("POST", "/v1/inspect", wanted);
    const isFit = ({ name }) => !described.has(name) || fits(described.get(name), wanted.key);
    if (wanted === shown) draw(limiters.filter(isFit));
  } catch (problem) {
    if (wanted !== shown) return;
    shown = null; // do not repeat what fails; the person may
    draw([]);
    say(problem.message, true);
  } finally {
    asking = false;
  }
}

function say(text, bad = false) {
  const status = byId("inspect-status");
  setText(status, text);
  status.classList.toggle("problem", bad);
}

function draw(limiters) {
  for (const limiter of limiters) {
    if (limiter.error !== null || limiter.results.some(({ used }) => used > 0)) touched.add(limiter.name);
  }
  const isTouched = ({ name }) => touched.has(name);
  const untouched = limiters.filter((limiter) => !isTouched(limiter));
  drawGroups(byId("inspect-results"), limiters.filter(isTouched));
  drawGroups(byId("inspect-untouched-results"), untouched);
  const rest = byId("inspect-untouched");
  show(rest, untouched.length > 0);
  setText(rest.querySelector("summary"), `${plural(untouched.length, "limiter")} with nothing counted`);
  if (limiters.length) say(touched.size ? "" : "Nothing is counted for this key.");
}

function drawGroups(container, limiters) {
  keyed(container, limiters, ({ name }) => name, createGroup, (group, limiter) => {
    setText(group.error, limiter.error ?? "");
    show(group.error, limiter.error !== null);
    keyed(group.rules, limiter.results, (result) => result.name, createRule, drawRule);
  });
}

function createGroup({ name }) {
  const group = {
    name,
    rules: el("ul", { class: "usage" }),
    error: el("p", { class: "problem" }),
    answer: el("p", { class: "status", role: "status" }),
  };
  const reset = el("button", { type: "button", class: "quiet", click: () => askToReset(group) }, "Reset…");
  reset.setAttribute("aria-label", `Reset in ${name}`);
  const head = el("header", { class: "card-head" }, el("h3", { dir: "auto" }, name), reset);
  group.node = el("article", { class: "inspected", "data-limiter": name }, head, group.error, group.rules, group.answer);
  return group;
}

function createRule({ name }) {
  const bar = el("div", { class: "meter", role: "meter", "aria-label": `Used in ${name}`, "aria-valuemin": 0 });
  const row = { bar, used: el("b"), frees: el("span"), empties: el("span") };
  const line = el("p", { class: "usage-line" }, el("bdi", { class: "name" }, name), row.used);
  row.node = el("li", {}, line, bar, el("p", { class: "usage-line sub" }, row.frees, row.empties));
  return row;
}

function drawRule(row, result) {
  const full = result.remaining <= 0;
  setText(row.used, usedWords(result));
  setText(row.frees, freesWords(result));
  setText(row.empties, result.used > 0 && result.reset_after ? emptiesWords(result) : "");
  row.bar.classList.toggle("meter-full", full);
  setVariable(row.bar, "--share", result.limit ? Math.min(1, result.used / result.limit) : 1);
  setAttribute(row.bar, "aria-valuemax", result.limit);
  setAttribute(row.bar, "aria-valuenow", Math.min(result.used, result.limit));
  setAttribute(row.bar, "aria-valuetext", `${result.used} of ${result.limit}`);
}

function usedWords({ kind, unit, used, limit }) {
  if (kind === "penalty") return `${count(used)} of ${count(limit)} refusals`;
  const what = kind === "concurrent" ? "places held" : unit === "requests" ? "used" : `${unit} used`;
  return `${count(used)} of ${count(limit)} ${what}`;
}

/** When nothing is counted any more: a place may be free sooner, when its holder releases it. */
function emptiesWords({ kind, timezone, reset_after: after }) {
  if (kind === "calendar") return `empty at ${timeIn(timezone, after)}`;
  if (kind === "penalty") return `forgotten in ${duration(after)}`;
  return kind === "concurrent" ? `all free in ${duration(after)} at most` : `empty in ${duration(after)}`;
}

function freesWords({ kind, remaining, limit, used, frees_after: after }) {
  if (after === null) return "Never admits";
  if (kind === "penalty") return after > 0 ? `Refuses everything for ${duration(after)}, until ${timeAfter(after)}` : "No penalty now";
  if (after <= 0) return `${count(remaining)} left`;
  const over = used > limit ? `${count(used - limit)} over the limit, frees` : "Full, frees";
  const most = kind === "concurrent" ? " at most" : "";
  return `${over} in ${duration(after)}${most}, at ${timeAfter(after)}`;
}

async function askToReset(group) {
  const limiter = described.get(group.name);
  if (!shown || !limiter) return;
  const { key } = shown;
  const words = writtenKey(key);
  if (!(await confirmed(`Reset ${words}?`, resetWords(limiter, words), "Reset"))) return;
  try {
    const path = `/v1/limiters/${encodeURIComponent(limiter.name)}/reset`;
    await call("POST", path, { key: keyOf(limiter, (scope) => partOf(key, scope)) });
    answer(group, "Reset.");
    await refreshInspector();
  } catch (problem) {
    answer(group, problem.message, true);
  }
}

function resetWords({ name, rules }, key) {
  const isShared = rules.some(({ scope }) => scope === "*");
  const shared = isShared ? " That includes what it counts for everybody together." : "";
  return `${name} forgets everything that it has counted for ${key}, in every rule.${shared} This cannot be undone.`;
}

function answer(group, text, bad = false) {
  setText(group.answer, text);
  group.answer.classList.toggle("problem", bad);
}

/** Ask for confirmation of something that cannot be undone; true if it was given. */
function confirmed(title, text, yes) {
  const dialog = byId("confirm-dialog");
  answerDialog(false);
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-yes"), yes);
  dialog.returnValue = "";
  // The event may come late, when the dialog is open again for the next question.
  dialog.onclose = () => dialog.open || answerDialog(dialog.returnValue === "yes");
  dialog.showModal();
  return new Promise((resolve) => {
    answerDialog = resolve;
  });
}
