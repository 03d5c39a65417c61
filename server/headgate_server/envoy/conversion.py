"""Convert a configuration of envoyproxy/ratelimit to lines for a policy file. Pure.

A `rate_limit` becomes a fixed window, which counts as before, with a scope named after the keys and values that lead to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import yaml

from headgate import ConfigError
from headgate_server.describe import toml_value

_PERIODS = {
    "second": "second",
    "minute": "minute",
    "hour": "hour",
    "day": "day",
    "week": "week",
    "month": "30 days",
    "year": "365 days",
}
_LIMIT_KEYS = {"unit", "requests_per_unit", "unlimited", "name", "replaces"}
_NODE_KEYS = {"key", "value", "rate_limit", "descriptors", "shadow_mode", "share_threshold"}


class Converted(NamedTuple):
    """Lines for a policy file, and the parts that could not be converted."""

    toml: str
    problems: list[str]


def convert(text: str) -> Converted:
    """Return the policy for the domain of a configuration.

    Raises:
        ConfigError: It is not a configuration of envoyproxy/ratelimit.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"it is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or not isinstance(document.get("domain"), str):
        raise ConfigError("it is not a configuration of envoyproxy/ratelimit: it has no domain")
    return _Conversion(document).result()


class _Conversion:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._rules: list[str] = []
        self._problems: list[str] = []
        self._scopes: set[str] = set()
        self._named: dict[str, str] = {}
        """Scopes by the name of a limit."""

    def result(self) -> Converted:
        self._report("the file", self._document.keys() - {"domain", "descriptors"})
        descriptors = self._children(self._document, "")
        nodes = self._nodes(descriptors, "descriptors", ())
        if not nodes:
            raise ConfigError("; ".join(["it has no descriptors with a rate_limit", *self._problems]))
        name = json.dumps(self._document["domain"], ensure_ascii=False)
        rules = "".join(f"  {rule},\n" for rule in self._rules)
        self._resolve(nodes)
        lines = "".join(_lines(nodes, "  "))
        toml = (
            f"[limiters.{name}]\nrules = [\n{rules}]\n\n[envoy.domains.{name}]\ndescriptors = [\n{lines}]\n"
        )
        return Converted(toml, self._problems)

    def _children(self, parent: dict[str, Any], place: str) -> list[Any]:
        found = parent.get("descriptors") or []
        if isinstance(found, list):
            return found
        raise ConfigError(f"{place or 'the file'}: descriptors is a list, not {type(found).__name__}")

    def _nodes(self, nodes: list[Any], place: str, path: tuple[str, ...]) -> list[dict[str, Any]]:
        converted: list[dict[str, Any]] = []
        seen: set[tuple[str, str | None]] = set()
        for index, node in enumerate(nodes):
            here = f"{place}[{index}]"
            if not isinstance(node, dict) or not isinstance(node.get("key"), str) or not node["key"]:
                raise ConfigError(f"{here}: a descriptor needs a key")
            value = _text(node.get("value"))
            if (node["key"], value) in seen:
                self._problems.append(f"{here} ({node['key']}): the same key and value as one before it")
                continue
            seen.add((node["key"], value))
            own = self._node(node, value, here, (*path, node["key"], value or ""))
            if own.keys() & {"scope", "unlimited", "descriptors"}:
                converted.append(own)
        return converted

    def _node(
        self, node: dict[str, Any], value: str | None, place: str, path: tuple[str, ...]
    ) -> dict[str, Any]:
        self._report(f"{place} ({node['key']})", node.keys() - _NODE_KEYS)
        own: dict[str, Any] = {"key": node["key"]}
        if value is not None:
            own["value"] = value
        limit = node.get("rate_limit")
        if isinstance(limit, dict):
            own |= self._limit(limit, node, f"{place} ({node['key']})", path)
        if node.get("share_threshold"):
            own["shared"] = True
        nested = self._nodes(self._children(node, place), f"{place}.descriptors", path)
        if nested:
            own["descriptors"] = nested
        return own

    def _limit(
        self, limit: dict[str, Any], node: dict[str, Any], place: str, path: tuple[str, ...]
    ) -> dict[str, Any]:
        self._report(place, limit.keys() - _LIMIT_KEYS)
        replaces = [str(each.get("name")) for each in limit.get("replaces") or () if isinstance(each, dict)]
        own: dict[str, Any] = {"replaces": replaces} if replaces else {}
        if limit.get("unlimited"):
            return own | {"unlimited": True}
        period = _PERIODS.get(str(limit.get("unit")).lower())
        number = limit.get("requests_per_unit", 0)
        if period is None or type(number) is not int or number < 0:
            self._problems.append(f"{place}: the limit {number!r} per {limit.get('unit')!r}")
            return {}
        scope = self._scope(path)
        if isinstance(limit.get("name"), str):
            self._named[limit["name"]] = scope
        shadow = ", shadow = true" if node.get("shadow_mode") else ""
        self._rules.append(
            f'{{ kind = "fixed_window", quota = "{number}/{period}", scope = {toml_value(scope)}{shadow} }}'
        )
        return {"scope": scope, **own}

    def _scope(self, path: tuple[str, ...]) -> str:
        base = re.sub(r"[^A-Za-z0-9-]+", "_", "_".join(filter(None, path))).strip("_") or "limit"
        scope, number = base, 1
        while scope in self._scopes:
            number += 1
            scope = f"{base}_{number}"
        self._scopes.add(scope)
        return scope

    def _resolve(self, nodes: list[dict[str, Any]]) -> None:
        """Replace the names in `replaces` by scopes; a limit may be named after the one that replaces it."""
        for node in nodes:
            if "replaces" in node:
                own = node.get("scope")
                unknown = [name for name in node["replaces"] if self._named.get(name, own) == own]
                self._problems += [
                    f"replaces: there is no other limit with the name {name!r}" for name in unknown
                ]
                node["replaces"] = [self._named[name] for name in node["replaces"] if name not in unknown]
            self._resolve(node.get("descriptors", []))

    def _report(self, place: str, unknown: Iterable[object]) -> None:
        self._problems += [f"{place}: {name}" for name in sorted(map(str, unknown))]


def _lines(nodes: list[dict[str, Any]], indent: str) -> Iterator[str]:
    """Yield the lines of an array of nodes."""
    for node in nodes:
        entries = ", ".join(
            f"{name} = {toml_value(value)}" for name, value in node.items() if name != "descriptors"
        )
        if "descriptors" not in node:
            yield f"{indent}{{ {entries} }},\n"
            continue
        yield f"{indent}{{ {entries}, descriptors = [\n"
        yield from _lines(node["descriptors"], f"{indent}  ")
        yield f"{indent}] }},\n"


def _text(value: object) -> str | None:
    """Return a value as text; YAML may have read it as a number or a boolean."""
    if value is None or value == "":
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)
