"""Environment variables that replace single values of a policy file.

`HEADGATE_LIMITERS__LOGIN__RULES` is `limiters.login.rules`: the path in capitals, its parts joined by two underscores, every
character that is not a letter or digit replaced by one underscore.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from headgate.policy.model import PolicyError, ServerPolicy, TokenPolicy
from headgate.policy.positions import Path

PREFIX = "HEADGATE_"

LIMITER_KEYS = {
    "rules",
    "store",
    "on_store_error",
    "on_overload",
    "deadline",
    "lease",
    "headers",
    "default_tier",
    "overrides",
}
SERVER_KEYS = frozenset(field.name for field in fields(ServerPolicy))
TOKEN_KEYS = frozenset(field.name for field in fields(TokenPolicy))


def replace_values(document: dict[str, Any], environment: Mapping[str, str]) -> dict[Path, str]:
    """Replace values of a document by environment variables; return the variable of each replaced path.

    Raises:
        PolicyError: A variable is ambiguous.
    """
    replaced: dict[Path, str] = {}
    paths: dict[str, list[Path]] = {}
    for path in _replaceable(document):
        paths.setdefault(_variable(path), []).append(path)
    for variable in sorted(paths.keys() & environment.keys()):  # tables before their values
        path, *others = paths[variable]
        if others:
            named = ", ".join(".".join(map(str, each)) for each in (path, *others))
            raise PolicyError(
                f"environment variable {variable}: it is ambiguous, it may mean any of {named}; rename all but one"
            )
        if _put(document, path, _toml_or_text(environment[variable])):
            replaced[path] = variable
    return replaced


def variables_of(text: str) -> set[str]:
    """Return the names of all environment variables that can replace a value of a policy."""
    return {_variable(path) for path in _replaceable(tomllib.loads(text))}


def _replaceable(document: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the paths of the values that an environment variable may set, whether the file sets them or not."""
    yield ("allow_removal",)
    yield ("store", "url")
    limiters = document.get("limiters")
    for name in limiters if isinstance(limiters, dict) else ():
        for key in sorted(LIMITER_KEYS):
            yield ("limiters", name, key)
    for key in sorted(SERVER_KEYS):
        yield ("server", key)
    if isinstance(document.get("envoy"), dict):
        yield ("envoy", "host")
        yield ("envoy", "port")
    server = document.get("server")
    tokens = server.get("tokens") if isinstance(server, dict) else None
    for name in tokens if isinstance(tokens, dict) else ():
        for key in sorted(TOKEN_KEYS):
            yield ("server", "tokens", name, key)


def _put(table: object, path: Path, value: object) -> bool:
    """Put a value into nested tables; return false if a parent is not a table, which the reader reports later."""
    *towards, name = path
    for part in towards:
        table = table.setdefault(part, {}) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table[name] = value
    return isinstance(table, dict)


def _variable(path: Path) -> str:
    return PREFIX + "__".join(re.sub(r"[^A-Z0-9]", "_", str(part).upper()) for part in path)


def _toml_or_text(value: str) -> object:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (RecursionError, ValueError):
        return value
