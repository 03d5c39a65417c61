// The last five minutes, second by second, and sums over them.
//
// Every decision is admitted or refused. Those of both that the failure policy made, because the store could not be asked, are
// counted again as degraded.

import { entry } from "./dom.js";

export const SPAN = 300; // seconds that the page looks back
export const BIN = 5; // seconds that one bar of a chart stands for
export const BINS = SPAN / BIN;
export const RECENT = 10; // seconds that "now" means everywhere: long enough to be calm, short enough to be now

export class History {
  #ticks = []; // of each second only what charts need: when, and what was decided
  newest = null; // the last tick as a whole
  isStale = false; // whether ticks have stopped coming: nothing is known about now

  /** Begin anew: a server that was started again tells its own story. */
  replace(ticks) {
    this.#ticks = [];
    this.newest = null;
    for (const tick of ticks) this.add(tick);
  }

  add(tick) {
    if (this.newest && tick.time <= this.newest.time) this.#ticks = this.#ticks.filter(({ time }) => time < tick.time);
    this.newest = tick;
    this.#ticks.push({ time: tick.time, limiters: tick.limiters });
    if (this.#ticks.length > SPAN) this.#ticks.shift();
  }

  /** What was decided in the last `seconds`, by one limiter or, without a name, by all; and how many seconds are known. */
  sum(seconds, name) {
    const since = (this.newest?.time ?? 0) - seconds;
    const recent = this.isStale ? [] : this.#ticks.filter((tick) => tick.time > since);
    const sum = { ...NOTHING, seconds: recent.length };
    for (const tick of recent) addTo(sum, countsOf(tick, name));
    return sum;
  }

  /** The bars of a chart, oldest first: rates per second, or null where nothing is known. The newest is still growing. */
  bins(name) {
    const last = Math.floor((this.newest?.time ?? 0) / BIN);
    const bins = Array.from({ length: BINS }, (_, index) => {
      return { ...NOTHING, from: (last - BINS + 1 + index) * BIN, seconds: 0 };
    });
    for (const tick of this.#ticks) {
      const bin = bins[Math.floor(tick.time / BIN) - last + BINS - 1];
      if (!bin) continue;
      bin.seconds += 1;
      addTo(bin, countsOf(tick, name));
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

export const sumOf = (all) => all.reduce(addTo, { ...NOTHING });

const countsOf = (tick, name) => (name === undefined ? sumOf(Object.values(tick.limiters)) : entry(tick.limiters, name));

function toRates({ from, seconds, ...counts }) {
  const rates = Object.keys(NOTHING).map((part) => [part, counts[part] / seconds]);
  return { from, known: true, ...Object.fromEntries(rates) };
}
