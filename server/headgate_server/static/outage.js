// Stores that do not answer: which, since when, why, and what their limiters do meanwhile.

import { byId, el, keyed, setText, show } from "./dom.js";
import { failureWords, moment, plural } from "./words.js";

const MOST_NAMED = 5; // limiters of a store; more are counted

/** The stores of a tick that are down, each with its limiters. */
export function outages({ stores }) {
  const down = Map.groupBy(stores.filter(({ up }) => !up), ({ store }) => store);
  return [...down].map(([store, entries]) => ({
    store,
    limiters: entries.map(({ limiter }) => limiter),
    since: Math.min(...entries.map(({ since }) => since ?? Infinity)),
    error: withoutName(entries.find(({ reason }) => reason)?.reason ?? "it does not answer", store),
  }));
}

/** An error without the name of its store at the beginning: that stands before it already. */
function withoutName(error, store) {
  const name = store.replace("***@", "");
  return error.startsWith(name) ? error.slice(name.length).replace(/^:? /, "") : error;
}

export const outageWords = (down) => (down.length ? `${plural(down.length, "store")} down` : "");

/** Draw the banner; `limiters` is how GET /v1/limiters describes them. */
export function drawOutage(down, limiters) {
  show(byId("outage"), down.length > 0);
  setText(byId("outage-title"), outageWords(down));
  const policies = new Map(limiters.map((limiter) => [limiter.name, limiter.on_store_error]));
  keyed(byId("outage-list"), down, ({ store }) => store, createStore, (row, outage) => {
    setText(row.since, Number.isFinite(outage.since) ? ` has not counted since ${moment(outage.since)}: ` : ": ");
    setText(row.error, outage.error);
    keyed(row.limiters, policyLines(outage.limiters, policies), (line) => JSON.stringify(line), createLine);
  });
}

/** What each limiter does meanwhile; of many limiters, how many do what. */
function policyLines(names, policies) {
  const lines = names.map((who) => ({ who, words: policies.has(who) ? `: ${failureWords(policies.get(who))}` : "" }));
  if (names.length <= MOST_NAMED) return lines;
  const groups = Map.groupBy(lines, ({ words }) => words);
  return [...groups].map(([words, some]) => ({ who: plural(some.length, "limiter"), words }));
}

function createStore({ store }) {
  const row = { since: el("span"), error: el("span"), limiters: el("ul", { class: "outage-limiters" }) };
  row.node = el("li", {}, el("p", {}, el("bdi", { class: "name" }, store), row.since, row.error), row.limiters);
  return row;
}

function createLine({ who, words }) {
  return { node: el("li", {}, el("b", { dir: "auto" }, who), words) };
}
