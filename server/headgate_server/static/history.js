// What was decided, as far back as the page looks, and sums over it: the last five minutes second by second, an hour and a
// day in longer steps.
//
// Every decision is admitted or refused. Those of both that the failure policy made, because the store could not be asked, are
// counted again as degraded.

import { entry } from "./dom.js";

export const RECENT = 10; // seconds that "now" means everywhere: long enough to be calm, short enough to be now

/** How far the charts look back, in bars of `bin` seconds; `row` bars make a row of a table. */
export const RANGES = {
  minutes: { span: 300, bin: 5, row: 6, words: "the last five minutes" },
  hour: { span: 3600, bin: 60, row: 5, words: "the last hour" },
  day: { span: 86_400, bin: 900, row: 4, words: "the last day" },
};
export const SPAN = RANGES.minutes.span;
for (const range of Object.values(RANGES)) range.bins = range.span / range.bin;

export class History {
  #steps = []; // oldest first: when, of how many seconds, and what was decided
  #past = new Map(); // the steps of the other ranges
  newest = null; // the last tick as a whole
  isStale = false; // whether ticks have stopped coming: nothing is known about now

  /** Begin anew with the seconds of the server's history: one that was started again tells its own story. */
  replace(seconds) {
    this.#steps = seconds.map(unpacked);
    this.newest = null;
  }

  /** Take note of a tick; it may repeat the last second of the history. If ticks are missing before it, it stands for them. */
  add(tick) {
    const seconds = this.newest ? Math.max(1, tick.time - this.newest.time) : 1;
    const limiters = seconds === 1 ? tick.limiters : difference(tick.totals, this.newest.totals);
    this.#steps = this.#steps.filter(({ time }) => time < tick.time && time > tick.time - SPAN);
    this.#steps.push({ time: tick.time, seconds, limiters });
    this.newest = tick;
  }

  /** Take note of another range, as GET /v1/history/… tells it. */
  know(range, { steps }) {
    this.#past.set(range, steps.map(unpacked));
  }

  /** What was decided in the last `seconds`, by one limiter or, without a name, by all; and how many seconds are known. */
  sum(seconds, name) {
    const since = (this.newest?.time ?? 0) - seconds;
    const recent = this.isStale ? [] : this.#steps.filter(({ time }) => time > since);
    const sum = { ...NOTHING, seconds: 0 };
    for (const step of recent) addTo(sum, countsOf(step, name)).seconds += step.seconds;
    return sum;
  }

  /**
   * What each limiter that decided something has decided in a range and in the last five minutes, by name. Recent decisions
   * count twice where both are known: this is for comparing limiters.
   */
  sums(range) {
    const sums = new Map();
    for (const { limiters } of [...this.#steps, ...(this.#past.get(range) ?? [])]) {
      for (const [name, counts] of Object.entries(limiters)) {
        if (decisionsOf(counts) === 0) continue;
        if (!sums.has(name)) sums.set(name, { ...NOTHING });
        addTo(sums.get(name), counts);
      }
    }
    return sums;
  }

  /** The bars of a chart, oldest first: rates per second, or null where nothing is known. The newest is still growing. */
  bins(name, range = RANGES.minutes) {
    const { bin: size, bins: number } = range;
    const last = Math.floor((this.newest?.time ?? 0) / size);
    const bins = Array.from({ length: number }, (_, index) => {
      return { ...NOTHING, from: (last - number + 1 + index) * size, seconds: 0 };
    });
    for (const step of range === RANGES.minutes ? this.#steps : (this.#past.get(range) ?? [])) {
      const bin = bins[Math.floor(step.time / size) - last + number - 1];
      if (!bin) continue;
      bin.seconds += step.seconds;
      addTo(bin, countsOf(step, name));
    }
    return bins.map((bin) => (bin.seconds ? toRates(bin) : { ...NOTHING, from: bin.from, known: false }));
  }
}

const NOTHING = { admitted: 0, refused: 0, degraded: 0, degraded_refused: 0 };

export const decisionsOf = ({ admitted, refused }) => admitted + refused;

function addTo(sum, counts) {
  for (const part of Object.keys(NOTHING)) sum[part] += counts?.[part] ?? 0;
  return sum;
}

/** What was decided between two totals, by limiter. */
function difference(after, before) {
  const parts = Object.keys(NOTHING);
  const since = ([name, counts]) => [name, Object.fromEntries(parts.map((part) => [part, counts[part] - (entry(before, name)?.[part] ?? 0)]))];
  return Object.fromEntries(Object.entries(after).map(since));
}

export const sumOf = (all) => all.reduce(addTo, { ...NOTHING });

const countsOf = ({ limiters }, name) => (name === undefined ? sumOf(Object.values(limiters)) : entry(limiters, name));

/** A step in which figures are rows, as the server keeps them in short. */
function unpacked({ time, seconds = 1, limiters }) {
  const counts = Object.entries(limiters).map(([name, row]) => {
    return [name, Object.fromEntries(Object.keys(NOTHING).map((part, place) => [part, row[place]]))];
  });
  return { time, seconds, limiters: Object.fromEntries(counts) };
}

function toRates({ from, seconds, ...counts }) {
  const rates = Object.keys(NOTHING).map((part) => [part, counts[part] / seconds]);
  return { from, known: true, ...Object.fromEntries(rates) };
}
