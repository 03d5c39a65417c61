"""Counts of limiters, for display and reset: from the stores of a policy file, or through a running server.

Nothing is charged. Two checks read the state of a key: one with cost 0 for the counts, one with cost 1 for the time until
one more unit is admitted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from headgate import ConfigError, Rule, StoreMisconfigured, StoreUnavailable
from headgate.keys import Key
from headgate.observe import redact
from headgate.rules import SHARED
from headgate.stores import Request, Store, open_store
from headgate.usage import RuleUsage, usage_of, with_unreachable_limits
from headgate_server.cli.common import TOKEN_VARIABLE, Failure

if TYPE_CHECKING:
    from headgate.client import KeyState, ServerStore
    from headgate.policy import LimiterPolicy, Policy

PATIENCE = 10.0
"""Seconds to wait for a reply or an event of a server."""


class NotVisible(Exception):
    """The counts of a limiter cannot be read from here, although nothing is wrong."""


@dataclass(frozen=True, slots=True)
class KeyArgument:
    """The key on the command line: a text for every scope, or an entry per scope."""

    text: str | None
    scopes: Mapping[str, str]

    def __str__(self) -> str:
        return self.text if self.text is not None else ", ".join(f"{k}={v}" for k, v in self.scopes.items())

    def key_for(self, rules: tuple[Rule, ...]) -> Key | None:
        """Return the key for these rules.

        Raises:
            NotVisible: A scope is missing.
        """
        scopes = {rule.scope for rule in rules}
        named = sorted(scope for scope in scopes if scope is not None and scope != SHARED)
        if self.text is not None:
            return dict.fromkeys(named, self.text) if named else self.text
        if missing := [scope for scope in named if scope not in self.scopes]:
            raise NotVisible(f"it also counts by {missing[0]}: add --scope {missing[0]}=…")
        if None in scopes:
            raise NotVisible("it counts by plain keys: use KEY instead of --scope")
        return {scope: self.scopes[scope] for scope in named} or None


@dataclass(frozen=True, slots=True)
class LimiterView:
    """Access to the counts of a limiter.

    Attributes:
        name: The name of the limiter.
        store: The URL of its store, without credentials.
        rules: Its live and shadow rules.
        counts: Returns the usage of each rule by a key and a tier; raises HeadgateError if the store fails.
        reset: Deletes the counts of a key, and those of rules that are shared by all callers.
        hidden: The reason why its counts cannot be read from here, or `None`.
    """

    name: str
    store: str
    rules: tuple[Rule, ...]
    counts: Callable[[Key | None, str | None], list[RuleUsage]]
    reset: Callable[[Key | None], None]
    hidden: str | None = None

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of the rules that are shared by all callers."""
        return tuple(rule.name for rule in self.rules if rule.scope == SHARED)

    def key(self, argument: KeyArgument) -> Key | None:
        """Return the key by which the limiter counts a caller.

        Raises:
            NotVisible: Its counts cannot be read from here, or a scope is missing.
        """
        if self.hidden is not None:
            raise NotVisible(self.hidden)
        return argument.key_for(self.rules)


# Stores of a policy file


@contextmanager
def views_of_policy(policy: Policy) -> Iterator[list[LimiterView]]:
    """Give a view of each limiter; stores are opened when they are used, and closed at the end."""
    with ExitStack() as stack:
        opened = cache(lambda url: stack.enter_context(closing(open_store(url))))
        yield [
            LimiterView(
                limiter.name,
                redact(limiter.store),
                (*limiter.rules, *limiter.shadow),
                partial(_read_counts, limiter, opened),
                partial(_reset, limiter, opened),
                _hidden_reason(limiter.store),
            )
            for limiter in policy.limiters.values()
        ]


def _hidden_reason(url: str) -> str | None:
    """Return the reason why a store cannot be read from here: it is in memory, or a file that does not exist."""
    scheme, _, rest = url.partition(":")
    path = rest.removeprefix("///")
    if scheme.lower() == "memory" or path == ":memory:":
        return "it counts in the memory of another process; if that is a server, add --server"
    if scheme.lower() == "sqlite" and not Path(unquote(path)).exists():
        return f"nothing was counted yet: there is no file {Path(unquote(path)).absolute()}"
    return None


def _rule_sets(limiter: LimiterPolicy) -> Iterator[tuple[Rule, ...]]:
    """Yield the rules that are decided together: all live rules, and each shadow rule alone."""
    if limiter.rules:
        yield limiter.rules
    yield from ((rule,) for rule in limiter.shadow)


def _read_counts(
    limiter: LimiterPolicy, opened: Callable[[str], Store], key: Key | None, tier: str | None
) -> list[RuleUsage]:
    store, counts = opened(limiter.store), []
    for rules in _rule_sets(limiter):
        own = limiter.rules_for(key, tier, rules)
        unreachable = tuple(map(with_unreachable_limits, own))
        part = _part_for(rules, key)
        counted, _ = store.bind(limiter.name, unreachable).decide(Request("peek", part, 0))
        one_more, _ = store.bind(limiter.name, own).decide(Request("peek", part, 1))
        counts += [
            usage_of(rule, *results, shadow=rule.name in {shadow.name for shadow in limiter.shadow})
            for rule, *results in zip(own, counted.results, one_more.results, strict=True)
        ]
    return counts


def _reset(limiter: LimiterPolicy, opened: Callable[[str], Store], key: Key | None) -> None:
    for rules in _rule_sets(limiter):
        opened(limiter.store).bind(limiter.name, rules).reset(_part_for(rules, key))


def _part_for(rules: tuple[Rule, ...], key: Key | None) -> Key | None:
    """Return the scopes of a key that rules use."""
    if not isinstance(key, Mapping):
        return key
    scopes = {rule.scope for rule in rules}
    return {scope: part for scope, part in key.items() if scope in scopes} or None


# Running servers


def open_server(url: str, token: str | None = None) -> ServerStore:
    """Return a client of a server, with the given token or that of the environment.

    Raises:
        Failure: The URL or the token is invalid.
    """
    from headgate.client import ServerStore

    try:
        return ServerStore(url, token=token or os.environ.get(TOKEN_VARIABLE), deadline=PATIENCE)
    except ConfigError as error:
        raise Failure(str(error), code=2) from error


@contextmanager
def valid_replies(server: ServerStore) -> Iterator[None]:
    """Raise StoreMisconfigured if a reply does not have the expected form."""
    import msgspec

    try:
        yield
    except (LookupError, msgspec.ValidationError) as error:
        raise StoreMisconfigured(
            f"{server.endpoint.name} did not answer as a Headgate server does"
        ) from error


def views_of_server(server: ServerStore) -> list[LimiterView]:
    """Return a view of each limiter of a server.

    Raises:
        HeadgateError: The server failed.
    """
    replies: dict[str, Mapping[str, KeyState]] = {}  # one reply has the counts of all limiters

    def counts(name: str, key: Key | None, tier: str | None) -> list[RuleUsage]:
        question = repr((key, tier))
        if question not in replies:
            replies[question] = {state.limiter: state for state in server.inspect(key, tier=tier)}
        with valid_replies(server):
            state = replies[question][name]
        if state.error is not None:
            raise StoreUnavailable(state.error)
        return list(state.results)

    views = []
    for limiter in server.limiters():
        rules = (*limiter.rules, *limiter.shadow)
        reset = server.bind(limiter.name, rules).reset
        views.append(LimiterView(limiter.name, limiter.store, rules, partial(counts, limiter.name), reset))
    return views
