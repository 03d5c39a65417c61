// Who a call is about, as the rules of a limiter count it.

/** What a limiter's key consists of: [null] for plain text, its scopes, or nothing if all its counters are shared. */
export function scopesOf({ rules, shadow }) {
  const scopes = new Set([...rules, ...shadow].map(({ scope }) => scope));
  scopes.delete("*");
  if (scopes.size > 1) scopes.delete(null);
  return [...scopes];
}

/** The key of a call in which `textOf(scope)` stands for each part; undefined if the limiter needs none. */
export function keyOf(limiter, textOf) {
  const scopes = scopesOf(limiter);
  if (!scopes.length) return undefined;
  return scopes[0] === null ? textOf(null) : Object.fromEntries(scopes.map((scope) => [scope, textOf(scope)]));
}
