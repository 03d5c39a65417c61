// What if: another limit for a live rule, as a shadow rule that only watches. What is in force stays what the file says.

import { call } from "./api.js";
import { byId, el, setText, show } from "./dom.js";

let choices = [];

export function setUpCandidates() {
  byId("candidate-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const { limiter, rule } = choices[byId("candidate-rule").value];
    watch(limiter, rule.name, byId("candidate-quota").value.trim());
  });
  byId("candidate-rule").addEventListener("input", suggest);
}

/** Offer the live rules of these limiters, as GET /v1/limiters describes them. */
export function offerRules(limiters) {
  const offered = limiters.flatMap(({ name, rules }) => rules.map((rule) => ({ limiter: name, rule })));
  if (JSON.stringify(offered) === JSON.stringify(choices)) return;
  choices = offered;
  const options = offered.map(({ limiter, rule }, index) =>
    el("option", { value: index }, `${limiter}: ${rule.name} (${rule.quota})`),
  );
  byId("candidate-rule").replaceChildren(...options);
  show(byId("candidate-form"), offered.length > 0);
  suggest();
}

function suggest() {
  const chosen = choices[byId("candidate-rule").value];
  if (chosen) byId("candidate-quota").value = chosen.rule.quota;
}

/** Watch a candidate, or no longer if the quota is null. */
export async function watch(limiter, rule, quota) {
  const status = byId("candidate-status");
  try {
    await call("POST", `/v1/limiters/${encodeURIComponent(limiter)}/candidate`, { rule, quota });
    setText(status, quota === null ? "No longer watched." : "Watched from now on; nothing is refused because of it.");
    status.classList.remove("problem");
  } catch (problem) {
    setText(status, problem.message);
    status.classList.add("problem");
  }
}

/** The lines that put a candidate in force, for the policy file. */
export function snippet({ limiter, candidate_for: rule, toml }) {
  return `# [limiters.${JSON.stringify(limiter)}], instead of the rule ${rule}:\n${toml}`;
}
