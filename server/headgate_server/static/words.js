// Numbers, durations and decisions as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const oneDigit = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const threeDigits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minute = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

export const count = (number) => whole.format(number);

/** The decisions of a sum that were of one kind, per second; a dash if nothing is known of any second. */
export const rateOf = (sum, kind) => (sum.seconds ? rate(kind(sum) / sum.seconds) : "–");

/** A rate per second: one digit after the point while that tells anything. */
export function rate(perSecond) {
  return perSecond === 0 ? "0" : perSecond < 100 ? oneDigit.format(perSecond) : whole.format(perSecond);
}

/** A share of a whole; a dash if there is no whole to have a share of. */
export function share(part, all) {
  if (!all) return "–";
  const ratio = part / all;
  return part > 0 && ratio < 0.001 ? "< 0.1%" : percent.format(ratio);
}

export const clockTime = (seconds) => clock.format(seconds * 1000);

/** An instant of the past: its time, and its day if that is not today. */
export function moment(seconds) {
  const at = new Date(seconds * 1000);
  return at.toDateString() === new Date().toDateString() ? clock.format(at) : day.format(at);
}

/** A span of so many seconds from an instant on; without seconds where they say nothing. */
export function span(from, seconds, between = "–") {
  const format = seconds < 60 ? clock : minute;
  return `${format.format(from * 1000)} ${between} ${format.format((from + seconds) * 1000)}`;
}

/** How long a store takes: "0.42 ms". */
export const latency = (seconds) => (seconds === null ? "–" : `${threeDigits.format(seconds * 1000)} ms`);

/** When something `after` seconds from now will be. */
export function timeAfter(after) {
  const at = Date.now() + after * 1000;
  return after < 43200 ? clock.format(at) : day.format(at);
}

const UNITS = [
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
];

/** A duration in seconds as its two largest units: "12.3 s", "4 min 5 s", "3 d 2 h". */
export function duration(seconds) {
  const tenths = Math.ceil(seconds * 10) / 10; // up, like the whole seconds below: a wait must not be shown too short
  if (tenths < 60) return `${threeDigits.format(seconds < 1 ? seconds : tenths)} s`;
  const rounded = Math.ceil(seconds);
  const [size, unit] = UNITS.find(([length]) => rounded >= length);
  const smaller = UNITS[UNITS.findIndex(([length]) => length === size) + 1] ?? [1, "s"];
  const rest = Math.floor((rounded % size) / smaller[0]);
  return `${Math.floor(rounded / size)} ${unit}${rest ? ` ${rest} ${smaller[1]}` : ""}`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** Units of open holds: "3", or "3 requests, 2,400 tokens" where more than requests are counted. */
export function heldWords(units) {
  const held = Object.entries(units).filter(([, number]) => number > 0);
  const isPlain = Object.keys(units).every((unit) => unit === "requests");
  return held.map(([unit, number]) => (isPlain ? count(number) : `${count(number)} ${unit}`)).join(", ");
}

/** When something `after` seconds from now will be, by the clocks of a time zone. */
export function timeIn(zone, after) {
  const format = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short", timeZone: zone });
  return `${format.format(Math.round(Date.now() / 1000 + after) * 1000)} (${zone})`;
}

/** A decision as a sentence; `operation` is hit, check or hold. */
export function decisionSentence(decision, operation, cost) {
  const parts = [decision.allowed ? admission(decision, operation, cost) : refusal(decision)];
  if (decision.degraded) parts.push("The store could not be asked; the limiter's failure policy decided.");
  return parts.join(" ");
}

function admission(decision, operation, cost) {
  const done = { hit: "Admitted", check: "Would be admitted", hold: `Holding ${plural(cost, "unit")}` }[operation];
  if (decision.limit === null) return `${done}.`;
  const left = `${count(decision.remaining)} of ${count(decision.limit)} left in ${decision.rule}`;
  const back = decision.reset_after ? `, all of them back in ${duration(decision.reset_after)}` : "";
  return `${done}. ${left}${back}.`;
}

function refusal(decision) {
  const by = decision.denied_by === null ? "Refused." : `Refused by ${decision.denied_by}.`;
  if (decision.retry_after === null) return `${by} It would never be admitted.`;
  return `${by} It would be admitted in ${duration(decision.retry_after)}.`;
}

/** What a limiter does while its store cannot be asked. */
export function failureWords(policy) {
  if (policy === "open") return "everything is admitted";
  if (policy === "closed") return "everything is refused";
  if (typeof policy === "string") return policy;
  return `each worker admits ${Number((policy.local * 100).toPrecision(6))}% of every limit by itself`;
}
