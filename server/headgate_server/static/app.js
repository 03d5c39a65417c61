// The dashboard: connects the server's events to the parts of the page.

import { askForToken, call, forgetToken, hasToken, onToken } from "./api.js";
import { offerRules, setUpCandidates } from "./candidates.js";
import { byId, setAttribute, setText, show } from "./dom.js";
import { History, RANGES } from "./history.js";
import { inspect, knowLimiters, refreshInspector, setUpInspector } from "./inspector.js";
import { drawLimiters, setLimiters, setUpLimiters, showRange } from "./limiters.js";
import { drawOutage, outageWords, outages } from "./outage.js";
import { drawOverview, setUpOverview } from "./overview.js";
import { Stream } from "./stream.js";
import { drawTables, setUpTables } from "./tables.js";
import { offerLimiters, setUpTry, tryLimiter } from "./try.js";
import { clockTime, moment, plural } from "./words.js";

const DESCRIBE_EVERY = 5; // ticks: how soon a changed policy shows in the words of a card
const PAST_EVERY = 15; // ticks between two looks at a longer range
const STALE_MS = 3_000; // there is a tick every second; without one for so long nothing is known about now

const history = new History();
const stream = new Stream(onEvent, onState);
let limiters = [];
let frame = 0;
let ticksUntilDescribed = 0;
let lastTickAt = 0;
let ticksUntilPast = 0;

function onEvent(name, data) {
  if (name === "history") {
    history.replace(data.ticks);
    ticksUntilDescribed = 0;
  } else if (name === "tick") {
    history.add(data);
  } else return;
  lastTickAt = performance.now();
  drawState();
  if (ticksUntilDescribed-- <= 0) describe();
  if (ticksUntilPast-- <= 0) lookBack();
  redraw();
  if (!document.hidden) refreshInspector();
}

/** Draw in the next frame. A hidden page gets no frames, so it does nothing until it is looked at again. */
function redraw() {
  frame ||= requestAnimationFrame(draw);
}

function draw() {
  frame = 0;
  const tick = history.newest;
  drawOverview(history);
  drawLimiters(history);
  if (!tick) return;
  drawTables(tick);
  drawOutage(outages(tick), limiters);
  setText(byId("policy-error-text"), tick.policy_error ?? "");
  show(byId("policy-error"), tick.policy_error !== null);
  setText(byId("workers"), plural(tick.workers, "worker"));
  setText(byId("figures-of"), `Figures of ${clockTime(tick.time)}, counted since ${moment(tick.started)}.`);
  drawTraffic(tick.demo);
}

function drawTraffic(demo) {
  const button = byId("traffic");
  show(button, demo !== null);
  if (demo && !button.disabled) setAttribute(button, "aria-checked", demo.traffic);
}

/** Ask what limiters there are, since names and rules are not in the events. */
async function describe() {
  ticksUntilDescribed = DESCRIBE_EVERY;
  try {
    ({ limiters } = await call("GET", "/v1/limiters"));
    setLimiters(limiters);
    offerLimiters(limiters);
    knowLimiters(limiters);
    offerRules(limiters);
    redraw();
    sayProblem("");
  } catch (problem) {
    ticksUntilDescribed = 0;
    sayProblem(problem.status ? `The limiters cannot be listed. ${problem.message}` : "");
  }
}

const chosenRange = () => document.querySelector("#range input:checked").value;

/** Ask for what the charts show, if the events do not tell it. */
async function lookBack() {
  ticksUntilPast = PAST_EVERY;
  const name = chosenRange();
  if (name === "minutes") return;
  try {
    history.know(RANGES[name], await call("GET", `/v1/history/${name}`));
    redraw();
    sayProblem("");
  } catch (problem) {
    sayProblem(problem.status ? `${RANGES[name].words} cannot be shown. ${problem.message}` : "");
  }
}

async function chooseRange() {
  await lookBack();
  showRange(RANGES[chosenRange()]);
}

function sayProblem(text) {
  setText(byId("page-error"), text);
  show(byId("page-error"), text !== "");
}

const STATES = {
  connecting: "Connecting…",
  live: "Live",
  waiting: "Reconnecting…",
  refused: "Not connected",
};
let connection = "connecting";
let wasLive = false;

function onState(state, problem) {
  // Attempts to get back are shown and announced as one state, not as a flicker of two.
  connection = state === "connecting" && wasLive ? "waiting" : state;
  wasLive = state === "live" || (wasLive && state !== "refused");
  byId("connection").title = problem?.message ?? "";
  show(byId("retry"), connection === "waiting");
  drawTokenButton(state === "refused");
  drawState();
}

/** How things are, in the head of the page and on its tab: also while the page is hidden, when nothing else is drawn. */
function drawState() {
  const tick = history.newest;
  const isStale = tick !== null && (connection !== "live" || performance.now() - lastTickAt > STALE_MS);
  if (isStale !== history.isStale) {
    history.isStale = isStale;
    document.body.classList.toggle("stale", isStale);
    redraw();
  }
  const trouble = isStale ? `No data since ${moment(tick.time)}` : tick && outageWords(outages(tick));
  const pill = byId("connection");
  setAttribute(pill, "data-state", !isStale && trouble ? "troubled" : connection === "live" && isStale ? "waiting" : connection);
  setText(pill, trouble && connection !== "refused" ? trouble : STATES[connection]);
  const title = trouble ? `${trouble} – Headgate` : "Headgate";
  if (document.title !== title) document.title = title;
}

function drawTokenButton(needed) {
  const button = byId("token-button");
  show(button, needed || hasToken());
  setText(button, hasToken() && !needed ? "Forget the token" : "Enter a token");
}

async function tokenButton() {
  if (byId("connection").dataset.state === "refused") {
    if (await askForToken()) stream.now();
  } else {
    forgetToken();
    location.reload(); // nothing that the token let us see may stay
  }
}

async function switchTraffic() {
  const button = byId("traffic");
  const on = button.getAttribute("aria-checked") !== "true";
  button.disabled = true;
  try {
    await call("POST", "/v1/demo/traffic", { on });
    setAttribute(button, "aria-checked", on);
    sayProblem("");
  } catch (problem) {
    sayProblem(`The traffic could not be switched. ${problem.message}`);
  } finally {
    button.disabled = false;
    button.focus();
  }
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";

function drawTheme() {
  setAttribute(byId("theme"), "aria-pressed", isDark());
}

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("headgate.theme", theme);
  } catch {
    // Storage may be forbidden; then it holds until the page is left.
  }
  drawTheme();
}

setUpOverview();
setUpLimiters(tryLimiter);
setUpTables(inspect);
setUpInspector();
setUpTry();
setUpCandidates();
drawTheme();
byId("theme").addEventListener("click", switchTheme);
byId("range").addEventListener("change", chooseRange);
prefersDark.addEventListener("change", drawTheme);
byId("traffic").addEventListener("click", switchTraffic);
byId("token-button").addEventListener("click", tokenButton);
byId("retry").addEventListener("click", () => stream.now());
onToken(() => drawTokenButton(false));
addEventListener("online", () => stream.nudge());
document.addEventListener("visibilitychange", () => document.hidden || stream.nudge());
setInterval(drawState, 1000);
stream.run();
