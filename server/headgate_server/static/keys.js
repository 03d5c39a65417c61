// Who a call is about, as the rules of a limiter count it.

/** What a limiter's key consists of: [null] for plain text, its scopes, or nothing if all its counters are shared. */
export function scopesOf({ rules, shadow }) {
  const scopes = new Set([...rules, ...shadow].map(({ scope }) => scope));
  scopes.delete("*");
  if (scopes.size > 1) scopes.delete(null);
  return [...scopes];
}

/** A key as people type it: text, or an object of texts by scope as JSON. */
export function readKey(text) {
  try {
    const key = text.trimStart().startsWith("{") ? JSON.parse(text) : text;
    const isKey = typeof key === "string" || Object.values(key).every((part) => typeof part === "string");
    return isKey ? key : text;
  } catch {
    return text; // it only begins like an object
  }
}

export const writtenKey = (key) => (typeof key === "string" ? key : JSON.stringify(key));

const isOnePart = (key) => typeof key === "string" || "$base64" in key; // bytes are written so

/** Tell whether a limiter can be asked about a key; one part stands for every scope. */
export function fits(limiter, key) {
  return isOnePart(key) || scopesOf(limiter).every((scope) => scope !== null && scope in key);
}

export const partOf = (key, scope) => (isOnePart(key) ? key : key[scope]);

/** The key of a call in which `textOf(scope)` stands for each part; undefined if the limiter needs none. */
export function keyOf(limiter, textOf) {
  const scopes = scopesOf(limiter);
  if (!scopes.length) return undefined;
  return scopes[0] === null ? textOf(null) : Object.fromEntries(scopes.map((scope) => [scope, textOf(scope)]));
}
