"""Reading a policy: a TOML file, with single values replaced by environment variables.

    allow_removal = false            # a reload refuses a file that lost limiters, unless this says otherwise

    [store]                          # where limiters count that name no store of their own; memory by default
    url = "sqlite:///limits.db"

    [limiters.login]                 # the smallest limiter
    rules = ["5/minute"]

    [limiters.api]
    rules = [
      "10/s burst 20",
      { quota = "100/hour", name = "hourly", tiers = { pro = "1000/hour" } },
      { quota = "50/hour", name = "candidate", shadow = true },
      { quota = "20000/minute", unit = "tokens" },                              # requests by default
      { kind = "concurrent", quota = 5, lease = "60s", tiers = { pro = 20 } },  # so many holds at once
      { kind = "calendar", quota = "10000/month", timezone = "Europe/Berlin" }, # UTC by default
    ]
    default_tier = "free"
    on_store_error = "open"          # or "closed", or { local = 0.25 }
    on_overload = "refuse"           # or "policy", to answer as on_store_error says
    deadline = 0.25                  # seconds
    headers = "both"                 # or "ietf", "x-ratelimit", "none"

    [[limiters.api.overrides]]
    key = "alice"
    rules = { hourly = "5000/hour" }

    [server]                         # of `headgate serve`
    port = 8080
    [server.tokens.gateway]
    sha256 = "…"                     # 64 digits; `headgate token` makes a token and prints them
    may = ["decide"]                 # and "administer"

`HEADGATE_LIMITERS__LOGIN__RULES='["10/minute"]'` replaces that one value: the path in capitals, its parts joined by two
underscores, every character that is not a letter or digit written as one underscore. The value is read as TOML, or else
as text.
"""

from __future__ import annotations

import contextlib
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, date, datetime, time
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, TypeVar

from headgate.calendars import check_timezone
from headgate.errors import ConfigError
from headgate.policy.model import (
    HEADER_STYLES,
    OVERRIDE,
    PERMISSIONS,
    RECORD_KEYS,
    LimiterPolicy,
    Policy,
    PolicyError,
    ServerPolicy,
    TokenPolicy,
    frozen_key,
    known_tiers,
    override_tier,
)
from headgate.policy.overrides import Override, OverridesError, resolved
from headgate.policy.positions import Path, positions
from headgate.quota import MAX_UNITS, SPANS_US, Quota, Span, parse_calendar, period_from
from headgate.rules import DEFAULT_BUCKETS, REQUESTS, SHARED, Kind, Rule, make_rule, rules_from
from headgate.stores import check_url
from headgate.stores.base import check_deadline
from headgate.stores.failure import OnOverload, OnStoreError, policy_from_data

T = TypeVar("T")

ENVIRONMENT_PREFIX = "HEADGATE_"

_LIMITER_KEYS = {
    "rules",
    "store",
    "on_store_error",
    "on_overload",
    "deadline",
    "headers",
    "default_tier",
    "overrides",
}
_ON_OVERLOAD: tuple[OnOverload, ...] = ("refuse", "policy")
_SERVER_KEYS = {
    "host",
    "port",
    "top_keys",
    "largest_body",
    "history",
    "record",
    "record_bytes",
    "record_keys",
    "tokens",
}
_TOKEN_KEYS = {"sha256", "may", "expires"}
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
    "shadow",
}
_KEYS_OF_ONE_KIND: dict[str, Kind] = {
    "buckets": "sliding_window",
    "strict": "sliding_window",
    "lease": "concurrent",
    "timezone": "calendar",
}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HIGHEST_PORT = 65_535
_MOST_TOP_KEYS = 1_000
_LARGEST_BODY = 2**30
_LARGEST_RECORD = 2**40
_KINDS: tuple[Kind, ...] = (
    "sliding_window",
    "token_bucket",
    "fixed_window",
    "sliding_log",
    "concurrent",
    "calendar",
)


def load_policy(path: str | FilePath, environment: Mapping[str, str] | None = None) -> Policy:
    """Return the policy of a file.

    Args:
        path: The file.
        environment: Variables that may replace single values; by default none.

    Raises:
        PolicyError: The file cannot be read or used; the message begins with its name, line and column.
    """
    return parse_policy(read_policy(path), str(path), environment)


def read_policy(path: str | FilePath) -> str:
    """Return the text of a policy file.

    Raises:
        PolicyError: It cannot be read.
    """
    file = FilePath(path)
    try:
        if stat.S_ISREG(file.stat().st_mode):
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not there, not text, or not even the name of a file
        raise PolicyError(f"{path}: {error}") from error
    # A pipe might keep us waiting for ever, and a device might never end.
    raise PolicyError(f"{path}: it is not a regular file")


def parse_policy(text: str, source: str = "policy", environment: Mapping[str, str] | None = None) -> Policy:
    """Return the policy of a text, as `load_policy` does of a file."""
    return read_document(text, source, environment or {})


def read_document(
    text: str, source: str, environment: Mapping[str, str], document: dict[str, Any] | None = None
) -> Policy:
    """Return the policy of a text, or of a document that was made of it."""
    try:
        document = tomllib.loads(text) if document is None else deepcopy(document)
        return _PolicyReader(document, source, positions(text), environment).policy()
    except PolicyError:
        raise
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(text, source, error) from error
    except (RecursionError, ValueError) as error:
        # Python reads, and writes, only so many of them.
        raise PolicyError(f"{source}: there are brackets or digits without end: {error}") from error


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
    """Reads a document into a policy, and says where it went wrong."""

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
        self.variables: dict[Path, str] = {}
        self._replace_from(environment)

    def policy(self) -> Policy:
        self._known_keys(self.document, (), {"allow_removal", "store", "limiters", "server"})
        store = self._table(self.document.get("store", {}), ("store",))
        self._known_keys(store, ("store",), {"url"})
        url = self._store(store.get("url", "memory://"), ("store", "url"))
        limiters = self._table(self.document.get("limiters", {}), ("limiters",))
        if not limiters:
            raise self._error((), 'no limiters; write for example [limiters.login] with rules = ["5/minute"]')
        return Policy(
            MappingProxyType({name: self._limiter(name, value, url) for name, value in limiters.items()}),
            self._server(self.document.get("server", {})),
            self._flag(self.document.get("allow_removal", False), ("allow_removal",)),
        )

    def _limiter(self, name: str, value: object, default_store: str) -> LimiterPolicy:
        path = ("limiters", name)
        table = self._table(value, path)
        self._known_keys(table, path, _LIMITER_KEYS)
        if "rules" not in table:
            raise self._error(path, f'limiter {name!r} has no rules; write for example rules = ["5/minute"]')
        specs = table["rules"]
        if not isinstance(specs, list):
            raise self._error((*path, "rules"), 'rules is an array, as in rules = ["5/minute"]')
        live: list[Rule] = []
        shadow: list[Rule] = []
        sources: dict[str, str] = {}
        for index, spec in enumerate(specs):
            place = (*path, "rules", index)
            rules, is_shadow = self._rules(spec, place)
            (shadow if is_shadow else live).extend(rules)
            sources |= dict.fromkeys((rule.name for rule in rules), self._source_of(place))
        self._trying((*path, "rules"), lambda: rules_from([*live, *shadow]))
        rules, overrides = self._overrides(table.get("overrides", []), (*path, "overrides"), [*live, *shadow])
        return LimiterPolicy(
            name=name,
            rules=tuple(rules[: len(live)]),
            shadow=tuple(rules[len(live) :]),
            store=self._store(table["store"], (*path, "store")) if "store" in table else default_store,
            on_store_error=self._on_store_error(
                table.get("on_store_error", "open"), (*path, "on_store_error")
            ),
            on_overload=self._choice(
                table.get("on_overload", "refuse"), (*path, "on_overload"), _ON_OVERLOAD
            ),
            deadline=self._deadline(table.get("deadline"), (*path, "deadline")),
            headers=self._choice(table.get("headers", "both"), (*path, "headers"), HEADER_STYLES),
            default_tier=self._default_tier(table.get("default_tier"), (*path, "default_tier")),
            overrides=MappingProxyType(overrides),
            source=self._source_of((*path, "rules") if path not in self.places else path),
            rule_sources=MappingProxyType(sources),
        )

    def _rules(self, spec: object, path: Path) -> tuple[list[Rule], bool]:
        if isinstance(spec, str):
            text = spec
            return list(self._trying(path, lambda: rules_from([text]))), False
        table = self._table(spec, path)
        self._known_keys(table, path, _RULE_KEYS)
        if "quota" not in table:
            raise self._error(path, 'a rule needs a quota, as in { quota = "5/minute" }')
        kind, quota, span = self._kind_and_quota(table, path)
        for name, owner in _KEYS_OF_ONE_KIND.items():
            if name in table and kind != owner:
                raise self._error((*path, name), f"{name} is for {owner}, not for {kind}")
        strict = self._flag(table.get("strict", True), (*path, "strict"))
        timezone = self._timezone(table, path) if kind == "calendar" else None
        unit = self._text(table.get("unit", REQUESTS), (*path, "unit"))
        rule = self._trying(
            path,
            lambda: make_rule(
                kind,
                quota,
                table.get("scope"),
                None,
                table.get("name"),
                table.get("buckets", DEFAULT_BUCKETS),
                strict,
                unit=unit,
                span=span,
                timezone=timezone,
            ),
        )
        tiers = {
            self._tier(tier, (*path, "tiers", tier)): self._quota_of(rule, value, (*path, "tiers", tier))
            for tier, value in self._table(table.get("tiers", {}), (*path, "tiers")).items()
        }
        return [_with_tiers(rule, tiers)], self._flag(table.get("shadow", False), (*path, "shadow"))

    def _kind_and_quota(self, table: Mapping[str, Any], path: Path) -> tuple[Kind, Quota, Span | None]:
        """Return the kind of a rule, its quota, and of a calendar what its windows are."""
        value, place = table["quota"], (*path, "quota")
        kind = self._choice(table["kind"], (*path, "kind"), _KINDS) if "kind" in table else None
        if kind == "concurrent":
            if "lease" not in table:
                raise self._error(
                    path, 'concurrent needs a lease, as in { kind = "concurrent", quota = 5, lease = "60s" }'
                )
            lease = self._trying((*path, "lease"), lambda: period_from(table["lease"], "lease"))
            return kind, Quota(self._whole(value, place, 0, MAX_UNITS), lease), None
        text = self._text(value, place)
        if kind == "calendar":
            limit, span = self._trying(place, lambda: parse_calendar(text))
            return kind, Quota(limit, SPANS_US[span]), span
        quota = self._trying(place, lambda: Quota.parse(text))
        return kind or ("sliding_window" if quota.burst is None else "token_bucket"), quota, None

    def _timezone(self, table: Mapping[str, Any], path: Path) -> str:
        place = (*path, "timezone")
        timezone = self._text(table.get("timezone", "UTC"), place)
        self._trying(place, lambda: check_timezone(timezone))
        return timezone

    def _overrides(
        self, value: object, path: Path, rules: list[Rule]
    ) -> tuple[list[Rule], dict[object, str]]:
        """Return the rules with tiers for the overrides, and the tier by key."""
        if not isinstance(value, list):
            raise self._error(path, "overrides is an array of tables: [[limiters.NAME.overrides]]")
        overrides: dict[object, Override] = {}
        for index, entry in enumerate(value):
            override = self._override(entry, (*path, index), rules)
            if override.key in overrides:
                raise self._error((*path, index, "key"), f"key {entry['key']!r} is overridden twice")
            overrides[override.key] = override
        try:
            quotas = resolved(list(overrides.values()))
        except OverridesError as error:
            raise self._error((*path, error.index), str(error)) from error
        tiers = {key: override_tier(number) for number, key in enumerate(quotas)}
        added = [_override_tiers(tiers[key], own, rules) for key, own in quotas.items()]
        changed = [
            _with_tiers(
                rule, {tier: quota for all_tiers in added for tier, quota in all_tiers[place].items()}
            )
            for place, rule in enumerate(rules)
        ]
        return changed, tiers

    def _override(self, entry: object, path: Path, rules: list[Rule]) -> Override:
        table = self._table(entry, path)
        self._known_keys(table, path, {"key", "rules"})
        if "key" not in table or "rules" not in table:
            raise self._error(path, 'an override needs a key and rules = { NAME = "QUOTA" }')
        quotas = self._table(table["rules"], (*path, "rules"))
        by_name = {rule.name: rule for rule in rules}
        if unknown := quotas.keys() - by_name.keys():
            known = ", ".join(map(repr, by_name))
            raise self._error(
                (*path, "rules", min(unknown)), f"no rule is called {min(unknown)!r}; there is {known}"
            )
        parsed = {
            name: self._quota_of(by_name[name], value, (*path, "rules", name))
            for name, value in quotas.items()
        }
        return Override(self._override_key(table["key"], (*path, "key"), rules), parsed)

    def _override_key(self, key: object, path: Path, rules: list[Rule]) -> object:
        scopes = {rule.scope for rule in rules} - {SHARED}
        named = sorted(scope for scope in scopes if scope is not None)
        if isinstance(key, dict):
            if not key or not all(isinstance(part, str) for part in key.values()):
                raise self._error(path, 'a key by scope has text for each, as in { user = "42" }')
            if unknown := key.keys() - set(named):
                by = ", ".join(map(repr, named)) or "no scope"
                raise self._error(
                    (*path, min(unknown)), f"no rule counts by {min(unknown)!r}; the rules count by {by}"
                )
        elif not isinstance(key, str):
            raise self._error(path, "a key is text, or a table with an entry per scope")
        elif named:
            raise self._error(path, f'the rules have scopes, so write for example {{ {named[0]} = "{key}" }}')
        return frozen_key(key)

    def _server(self, value: object) -> ServerPolicy:
        path = ("server",)
        table = self._table(value, path)
        self._known_keys(table, path, _SERVER_KEYS)
        usual = ServerPolicy()
        return ServerPolicy(
            host=self._text(table.get("host", usual.host), (*path, "host")),
            port=self._whole(table.get("port", usual.port), (*path, "port"), 0, _HIGHEST_PORT),
            top_keys=self._whole(
                table.get("top_keys", usual.top_keys), (*path, "top_keys"), 0, _MOST_TOP_KEYS
            ),
            largest_body=self._whole(
                table.get("largest_body", usual.largest_body), (*path, "largest_body"), 1, _LARGEST_BODY
            ),
            record=self._text(table["record"], (*path, "record")) if "record" in table else None,
            record_bytes=self._whole(
                table.get("record_bytes", usual.record_bytes), (*path, "record_bytes"), 1, _LARGEST_RECORD
            ),
            record_keys=self._choice(
                table.get("record_keys", usual.record_keys), (*path, "record_keys"), RECORD_KEYS
            ),
            history=self._text(table["history"], (*path, "history")) if "history" in table else None,
            tokens=MappingProxyType(self._tokens(table.get("tokens", {}), (*path, "tokens"))),
        )

    def _tokens(self, value: object, path: Path) -> dict[str, TokenPolicy]:
        tokens: dict[str, TokenPolicy] = {}
        names: dict[str, str] = {}
        for name, entry in self._table(value, path).items():
            token = tokens[name] = self._token(entry, (*path, name))
            other = names.setdefault(token.sha256, name)
            if other != name:
                raise self._error((*path, name, "sha256"), f"{other!r} has the same token; make another one")
        return tokens

    def _token(self, value: object, path: Path) -> TokenPolicy:
        table = self._table(value, path)
        self._known_keys(table, path, _TOKEN_KEYS)
        if not table.keys() >= _TOKEN_KEYS - {"expires"}:
            raise self._error(
                path, 'a token needs sha256 and may = ["decide"]; `headgate token` makes one and prints both'
            )
        digest = self._text(table["sha256"], (*path, "sha256")).lower()
        if not _SHA256.fullmatch(digest):
            raise self._error(
                (*path, "sha256"),
                "the SHA-256 of a token is 64 hexadecimal digits; `headgate token` makes a token and prints them",
            )
        may = table["may"]
        if not isinstance(may, list) or not may:
            raise self._error((*path, "may"), 'may is an array of "decide" and "administer"')
        return TokenPolicy(
            digest,
            frozenset(self._choice(one, (*path, "may", place), PERMISSIONS) for place, one in enumerate(may)),
            self._instant(table["expires"], (*path, "expires")) if "expires" in table else None,
        )

    def _instant(self, value: object, path: Path) -> float:
        """Return a date or a time as seconds since the epoch; without a zone it is UTC, and a date is its beginning."""
        if not isinstance(value, date):
            raise self._error(path, f"a date is wanted, as in expires = 2030-01-31, not {value!r}")
        instant = value if isinstance(value, datetime) else datetime.combine(value, time.min)
        return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()

    # Values

    def _on_store_error(self, value: object, path: Path) -> OnStoreError:
        if value in ("open", "closed") or isinstance(value, dict):
            with contextlib.suppress(ConfigError):
                return policy_from_data(value)
        raise self._error(path, f'"open", "closed" or {{ local = 0.25 }} is wanted, not {value!r}')

    def _store(self, value: object, path: Path) -> str:
        url = self._text(value, path)
        self._trying(path, lambda: check_url(url))
        return url

    def _deadline(self, value: Any, path: Path) -> float | None:
        return None if value is None else self._trying(path, lambda: check_deadline(value))

    def _default_tier(self, value: object, path: Path) -> str | None:
        return None if value is None else self._tier(value, path)

    def _tier(self, value: object, path: Path) -> str:
        tier = self._text(value, path)
        if tier.startswith(OVERRIDE):
            raise self._error(path, f"names that begin with {OVERRIDE!r} are taken")
        return tier

    def _quota_of(self, rule: Rule, value: object, path: Path) -> Quota:
        """Return a quota that a rule can count by, of a tier or of a key."""
        if rule.kind == "concurrent":
            number = self._whole(value, path, 0, MAX_UNITS)
            return self._trying(path, lambda: rule.quota_from(number))
        text = self._text(value, path)
        return self._trying(path, lambda: rule.quota_from(text))

    def _text(self, value: object, path: Path) -> str:
        if not isinstance(value, str) or not value:
            raise self._error(path, f"text is wanted, not {value!r}")
        return value

    def _whole(self, value: object, path: Path, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            raise self._error(path, f"a whole number from {least} to {most} is wanted, not {value!r}")
        return value

    def _flag(self, value: object, path: Path) -> bool:
        if not isinstance(value, bool):
            raise self._error(path, f"true or false is wanted, not {value!r}")
        return value

    def _choice(self, value: object, path: Path, choices: tuple[T, ...]) -> T:
        for choice in choices:
            if value == choice:
                return choice
        raise self._error(
            path, f"one of {', '.join(repr(choice) for choice in choices)} is wanted, not {value!r}"
        )

    def _table(self, value: object, path: Path) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._error(path, f"a table is wanted, not {value!r}")
        return value

    def _known_keys(self, table: Mapping[str, object], path: Path, known: set[str]) -> None:
        if unknown := table.keys() - known:
            name = min(unknown)
            raise self._error((*path, name), f"unknown key {name!r}; known are {', '.join(sorted(known))}")

    # Errors and the environment

    def _trying(self, path: Path, make: Callable[[], T]) -> T:
        """Return what a function makes; an error gets the place in the file added."""
        try:
            return make()
        except ConfigError as error:
            raise self._error(path, str(error)) from error

    def _origin(self, path: Path) -> tuple[str | None, tuple[int, int] | None]:
        """Return the variable that a value came from, and where it stands in the text, or what it is in."""
        towards_root = [path[:end] for end in range(len(path), 0, -1)]
        variable = next((self.variables[part] for part in towards_root if part in self.variables), None)
        return variable, next((self.places[part] for part in towards_root if part in self.places), None)

    def _source_of(self, path: Path) -> str:
        """Return where a value came from, for people."""
        variable, place = self._origin(path)
        return variable or (self.source if place is None else f"{self.source}:{place[0]}")

    def _error(self, path: Path, message: str) -> PolicyError:
        variable, place = self._origin(path)
        if variable is not None:
            error = PolicyError(f"environment variable {variable}: {message}")
        elif place is not None:
            error = PolicyError(f"{self.source}:{place[0]}:{place[1]}: {message}", *place)
        else:
            error = PolicyError(f"{self.source}: {message}")
        error.path, error.variable = path, variable
        return error

    def _replace_from(self, environment: Mapping[str, str]) -> None:
        paths: dict[str, list[Path]] = {}
        for path in _replaceable(self.document):
            paths.setdefault(_variable(path), []).append(path)
        for variable in sorted(paths.keys() & environment.keys()):  # a table before what is in it
            path, *others = paths[variable]
            if others:
                named = ", ".join(".".join(map(str, each)) for each in (path, *others))
                raise PolicyError(
                    f"environment variable {variable}: it may mean any of {named}; rename all but one"
                )
            if _put(self.document, path, _toml_or_text(environment[variable])):
                self.variables[path] = variable


def _replaceable(document: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the paths of the values that an environment variable may set, whether the file sets them or not."""
    yield ("allow_removal",)
    yield ("store", "url")
    limiters = document.get("limiters")
    for name in limiters if isinstance(limiters, dict) else ():
        for key in sorted(_LIMITER_KEYS):
            yield ("limiters", name, key)
    for key in sorted(_SERVER_KEYS):
        yield ("server", key)
    server = document.get("server")
    tokens = server.get("tokens") if isinstance(server, dict) else None
    for name in tokens if isinstance(tokens, dict) else ():
        for key in sorted(_TOKEN_KEYS):
            yield ("server", "tokens", name, key)


def variables_of(text: str) -> set[str]:
    """Return the names of the environment variables that may set something in the policy of a text."""
    return {_variable(path) for path in _replaceable(tomllib.loads(text))}


def _put(table: object, path: Path, value: object) -> bool:
    """Put a value into nested tables; false if there is something else in its place, which reading it will report."""
    *towards, name = path
    for part in towards:
        table = table.setdefault(part, {}) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table[name] = value
    return isinstance(table, dict)


def _with_tiers(rule: Rule, added: Mapping[str, Quota]) -> Rule:
    return replace(rule, tiers=MappingProxyType({**rule.tiers, **added}))


def _override_tiers(
    override: str, quotas: Mapping[str, Quota], rules: Sequence[Rule]
) -> list[dict[str, Quota]]:
    """Return the tiers that an override adds to each rule.

    A rule that it says nothing about keeps its tiers, so there is one for it together with each of those.
    """
    kept = known_tiers(rule for rule in rules if rule.name not in quotas)
    names = {override: "", **{override_tier(override, tier): tier for tier in sorted(kept)}}
    return [
        dict.fromkeys(names, quotas[rule.name])
        if rule.name in quotas
        else {name: rule.tiers[tier] for name, tier in names.items() if tier in rule.tiers}
        for rule in rules
    ]


def _variable(path: Path) -> str:
    return ENVIRONMENT_PREFIX + "__".join(re.sub(r"[^A-Z0-9]", "_", str(part).upper()) for part in path)


def _toml_or_text(value: str) -> object:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (RecursionError, ValueError):
        return value
