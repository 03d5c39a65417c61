"""Warnings about a policy that is valid but probably not intended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from headgate.policy.load import ENVIRONMENT_PREFIX, variables_of
from headgate.policy.model import LimiterPolicy, Policy, known_tiers

_OTHER_VARIABLES = frozenset({"HEADGATE_TOKEN", "HEADGATE_PURE"})
_TEST_VARIABLES = "HEADGATE_TEST_"


def find_warnings(policy: Policy, text: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each valid setting that is probably not intended.

    Args:
        policy: The policy.
        text: The text of its file.
        environment: Variables that may replace single values.
    """
    for limiter in policy.limiters.values():
        yield from _of_limiter(limiter)
    if not policy.server.tokens and not policy.server.is_private:
        yield (
            f"[server] host = {policy.server.host!r} can be reached from other machines and there are no tokens, so the "
            "server will not start; `headgate token` makes one"
        )
    for name, token in policy.server.tokens.items():
        if token.expires is not None and token.expires <= time.time():
            yield f"the token {name!r} has expired; take it out, or `headgate token` makes another one"
    known = sorted(variables_of(text))
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable.startswith(_TEST_VARIABLES):
            continue
        if variable not in known and variable not in _OTHER_VARIABLES:
            near = get_close_matches(variable, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"environment variable {variable} sets nothing{hint}"


def _of_limiter(limiter: LimiterPolicy) -> Iterator[str]:
    if not limiter.rules:
        only = " but shadow rules" if limiter.shadow else ""
        yield f"limiter {limiter.name!r} has no rules{only}, so it admits everything"
    tiers = known_tiers((*limiter.rules, *limiter.shadow))
    if limiter.default_tier is not None and limiter.default_tier not in tiers:
        there = f"there is {', '.join(sorted(map(repr, tiers)))}" if tiers else "there are none"
        yield f"limiter {limiter.name!r}: no rule knows the default_tier {limiter.default_tier!r}; {there}"
