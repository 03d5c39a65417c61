// The form that asks a limiter, and what it answers: a sentence, the JSON, and the curl line that does the same.

import { call, hasToken } from "./api.js";
import { byId, copyText, el, setText, show } from "./dom.js";
import { keyOf, scopesOf } from "./keys.js";
import { count, decisionSentence, duration, plural } from "./words.js";

let limiters = [];
let hold = null;

export function setUpTry() {
  byId("try-form").addEventListener("submit", ask);
  byId("try-form").addEventListener("input", ({ target }) => {
    if (target === byId("try-limiter")) chooseLimiter();
    else writeCurl();
  });
  byId("try-hold").addEventListener("submit", settle);
  byId("try-release").addEventListener("click", () => finish("release", {}));
  byId("try-copy").addEventListener("click", () => copyText(byId("try-curl"), byId("try-copied")));
  writeCurl();
}

/** Offer these limiters; what is chosen and typed stays as long as it can. */
export function offerLimiters(described) {
  const same = fieldsOf(described) === fieldsOf(limiters);
  limiters = described;
  if (same) return;
  const select = byId("try-limiter");
  const before = select.value;
  select.replaceChildren(...described.map(({ name }) => el("option", { value: name }, name)));
  if (described.some(({ name }) => name === before)) select.value = before;
  chooseLimiter();
}

/** Choose a limiter for the person, and go there. */
export function tryLimiter(name) {
  byId("try-limiter").value = name;
  chooseLimiter();
  byId("try").scrollIntoView();
  (byId("try-keys").querySelector("input") ?? byId("try-cost")).focus({ preventScroll: true });
}

const chosen = () => limiters.find(({ name }) => name === byId("try-limiter").value);

const tiersOf = ({ rules }) => [...new Set(rules.flatMap(({ tiers }) => Object.keys(tiers)))];

/** All that the form depends on, as one text to compare. */
const fieldsOf = (list) => JSON.stringify(list.map((limiter) => [limiter.name, scopesOf(limiter), tiersOf(limiter)]));

/** A field for every part of the chosen limiter's key, and its tiers if it has any. */
function chooseLimiter() {
  const limiter = chosen() ?? { rules: [], shadow: [] };
  const row = byId("try-keys");
  const typed = new Map([...row.querySelectorAll("input")].map((input) => [input.dataset.scope, input.value]));
  const fallback = [...typed.values()][0] ?? "alice";
  const fields = scopesOf(limiter).map((scope) => {
    const input = el("input", { required: true, autocomplete: "off", autocapitalize: "off", spellcheck: "false" });
    input.dataset.scope = scope ?? "";
    input.value = typed.get(input.dataset.scope) ?? fallback;
    return field(scope === null ? "Key" : scope, input, "grow");
  });
  const tiers = tiersOf(limiter);
  const tier = byId("try-tier")?.value;
  if (tiers.length) {
    const options = ["", ...tiers].map((each) => el("option", { value: each, selected: each === tier }, each || "none"));
    fields.push(field("Tier", el("select", { id: "try-tier" }, ...options)));
  }
  row.replaceChildren(...fields);
  show(row, fields.length > 0);
  writeCurl();
}

function field(label, input, extra = "") {
  return el("label", { class: `field ${extra}` }, el("span", { dir: "auto" }, label), input);
}

/** The call that the form describes now. */
function described(limiter) {
  const inputs = [...byId("try-keys").querySelectorAll("input")];
  const body = { key: keyOf(limiter, (scope) => inputs.find((input) => input.dataset.scope === (scope ?? "")).value) };
  const cost = byId("try-cost").valueAsNumber;
  if (cost !== 1 && Number.isFinite(cost)) body.cost = cost;
  const tier = byId("try-tier")?.value;
  if (tier) body.tier = tier;
  const operation = byId("try-form").elements.operation.value;
  const path = `/v1/limiters/${encodeURIComponent(limiter.name)}/${operation}`;
  return { operation, path, body, cost: body.cost ?? 1 };
}

async function ask(event) {
  event.preventDefault();
  const { operation, path, body, cost } = described(chosen());
  endHold();
  try {
    const answer = await call("POST", path, body);
    const decision = operation === "hold" ? answer.decision : answer;
    say(decisionSentence(decision, operation, cost), decision.allowed ? "allowed" : "denied");
    showJson(answer);
    if (operation === "hold" && answer.hold !== null) beginHold(answer, cost);
  } catch (problem) {
    say(problem.message, "problem");
  }
  writeCurl();
}

function say(text, kind) {
  const mark = el("span", { class: "answer-mark", "aria-hidden": "true" });
  byId("try-answer").replaceChildren(el("p", { class: `answer answer-${kind}` }, mark, text));
  show(byId("try-json"), false);
}

function showJson(answer) {
  setText(byId("try-json-text"), JSON.stringify(answer, null, 2));
  show(byId("try-json"), true);
}

function beginHold({ hold: id, expires_after: expires }, cost) {
  hold = id;
  byId("try-settle-cost").value = cost;
  setHoldButtons(true);
  const until = expires === null ? "" : ` If neither happens, the units come back in ${duration(expires)}.`;
  setText(byId("try-hold-answer"), `Say what it really cost, or release it.${until}`);
  byId("try-hold-answer").classList.remove("problem");
  show(byId("try-hold"), true);
}

function endHold() {
  hold = null;
  show(byId("try-hold"), false);
}

function setHoldButtons(enabled) {
  for (const id of ["try-settle-cost", "try-settle", "try-release"]) byId(id).disabled = !enabled;
}

function settle(event) {
  event.preventDefault();
  return finish("settle", { cost: byId("try-settle-cost").valueAsNumber });
}

async function finish(operation, body) {
  const answer = byId("try-hold-answer");
  try {
    const finished = await call("POST", `/v1/holds/${encodeURIComponent(hold)}/${operation}`, body);
    setText(answer, finishedSentence(finished));
    answer.classList.remove("problem");
    showJson(finished);
    setHoldButtons(false);
  } catch (problem) {
    setText(answer, problem.message);
    answer.classList.add("problem");
  }
}

function finishedSentence({ held, cost, first }) {
  const settled = `Settled at ${count(cost)} of ${plural(held, "unit")} held`;
  const done = cost === 0 ? `Released: all ${count(held)} given back` : settled;
  return first ? `${done}.` : `${done}, as somebody had done before.`;
}

function writeCurl() {
  const limiter = chosen();
  show(byId("try-curl-box"), limiter !== undefined);
  if (!limiter) return;
  const { path, body } = described(limiter);
  const parts = [`curl ${quoted(location.origin + path)}`];
  // Never the token itself: people paste such lines into chats.
  if (hasToken()) parts.push(`-H "Authorization: Bearer $HEADGATE_TOKEN"`);
  parts.push(`-H ${quoted("Content-Type: application/json")}`, `-d ${quoted(JSON.stringify(body))}`);
  setText(byId("try-curl"), parts.join(" \\\n  "));
  setText(byId("try-copied"), "");
}

/** Text as one word of a POSIX shell. */
const quoted = (text) => (/^[\w./:%-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);
