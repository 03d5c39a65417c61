"""All mistakes in a policy, and what is valid but probably not intended.

`load_policy` ends at the first mistake, as it must. Here the policy is read again with each mistake taken out, until none is
left to be found; what depends on a mistake (overrides of a rule that cannot be read) is not judged.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from hashlib import sha256
from typing import Any

from headgate.policy.load import ENVIRONMENT_PREFIX, read_document, variables_of
from headgate.policy.model import LimiterPolicy, Policy, PolicyError, known_tiers

MOST_MISTAKES = 50

_OTHER_VARIABLES = frozenset({"HEADGATE_TOKEN", "HEADGATE_PURE"})
_TEST_VARIABLES = "HEADGATE_TEST_"


def find_mistakes(text: str, source: str, environment: Mapping[str, str]) -> list[PolicyError]:
    """Return everything that keeps a policy from being used, in the order of the file.

    Args:
        text: The policy.
        source: What messages call it.
        environment: Variables that may replace single values.
    """
    document, environment, found = None, dict(environment), list[PolicyError]()
    while len(found) < MOST_MISTAKES:
        try:
            read_document(text, source, environment, document)
        except PolicyError as error:
            found.append(error)
            if error.variable is not None:
                del environment[error.variable]
                continue
            document = tomllib.loads(text) if document is None and error.path is not None else document
            if document is None or error.path is None or not _take_out(document, error.path):
                break
        else:
            break
    return sorted(found, key=lambda error: (error.line or 0, error.column or 0))


def _take_out(document: dict[str, Any], path: tuple[str | int, ...]) -> bool:
    """Remove what a mistake is about; return whether that was possible."""
    match path:
        case ("limiters", name):
            document["limiters"][name] = {"rules": []}
        case ("limiters", name, "rules", int(index), *_) if isinstance(
            document["limiters"][name]["rules"], list
        ):
            document["limiters"][name].pop("overrides", None)
            rules = document["limiters"][name]["rules"]
            rules[index] = {"name": f"mistake {index}", **_without(rules[index], path[4:])}
        case ("limiters", name, "rules", *_):
            document["limiters"][name] = {"rules": []}
        case ("limiters", name, "overrides", *_):
            del document["limiters"][name]["overrides"]
        case ("server", "tokens", str(name), "sha256" | "may" as part, *_):
            right = {"sha256": sha256(name.encode()).hexdigest(), "may": ["decide"]}
            document["server"]["tokens"][name][part] = right[part]
        case (*towards, last) if path:
            table: Any = document
            for step in towards:
                table = table.get(step) if isinstance(table, dict) else None
            if not isinstance(table, dict) or last not in table:
                return len(path) > 1 and _take_out(document, path[:-1])
            del table[last]
        case _:
            return False
    return True


def _without(rule: Any, parts: tuple[str | int, ...]) -> dict[str, Any]:
    """Return a rule without a part that is wrong; another rule, if nothing else can be judged without that part."""
    match parts:
        case ("tiers", tier):
            return {**rule, "tiers": {name: quota for name, quota in rule["tiers"].items() if name != tier}}
        case (part, *_) if part in rule and part not in ("kind", "lease", "quota"):
            return {name: value for name, value in rule.items() if name != part}
    return {"quota": "1/second"}


def find_warnings(policy: Policy, text: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield what is valid but probably not intended."""
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
