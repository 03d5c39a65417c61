// The server's events, for as long as the page lives. EventSource cannot send a token, so this reads the stream itself.

import { Problem, open } from "./api.js";

const SILENCE_MS = 10_000; // there is an event every second; a connection that is silent for so long is dead
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8_000;

/**
 * Follow /v1/events and reconnect for ever.
 *
 * `onEvent(name, data)` gets every event; `onState(state, problem)` one of "connecting", "live", "waiting" (until the
 * next attempt) and "refused" (no token was given, or it may not: only `now()` tries again).
 */
export class Stream {
  #onEvent;
  #onState;
  #wake = () => {};
  #failures = 0;
  #refused = false;

  constructor(onEvent, onState) {
    this.#onEvent = onEvent;
    this.#onState = onState;
  }

  /** Try again at once if there is no connection. */
  now() {
    this.#failures = 0;
    this.#wake();
  }

  /** The same, unless the server has refused us: the connection may be fine again, but that is not certain. */
  nudge() {
    if (!this.#refused) this.now();
  }

  async run() {
    for (;;) {
      this.#onState("connecting");
      const problem = await this.#connection();
      this.#refused = problem.status === 401 || problem.status === 403;
      this.#onState(this.#refused ? "refused" : "waiting", problem);
      await this.#pause(this.#refused ? null : this.#nextWait());
    }
  }

  /** Read one connection to its end and return why it ended. */
  async #connection() {
    const abort = new AbortController();
    let watchdog;
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    try {
      alive();
      const response = await open("GET", "/v1/events", { signal: abort.signal });
      for await (const { name, data } of events(response.body, alive)) {
        if (name === "history") {
          this.#failures = 0;
          this.#onState("live");
        }
        this.#onEvent(name, JSON.parse(data));
      }
      return new Problem(0, "The server closed the connection.");
    } catch (error) {
      return error instanceof Problem ? error : new Problem(0, "The connection was lost.");
    } finally {
      clearTimeout(watchdog);
      abort.abort();
    }
  }

  /** Half a second, doubled with every failure, and a little chance so that many pages do not come back as one. */
  #nextWait() {
    const wait = Math.min(FIRST_WAIT_MS * 2 ** this.#failures++, LONGEST_WAIT_MS);
    return wait * (0.8 + 0.4 * Math.random());
  }

  #pause(milliseconds) {
    return new Promise((go) => {
      const timer = milliseconds === null ? undefined : setTimeout(go, milliseconds);
      this.#wake = () => {
        clearTimeout(timer);
        go();
      };
    });
  }
}

/** Yield the events of a body in the event-stream format, calling `alive` with whatever comes, comments included. */
async function* events(body, alive) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "message";
  let data = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    alive();
    const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (data.length) yield { name, data: data.join("\n") };
        name = "message";
        data = [];
      } else if (line.startsWith("event:")) name = line.slice(6).trimStart();
      else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    }
  }
}
