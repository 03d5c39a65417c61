// What is listed rather than drawn: stores, shadow rules, refused keys, the demo's services.

import { snippet, watch } from "./candidates.js";
import { byId, el, keyed, setText, setVariable, show } from "./dom.js";
import { count, latency, moment, plural, share } from "./words.js";

/**
 * A table whose rows live as long as their key. On a narrow screen the style sheet stacks its cells under their labels;
 * the roles keep it a table for assistive technology even then.
 */
class Table {
  #body = el("tbody", { role: "rowgroup" });

  constructor(caption, columns) {
    this.columns = columns;
    const heads = columns.map(({ title, number }) =>
      el("th", { scope: "col", role: "columnheader", class: number ? "number" : null }, title),
    );
    this.node = el(
      "table",
      { class: "stacking", role: "table" },
      el("caption", { class: "visually-hidden" }, caption),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)),
      this.#body,
    );
  }

  draw(items, keyOf) {
    keyed(this.#body, items, keyOf, () => this.#createRow(), (row, item) => {
      this.columns.forEach((column, index) => column.write(row.cells[index], item));
    });
  }

  #createRow() {
    const cells = this.columns.map(({ title, number }) =>
      el("td", { role: "cell", "data-label": title, class: number ? "number" : null }),
    );
    return { cells, node: el("tr", { role: "row" }, ...cells) };
  }
}

const text = (title, of) => ({ title, write: (cell, item) => setText(cell, of(item)) });
const number = (title, of) => ({ ...text(title, (item) => written(of(item))), number: true });
const written = (value) => (typeof value === "string" ? value : count(value));
const name = (title, of) => ({ title, write: (cell, item) => nameInto(cell, of(item)) });

/** Somebody's own text: isolated, so that its direction does not turn the sentence around it. */
function nameInto(cell, content) {
  if (!cell.firstChild) cell.append(el("bdi", { class: "name" }));
  setText(cell.firstChild, content);
}

/** A state as a badge: good or bad by word and shape, too, not by colour alone. */
function badge(title, of) {
  return {
    title,
    write(cell, item) {
      const { good, words } = of(item);
      if (!cell.firstChild) cell.append(el("span", { class: "badge" }));
      cell.firstChild.className = `badge badge-${good ? "good" : "bad"}`;
      setText(cell.firstChild, words);
    },
  };
}

const MOST_NAMED = 3; // limiters of a store; more are counted, and named on demand

const stores = new Table("Stores and breakers", [
  name("Store", (store) => store.store),
  {
    title: "Limiters",
    write(cell, { limiters }) {
      const names = limiters.join(", ");
      if (limiters.length <= MOST_NAMED) {
        cell.querySelector("details")?.remove();
        nameInto(cell, names);
        return;
      }
      if (!cell.querySelector("details")) cell.replaceChildren(el("details", {}, el("summary"), el("span", { class: "sub", dir: "auto" })));
      setText(cell.querySelector("summary"), plural(limiters.length, "limiter"));
      setText(cell.querySelector("span"), names);
    },
  },
  badge("State", ({ down, limiters }) => ({ good: down === 0, words: stateWords(down, limiters.length) })),
  badge("Breaker", (store) => ({ good: store.breaker === "closed", words: capital(store.breaker) })),
  number("Failures", (store) => store.failures),
  number("p50", (store) => latency(store.p50)),
  number("p99", (store) => latency(store.p99)),
  number("Last contact", (store) => (store.last_contact === null ? "–" : moment(store.last_contact))),
]);

function stateWords(down, limiters) {
  if (down === 0) return "Up";
  return down === limiters ? "Down" : `Down for ${count(down)} of ${count(limiters)}`;
}

/** The stores of a tick, which has an entry per limiter, one by one; those that are down first. */
function byStore(list) {
  const largest = (entries, of) => entries.map(of).reduce((most, value) => (value > (most ?? -Infinity) ? value : most), null);
  const found = [...Map.groupBy(list, ({ store }) => store)].map(([store, entries]) => ({
    store,
    limiters: entries.map(({ limiter }) => limiter),
    down: entries.filter(({ up }) => !up).length,
    breaker: entries.find(({ breaker }) => breaker !== "closed")?.breaker ?? "closed",
    failures: largest(entries, ({ failures }) => failures),
    p50: largest(entries, ({ p50 }) => p50),
    p99: largest(entries, ({ p99 }) => p99),
    last_contact: largest(entries, ({ last_contact: last }) => last),
  }));
  return found.sort((one, other) => (other.down > 0) - (one.down > 0));
}

const shadows = new Table("Shadow rules and what they would have refused", [
  name("Limiter", (shadow) => shadow.limiter),
  {
    title: "Rule",
    write(cell, shadow) {
      if (!cell.firstChild) cell.append(el("bdi", { class: "name" }), el("span", { class: "sub", dir: "auto" }));
      setText(cell.firstChild, shadow.rule);
      setText(cell.lastChild, shadow.words);
    },
  },
  number("Asked", (shadow) => shadow.asked),
  {
    title: "Would have refused",
    number: true,
    write(cell, shadow) {
      if (!cell.firstChild) cell.append(el("b"), " ", el("span", { class: "sub" }));
      setText(cell.firstChild, count(shadow.refused));
      setText(cell.lastChild, share(shadow.refused, shadow.asked));
    },
  },
  text("Not decided", (shadow) => (shadow.failed ? plural(shadow.failed, "time") : "–")),
  number("Live rule refused", (shadow) => (shadow.candidate_for === null ? "–" : shadow.live_refused)),
  number("Would have admitted of these", (shadow) => (shadow.candidate_for === null ? "–" : shadow.admitted)),
  {
    title: "Candidate",
    write(cell, shadow) {
      if (shadow.candidate_for === null) return;
      if (!cell.firstChild) createCandidate(cell, shadow);
      const until = shadow.warming_up_until;
      const words = until && `Warming up until ${moment(until)}: what was counted before is missing. Then the figures start from 0.`;
      setText(cell.querySelector(".warming"), words || "");
    },
  },
]);

function createCandidate(cell, shadow) {
  const stop = el("button", { type: "button", class: "quiet" }, "Stop");
  stop.setAttribute("aria-label", `Stop watching ${shadow.rule} in ${shadow.limiter}`);
  stop.addEventListener("click", () => watch(shadow.limiter, shadow.candidate_for, null));
  const lines = el("pre", { tabindex: 0, role: "group", "aria-label": "For the policy file" }, snippet(shadow));
  const warming = el("span", { class: "sub warming" });
  cell.append(stop, warming, el("details", {}, el("summary", {}, "For the file"), lines));
}

const capital = (word) => word.charAt(0).toUpperCase() + word.slice(1).replaceAll("_", " ");

let inspectKey = () => {};

/** `inspect(key)` is what choosing a refused key does. */
export function setUpTables(inspect) {
  inspectKey = inspect;
}

/** Draw what a tick lists. */
export function drawTables(tick) {
  drawStores(tick.stores);
  drawShadows(tick.shadow);
  drawRefused(tick.top);
  drawServices(tick.demo);
}

const noStores = sentence("No limiter has a store yet.");
const noShadows = sentence("None. Mark a rule with ", "shadow = true", " to see what it would refuse before it does.");
const refusedOff = sentence(
  "Not shown, since keys may be personal. Write ",
  "top_keys = 10",
  " under ",
  "[server]",
  " in the policy file to see them.",
);
const noRefused = sentence("No one has been refused.");
const refusedList = el("ol", { class: "refused-list" });

function drawStores(list) {
  only(byId("stores-body"), list.length ? stores.node : noStores);
  stores.draw(byStore(list), ({ store }) => store);
}

function drawShadows(list) {
  only(byId("shadow-body"), list.length ? shadows.node : noShadows);
  shadows.draw(list, (shadow) => JSON.stringify([shadow.limiter, shadow.rule, shadow.quota]));
}

function drawRefused(top) {
  only(byId("refused-body"), top === null ? refusedOff : top.length ? refusedList : noRefused);
  const most = Math.max(1, ...(top ?? []).map(({ refused }) => refused));
  const identity = (item) => JSON.stringify([item.limiter, item.key, item.inspect]);
  keyed(refusedList, top ?? [], identity, createRefused, (row, item) => {
    setText(row.refused, count(item.refused));
    setVariable(row.node, "--share", item.refused / most);
  });
}

function createRefused(item) {
  const refused = el("b", { class: "refused-count" });
  const words = el("span", { class: "sub" }, "refused by ", el("bdi", {}, item.limiter));
  const bar = el("span", { class: "share-bar", "aria-hidden": "true" });
  return { refused, node: el("li", {}, item.inspect === null ? shownKey(item.key) : inspectButton(item), words, refused, bar) };
}

const shownKey = (key) => el("bdi", { class: "name" }, key || "everybody together");

function inspectButton({ key, inspect }) {
  const button = el("button", { type: "button", class: "key", click: () => inspectKey(inspect) }, shownKey(key));
  button.setAttribute("aria-label", `Inspect ${key}`);
  return button;
}

function drawServices(demo) {
  show(byId("services"), demo !== null && demo.services.length > 0);
  const identity = ({ name: title, url }) => JSON.stringify([title, url]);
  keyed(byId("service-list"), demo?.services ?? [], identity, createService, (row, service) => {
    setText(row.figures, `${count(service.sent)} sent, ${count(service.refused)} refused`);
  });
}

function createService({ name: title, url }) {
  const figures = el("span", { class: "sub" });
  return { figures, node: el("li", {}, linkTo(url, title), figures) };
}

/** A link, if it is one that a browser may follow; otherwise only its text. */
function linkTo(url, title) {
  const safe = URL.canParse(url) && ["http:", "https:"].includes(new URL(url).protocol);
  return safe ? el("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, title) : el("span", {}, title);
}

function only(container, node) {
  if (container.firstElementChild !== node) container.replaceChildren(node);
}

/** A sentence in which every second part is code. */
function sentence(...parts) {
  return el("p", { class: "empty" }, ...parts.map((part, index) => (index % 2 ? el("code", {}, part) : part)));
}
