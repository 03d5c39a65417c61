"""The parser of policies: TOML, with single values replaced by environment variables.

    allow_removal = false            # whether a reload may remove limiters

    [store]                          # the default store of limiters; memory if it is missing
    url = "sqlite:///limits.db"

    [limiters.login]                 # the smallest limiter
    rules = ["5/minute"]

    [limiters.api]
    rules = [
      "10/s burst 20",
      { quota = "100/hour", name = "hourly", tiers = { pro = "1000/hour" } },
      { quota = "50/hour", name = "candidate", shadow = true },
      { quota = "20000/minute", unit = "tokens" },                              # requests by default
      { kind = "concurrent", quota = 5, lease = "60s", tiers = { pro = 20 } },  # at most 5 holds at once
      { kind = "calendar", quota = "10000/month", timezone = "Europe/Berlin" }, # UTC by default
      { kind = "penalty", quota = "3/15m", growth = 2, longest = "1d" },        # after 3 refusals, nothing for 15 minutes
    ]
    default_tier = "free"
    on_store_error = "open"          # or "closed", or { local = 0.25 }
    on_overload = "refuse"           # or "policy", to apply on_store_error
    deadline = 0.25                  # seconds
    lease = "500ms"                  # take units of hot keys for half a second
    headers = "both"                 # or "ietf", "x-ratelimit", "none"

    [[limiters.api.overrides]]
    key = "alice"
    rules = { hourly = "5000/hour" }

    [server]                         # of `headgate serve`
    port = 8080
    [server.tokens.gateway]
    sha256 = "…"                     # 64 digits; `headgate token` creates a token and prints them
    may = ["decide"]                 # and "administer", and "gate" for proxies

The sections for proxies, `[envoy]` and `[gate]`, are described in `headgate.policy.proxies`.

`HEADGATE_LIMITERS__LOGIN__RULES='["10/minute"]'` replaces that value: the path in capitals, its parts joined by two
underscores, every character that is not a letter or digit replaced by one underscore. The value is parsed as TOML, or used
as text if it is not valid TOML.
"""

from __future__ import annotations

import contextlib
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from datetime import UTC, date, datetime, time
from os import PathLike
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from headgate._checks import check_kind
from headgate._limiting import HeaderStyle
from headgate.calendars import check_timezone
from headgate.errors import ConfigError
from headgate.outage.policies import OnOverload, OnStoreError, policy_from_data
from headgate.policy.environment import LIMITER_KEYS, SERVER_KEYS, TOKEN_KEYS, replace_values
from headgate.policy.model import (
    PERMISSIONS,
    LimiterPolicy,
    Policy,
    PolicyError,
    RecordKeys,
    ServerPolicy,
    TokenPolicy,
    frozen_key,
)
from headgate.policy.positions import Path, positions
from headgate.policy.proxies import ENVOY_KEYS, GATE_KEYS, read_envoy, read_gate
from headgate.quota import MAX_UNITS, SPANS_US, Quota, Span, parse_calendar, period_from
from headgate.rules import (
    DEFAULT_BUCKETS,
    REQUESTS,
    SHARED,
    Kind,
    Rule,
    check_penalties,
    make_rule,
    rules_from,
)
from headgate.stores import check_url
from headgate.stores.base import check_deadline

T = TypeVar("T")

_TOP_KEYS = {"allow_removal", "store", "limiters", "server", "envoy", "gate"}
_RULE_KEYS = {
    "quota",
    "kind",
    "name",
    "scope",
    "tiers",
    "unit",
    "buckets",
    "strict",
    "lease",
    "timezone",
    "growth",
    "longest",
    "shadow",
}
_KEYS_OF_ONE_KIND: dict[str, Kind] = {
    "buckets": "sliding_window",
    "strict": "sliding_window",
    "lease": "concurrent",
    "timezone": "calendar",
    "growth": "penalty",
    "longest": "penalty",
}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HIGHEST_PORT = 65_535
_MOST_TOP_KEYS = 1_000
_LARGEST_BODY = 2**30
_LARGEST_RECORD = 2**40


def load_policy(path: str | FilePath, environment: Mapping[str, str] | None = None) -> Policy:
    """Return the policy of a file.

    Args:
        path: The file.
        environment: Variables that may replace single values; by default none.

    Raises:
        PolicyError: The file cannot be read or is invalid; the message begins with its name, line and column.
    """
    return parse_policy(read_policy(path), str(path), environment)


def policy_path(path: str | FilePath) -> FilePath:
    """Return the path of a policy file."""
    return FilePath(check_kind("the path of a policy", path, str | PathLike, "text or a pathlib.Path"))


def read_policy(path: str | FilePath) -> str:
    """Return the text of a policy file.

    Raises:
        PolicyError: The file cannot be read.
    """
    file = policy_path(path)
    try:
        if stat.S_ISREG(file.stat().st_mode):
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # missing, not UTF-8, or not a valid path
        raise PolicyError(f"{path}: {error}") from error
    # Reading a pipe or a device might never end.
    raise PolicyError(f"{path}: it is not a regular file")


def parse_policy(text: str, source: str = "policy", environment: Mapping[str, str] | None = None) -> Policy:
    """Return the policy of a text; see `load_policy`."""
    if not isinstance(text, str):  # not shown: it may contain passwords
        raise ConfigError(f"parse_policy takes text, not {type(text).__name__}; load_policy reads a file")
    check_kind("environment", environment, Mapping | None, "a mapping like os.environ")
    try:
        document = tomllib.loads(text)
        return _PolicyReader(document, source, positions(text), environment or {}).policy()
    except PolicyError:
        raise
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(text, source, error) from error
    except (RecursionError, ValueError) as error:
        # Python limits the depth of nesting and the number of digits.
        raise PolicyError(f"{source}: too many nested brackets or digits: {error}") from error


def _syntax_error(text: str, source: str, error: tomllib.TOMLDecodeError) -> PolicyError:
    found = re.search(r"line (\d+), column (\d+)", str(error))
    message = re.sub(r" \(at .*\)$", "", str(error))
    if found is not None:
        line, column = int(found[1]), int(found[2])
    else:
        line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
        message += ": this is the end of the file"
    return PolicyError(f"{source}:{line}:{column}: {message}", line, column)


class _PolicyReader:
    """Converts a document to a policy; errors contain the position in the file."""

    def __init__(
        self,
        document: dict[str, Any],
        source: str,
        places: Mapping[Path, tuple[int, int]],
        environment: Mapping[str, str],
    ) -> None:
        self.document = document
        self.source = source
        self.places = places
        self.variables = replace_values(document, environment)

    def policy(self) -> Policy:
        document = PolicySection(self, self.document, (), _TOP_KEYS)
        url = document.section("store", {"url"}).store("url", "memory://")
        limiters = document.section("limiters")
        if not limiters.values:
            raise document.error('no limiters; write for example [limiters.login] with rules = ["5/minute"]')
        by_name = MappingProxyType({name: self._limiter(limiters, name, url) for name in limiters.values})
        has_envoy = "envoy" in document.values
        return Policy(
            by_name,
            self._server(document.section("server", SERVER_KEYS)),
            document.flag("allow_removal", False),
            read_envoy(document.section("envoy", ENVOY_KEYS), by_name) if has_envoy else None,
            read_gate(document.section("gate", GATE_KEYS), by_name),
        )

    def _limiter(self, limiters: PolicySection, name: str, default_store: str) -> LimiterPolicy:
        table = limiters.section(name, LIMITER_KEYS)
        if "rules" not in table.values:
            raise table.error(f'limiter {name!r} has no rules; write for example rules = ["5/minute"]')
        specs = table.values["rules"]
        if not isinstance(specs, list):
            raise table.error('rules is an array, as in rules = ["5/minute"]', "rules")
        live: list[tuple[Rule, str]] = []
        shadow: list[tuple[Rule, str]] = []
        for index, spec in enumerate(specs):
            place = (*table.path, "rules", index)
            parsed, is_shadow = self._rules(spec, place)
            (shadow if is_shadow else live).extend((rule, self._source_of(place)) for rule in parsed)
        given = [*live, *shadow]
        named = table.trying(lambda: rules_from([rule for rule, _ in given]), "rules")
        table.trying(lambda: check_penalties(named[: len(live)]), "rules")
        sources = {rule.name: source for rule, (_, source) in zip(named, given, strict=True)}
        return LimiterPolicy(
            name=name,
            rules=named[: len(live)],
            shadow=named[len(live) :],
            store=table.store("store", default_store),
            on_store_error=table.on_store_error(),
            on_overload=table.choice("on_overload", "refuse", get_args(OnOverload)),
            deadline=table.deadline(),
            lease=table.text("lease") if "lease" in table.values else None,
            headers=table.choice("headers", "both", get_args(HeaderStyle)),
            default_tier=table.text("default_tier") if "default_tier" in table.values else None,
            overrides=MappingProxyType(self._overrides(table, named)),
            source=self._source_of(table.path if table.path in self.places else (*table.path, "rules")),
            rule_sources=MappingProxyType(sources),
        )

    def _rules(self, spec: object, path: Path) -> tuple[list[Rule], bool]:
        if isinstance(spec, str):
            text = spec
            return list(self.trying(path, lambda: rules_from([text]))), False
        table = PolicySection(self, spec, path, _RULE_KEYS)
        if "quota" not in table.values:
            raise table.error('a rule needs a quota, as in { quota = "5/minute" }')
        kind, quota, span = self._kind_and_quota(table)
        for name, owner in _KEYS_OF_ONE_KIND.items():
            if name in table.values and kind != owner:
                raise table.error(f"{name} is for {owner}, not for {kind}", name)
        strict = table.flag("strict", True)
        timezone = table.timezone() if kind == "calendar" else None
        unit = table.text("unit", REQUESTS)
        if kind == "penalty" and table.flag("shadow", False):
            raise table.error(
                "a penalty counts the refusals of live rules, so it cannot be a shadow rule", "shadow"
            )
        longest_us = None
        if "longest" in table.values:
            longest_us = table.trying(
                lambda: period_from(table.values["longest"], "longest penalty"), "longest"
            )
        rule = table.trying(
            lambda: make_rule(
                kind,
                quota,
                table.values.get("scope"),
                name=table.values.get("name"),
                buckets=table.values.get("buckets", DEFAULT_BUCKETS),
                strict=strict,
                unit=unit,
                span=span,
                timezone=timezone,
                growth=table.values.get("growth", 1),
                longest_us=longest_us,
            )
        )
        given = table.section("tiers")
        if "" in given.values:
            raise given.error("a tier needs a name", "")
        tiers = {tier: given.quota_of(rule, tier) for tier in given.values}
        return [replace(rule, tiers=MappingProxyType(tiers))], table.flag("shadow", False)

    def _kind_and_quota(self, table: PolicySection) -> tuple[Kind, Quota, Span | None]:
        """Return kind and quota of a rule, and the span of a calendar rule."""
        kinds: tuple[Kind, ...] = get_args(Kind)
        kind = table.choice("kind", None, kinds) if "kind" in table.values else None
        if kind == "concurrent":
            if "lease" not in table.values:
                raise table.error(
                    'concurrent needs a lease, as in { kind = "concurrent", quota = 5, lease = "60s" }'
                )
            lease = table.trying(lambda: period_from(table.values["lease"], "lease"), "lease")
            return kind, Quota(table.whole("quota", None, 0, MAX_UNITS), lease), None
        text = table.text("quota")
        if kind == "calendar":
            limit, span = table.trying(lambda: parse_calendar(text), "quota")
            return kind, Quota(limit, SPANS_US[span]), span
        quota = table.trying(lambda: Quota.parse(text), "quota")
        return kind or ("sliding_window" if quota.burst is None else "token_bucket"), quota, None

    def _overrides(self, table: PolicySection, rules: tuple[Rule, ...]) -> dict[object, dict[str, Quota]]:
        """Return the overridden quotas by rule name, by key."""
        value = table.values.get("overrides", [])
        if not isinstance(value, list):
            raise table.error("overrides is an array of tables: [[limiters.NAME.overrides]]", "overrides")
        overrides: dict[object, dict[str, Quota]] = {}
        for index, entry in enumerate(value):
            own = PolicySection(self, entry, (*table.path, "overrides", index), {"key", "rules"})
            own_quotas, key = self._override_quotas(own, rules), self._override_key(own, rules)
            if key in overrides:
                raise own.error(f"key {entry['key']!r} is overridden twice", "key")
            overrides[key] = own_quotas
        return overrides

    def _override_quotas(self, table: PolicySection, rules: tuple[Rule, ...]) -> dict[str, Quota]:
        if "key" not in table.values or "rules" not in table.values:
            raise table.error('an override needs a key and rules = { NAME = "QUOTA" }')
        quotas = table.section("rules")
        by_name = {rule.name: rule for rule in rules}
        if unknown := quotas.values.keys() - by_name.keys():
            known = ", ".join(map(repr, by_name))
            raise quotas.error(f"no rule is called {min(unknown)!r}; the rules are {known}", min(unknown))
        return {name: quotas.quota_of(by_name[name], name) for name in quotas.values}

    def _override_key(self, table: PolicySection, rules: tuple[Rule, ...]) -> object:
        key = table.values["key"]
        named = sorted({rule.scope for rule in rules if rule.scope is not None} - {SHARED})
        if isinstance(key, dict):
            if not key or not all(isinstance(part, str) for part in key.values()):
                raise table.error('a key by scope has text for each, as in { user = "42" }', "key")
            if unknown := key.keys() - set(named):
                by = ", ".join(map(repr, named)) or "no scope"
                raise table.error(
                    f"no rule counts by {min(unknown)!r}; the rules count by {by}", "key", min(unknown)
                )
        elif not isinstance(key, str):
            raise table.error("a key is text, or a table with an entry per scope", "key")
        elif named:
            raise table.error(
                f'the rules have scopes, so write for example {{ {named[0]} = "{key}" }}', "key"
            )
        return frozen_key(key)

    def _server(self, table: PolicySection) -> ServerPolicy:
        usual = ServerPolicy()
        return ServerPolicy(
            host=table.text("host", usual.host),
            port=table.whole("port", usual.port, 0, _HIGHEST_PORT),
            top_keys=table.whole("top_keys", usual.top_keys, 0, _MOST_TOP_KEYS),
            largest_body=table.whole("largest_body", usual.largest_body, 1, _LARGEST_BODY),
            record=table.text("record") if "record" in table.values else None,
            record_bytes=table.whole("record_bytes", usual.record_bytes, 1, _LARGEST_RECORD),
            record_keys=table.choice("record_keys", usual.record_keys, get_args(RecordKeys)),
            history=table.text("history") if "history" in table.values else None,
            tokens=MappingProxyType(self._tokens(table.section("tokens"))),
        )

    def _tokens(self, table: PolicySection) -> dict[str, TokenPolicy]:
        tokens: dict[str, TokenPolicy] = {}
        names: dict[str, str] = {}
        for name in table.values:
            token = tokens[name] = self._token(table.section(name, TOKEN_KEYS))
            other = names.setdefault(token.sha256, name)
            if other != name:
                raise table.error(f"{other!r} has the same token; make another one", name, "sha256")
        return tokens

    def _token(self, table: PolicySection) -> TokenPolicy:
        if not table.values.keys() >= TOKEN_KEYS - {"expires"}:
            raise table.error(
                'a token needs sha256 and may = ["decide"]; `headgate token` makes one and prints both'
            )
        digest = table.text("sha256").lower()
        if not _SHA256.fullmatch(digest):
            raise table.error(
                "the SHA-256 of a token is 64 hexadecimal digits; `headgate token` makes a token and prints them",
                "sha256",
            )
        may = table.values["may"]
        if not isinstance(may, list) or not may:
            raise table.error('may is an array of "decide", "administer" and "gate"', "may")
        return TokenPolicy(
            digest,
            frozenset(table.chosen(one, PERMISSIONS, "may", place) for place, one in enumerate(may)),
            table.instant("expires") if "expires" in table.values else None,
        )

    def trying(self, path: Path, make: Callable[[], T]) -> T:
        """Return the result of a function; add the position in the file to its errors."""
        try:
            return make()
        except ConfigError as error:
            raise self.error(path, str(error)) from error

    def _origin(self, path: Path) -> tuple[str | None, tuple[int, int] | None]:
        """Return the environment variable of a value, and the position of the value or of its nearest parent."""
        towards_root = [path[:end] for end in range(len(path), 0, -1)]
        variable = next((self.variables[part] for part in towards_root if part in self.variables), None)
        return variable, next((self.places[part] for part in towards_root if part in self.places), None)

    def _source_of(self, path: Path) -> str:
        """Return the origin of a value as text."""
        variable, place = self._origin(path)
        return variable or (self.source if place is None else f"{self.source}:{place[0]}")

    def error(self, path: Path, message: str) -> PolicyError:
        variable, place = self._origin(path)
        if variable is not None:
            return PolicyError(f"environment variable {variable}: {message}")
        if place is None:
            return PolicyError(f"{self.source}: {message}")
        return PolicyError(f"{self.source}:{place[0]}:{place[1]}: {message}", *place)


class PolicySection:
    """A table of the document, with methods that return checked entries.

    Args:
        reader: The reader of the document.
        value: The table.
        path: The path of the table.
        known: The allowed keys; `None` allows any.
    """

    def __init__(
        self, reader: _PolicyReader, value: object, path: Path, known: Set[str] | None = None
    ) -> None:
        self._reader = reader
        self.path = path
        if not isinstance(value, dict):
            raise self.error(f"expected a table, not {value!r}")
        if known is not None and (unknown := value.keys() - known):
            name = min(unknown)
            raise self.error(f"unknown key {name!r}; known are {', '.join(sorted(known))}", name)
        self.values: dict[str, Any] = value

    def error(self, message: str, *parts: str | int) -> PolicyError:
        """Return an error about an entry of this table, or about the table itself."""
        return self._reader.error((*self.path, *parts), message)

    def trying(self, make: Callable[[], T], *parts: str | int) -> T:
        """Return the result of a function; add the position of an entry to its errors."""
        return self._reader.trying((*self.path, *parts), make)

    def section(self, name: str, known: Set[str] | None = None) -> PolicySection:
        """Return a table within this one; empty if it is missing."""
        return PolicySection(self._reader, self.values.get(name, {}), (*self.path, name), known)

    def sections(self, name: str, known: Set[str]) -> list[PolicySection]:
        """Return the tables of an array within this one; none if it is missing."""
        value = self.values.get(name, [])
        if not isinstance(value, list):
            raise self.error("expected an array of tables", name)
        path = (*self.path, name)
        return [
            PolicySection(self._reader, entry, (*path, index), known) for index, entry in enumerate(value)
        ]

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the texts of an array; none if it is missing."""
        value = self.values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
            raise self.error(f"expected an array of texts, not {value!r}", name)
        return tuple(value)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str) or not value:
            raise self.error(f"expected text, not {value!r}", name)
        return value

    def whole(self, name: str, default: int | None, least: int, most: int) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.error(f"expected a whole number from {least} to {most}, not {value!r}", name)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"expected true or false, not {value!r}", name)
        return value

    def choice(self, name: str, default: T | None, choices: tuple[T, ...]) -> T:
        return self.chosen(self.values.get(name, default), choices, name)

    def chosen(self, value: object, choices: tuple[T, ...], *parts: str | int) -> T:
        """Return a value of this table if it is one of the choices."""
        for choice in choices:
            if value == choice:
                return choice
        raise self.error(f"expected one of {', '.join(map(repr, choices))}, not {value!r}", *parts)

    def store(self, name: str, default: str) -> str:
        url = self.text(name, default)
        self.trying(lambda: check_url(url), name)
        return url

    def on_store_error(self) -> OnStoreError:
        value = self.values.get("on_store_error", "open")
        if value in ("open", "closed") or isinstance(value, dict):
            with contextlib.suppress(ConfigError):
                return policy_from_data(value)
        raise self.error(f'expected "open", "closed" or {{ local = 0.25 }}, not {value!r}', "on_store_error")

    def deadline(self) -> float | None:
        value = self.values.get("deadline")
        return None if value is None else self.trying(lambda: check_deadline(value), "deadline")

    def timezone(self) -> str:
        timezone = self.text("timezone", "UTC")
        self.trying(lambda: check_timezone(timezone), "timezone")
        return timezone

    def instant(self, name: str) -> float:
        """Return a date or a time as seconds since the epoch, in UTC by default; a date means its beginning."""
        value = self.values[name]
        if not isinstance(value, date):
            raise self.error(f"expected a date, as in expires = 2030-01-31, not {value!r}", name)
        instant = value if isinstance(value, datetime) else datetime.combine(value, time.min)
        return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()

    def quota_of(self, rule: Rule, name: str) -> Quota:
        """Return the quota of a tier or an override."""
        is_number = rule.kind == "concurrent"
        value = self.whole(name, None, 0, MAX_UNITS) if is_number else self.text(name)
        return self.trying(lambda: rule.quota_from(value), name)
