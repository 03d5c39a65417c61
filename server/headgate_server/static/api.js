// Asking the server. A 401 asks the person for a token and goes on; everything else that is not a success is a Problem.

import { byId, setText } from "./dom.js";

const TOKEN = "headgate.token";

/** What the server said no with (RFC 9457), or why it could not be asked. */
export class Problem extends Error {
  constructor(status, title, detail) {
    super(detail || title);
    this.status = status;
  }
}

let token = sessionStorage.getItem(TOKEN);
let asking = null;
const listeners = [];

/** Call a function whenever a token is taken into use or forgotten. */
export const onToken = (listener) => listeners.push(listener);

export const hasToken = () => token !== null;

export function forgetToken() {
  useToken(null);
}

function useToken(text) {
  token = text;
  if (text === null) sessionStorage.removeItem(TOKEN);
  else sessionStorage.setItem(TOKEN, text);
  for (const listener of listeners) listener();
}

/** Send a request and return the parsed JSON. Throws Problem. */
export async function call(method, path, body) {
  const response = await open(method, path, { body });
  return response.json();
}

/** Send a request and return the successful response, body unread. Throws Problem, and AbortError if the signal says so. */
export async function open(method, path, { body, signal } = {}) {
  for (;;) {
    const sent = token;
    const response = await send(method, path, body, signal);
    if (response.ok) return response;
    const problem = await readProblem(response);
    // Another token may have been given while this request was under way: then it deserves that one first.
    if (response.status === 401 && token !== sent) continue;
    if (sent !== null && response.status === 401) forgetToken();
    if (response.status !== 401 || !(await askForToken(sent !== null))) throw problem;
  }
}

async function send(method, path, body, signal) {
  const headers = {};
  if (token !== null) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    return await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server cannot be reached.");
  }
}

async function readProblem(response) {
  let problem = {};
  try {
    problem = await response.json();
  } catch {
    // Not from Headgate: a proxy in between, perhaps. The status must do.
  }
  return new Problem(response.status, problem?.title ?? `The server answered ${response.status}.`, problem?.detail);
}

/** Ask the person for a token; true if one was given. However many requests need one, they are asked once. */
export function askForToken(rejected = false) {
  asking ??= promptForToken(rejected).finally(() => (asking = null));
  return asking;
}

function promptForToken(rejected) {
  const dialog = byId("token-dialog");
  const input = byId("token-input");
  setText(byId("token-problem"), rejected ? "The server did not accept that token." : "");
  input.value = "";
  byId("token-cancel").onclick = () => dialog.close("");
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  input.focus();
  return new Promise((answer) => {
    const closed = () => {
      const given = dialog.returnValue === "use" ? input.value.trim() : "";
      input.value = "";
      if (given) useToken(given);
      answer(Boolean(given));
    };
    dialog.addEventListener("close", closed, { once: true });
  });
}
