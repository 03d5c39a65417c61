// The last five minutes, second by second, and sums over them.

import { entry } from "./dom.js";

export const SPAN = 300; // seconds that the page looks back
export const BIN = 5; // seconds that one bar of a chart stands for
export const BINS = SPAN / BIN;

export class History {
  #ticks = []; // of each second only what charts need: when, and what was decided
  newest = null; // the last tick as a whole

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
    const recent = this.#ticks.filter((tick) => tick.time > since);
    const sum = { admitted: 0, refused: 0, degraded: 0, seconds: recent.length };
    for (const tick of recent) addTo(sum, tick, name);
    return sum;
  }

  /** The bars of a chart, oldest first: rates per second, or null where nothing is known. The newest is still growing. */
  bins(name) {
    const last = Math.floor((this.newest?.time ?? 0) / BIN);
    const bins = Array.from({ length: BINS }, (_, index) => {
      return { from: (last - BINS + 1 + index) * BIN, admitted: 0, refused: 0, degraded: 0, seconds: 0 };
    });
    for (const tick of this.#ticks) {
      const bin = bins[Math.floor(tick.time / BIN) - last + BINS - 1];
      if (!bin) continue;
      bin.seconds += 1;
      addTo(bin, tick, name);
    }
    return bins.map((bin) => (bin.seconds ? toRates(bin) : { from: bin.from, known: false, admitted: 0, refused: 0 }));
  }
}

function addTo(sum, tick, name) {
  const counts = name === undefined ? Object.values(tick.limiters) : [entry(tick.limiters, name)];
  for (const one of counts) {
    if (!one) continue;
    sum.admitted += one.admitted;
    sum.refused += one.refused;
    sum.degraded += one.degraded;
  }
}

function toRates({ from, admitted, refused, seconds }) {
  return { from, known: true, admitted: admitted / seconds, refused: refused / seconds };
}
