"""Views of limiters: by the stores that a policy file names, or through a running server.

Nothing is charged. A store is asked for a cost of 0, which shows the counts, and for a cost of 1, which shows when there is
room for more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
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
    from headgate.client import KeyState, ServerLimiter, ServerStore
    from headgate.policy import LimiterPolicy, Policy

PATIENCE = 10.0
"""Seconds without a reply or an event after which a server counts as lost."""


class Unseen(Exception):
    """Why the counts of a limiter cannot be seen from here, though nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The caller to look at: a text that stands for every scope, or an entry per scope."""

    text: str | None
    scopes: Mapping[str, str]

    def __str__(self) -> str:
        return self.text if self.text is not None else ", ".join(f"{k}={v}" for k, v in self.scopes.items())

    def key_for(self, scopes: Iterable[str | None]) -> Key | None:
        """Return the key for rules with these scopes.

        Raises:
            Unseen: A scope is missing.
        """
        scopes = set(scopes)
        named = sorted(scope for scope in scopes if scope is not None and scope != SHARED)
        if self.text is not None:
            return dict.fromkeys(named, self.text) if named else self.text
        if missing := [scope for scope in named if scope not in self.scopes]:
            raise Unseen(f"it counts by {missing[0]} too: add --scope {missing[0]}=…")
        if None in scopes:
            raise Unseen("it counts by plain keys: give KEY instead of --scope")
        return {scope: self.scopes[scope] for scope in named} or None


# By the stores of a policy file


@contextmanager
def views_of_policy(policy: Policy) -> Iterator[list[StoreView]]:
    """Give a view of each limiter; stores are opened when they are used, and closed at the end."""
    with ExitStack() as stack:
        opened = cache(lambda url: stack.enter_context(closing(open_store(url))))
        yield [StoreView(limiter, opened) for limiter in policy.limiters.values()]


def _check_visible(url: str) -> None:
    """Refuse stores that only one process can see, and files that do not exist yet."""
    scheme, _, rest = url.partition(":")
    path = rest.removeprefix("///")
    if scheme.lower() == "memory" or path == ":memory:":
        raise Unseen("it counts in the memory of the process that uses it; if that is a server, add --server")
    if scheme.lower() == "sqlite" and not Path(unquote(path)).exists():
        raise Unseen(f"nothing was counted yet: there is no file {Path(unquote(path)).absolute()}")


class StoreView:
    """A limiter of a policy file, by its store.

    Attributes:
        name: The name of the limiter.
        store: The URL of its store, without credentials.
        shared: Names of the rules that count everybody together.
    """

    def __init__(self, limiter: LimiterPolicy, opened: Callable[[str], Store]) -> None:
        self.name = limiter.name
        self.store = redact(limiter.store)
        self.shared = tuple(rule.name for rule in limiter.rules if rule.scope == SHARED)
        self._limiter = limiter
        self._opened = opened
        # All live rules are decided together, each shadow rule alone. There may be shadow rules only.
        self._sets = [(limiter.rules, False)] if limiter.rules else []
        self._sets += [((rule,), True) for rule in limiter.shadow]

    def key(self, asked: Asked) -> Key | None:
        """Return the key by which the limiter counts a caller.

        Raises:
            Unseen: Its counts cannot be seen from here, or a scope is missing.
        """
        _check_visible(self._limiter.store)
        return asked.key_for(rule.scope for rules, _ in self._sets for rule in rules)

    def counts(self, key: Key | None, tier: str | None) -> list[RuleUsage]:
        """Return the counts of a key, by rule.

        Raises:
            HeadgateError: The store failed.
        """
        return [count for rules, shadow in self._sets for count in self._counts(rules, key, tier, shadow)]

    def reset(self, key: Key | None) -> None:
        """Forget the counts of a key; of a rule that counts everybody together, those of everybody.

        Raises:
            HeadgateError: The store failed.
        """
        store = self._opened(self._limiter.store)
        for rules, _ in self._sets:
            store.bind(self.name, rules).reset(_part_for(rules, key))

    def _counts(
        self, rules: tuple[Rule, ...], key: Key | None, tier: str | None, shadow: bool
    ) -> Iterator[RuleUsage]:
        store, part = self._opened(self._limiter.store), _part_for(rules, key)
        rules = self._limiter.rules_for(key, tier, rules)
        unreachable = tuple(map(with_unreachable_limits, rules))
        counted, _ = store.bind(self.name, unreachable).decide(Request("peek", part, 0))
        for_one_more, _ = store.bind(self.name, rules).decide(Request("peek", part, 1))
        for rule, at_zero, one_more in zip(rules, counted.results, for_one_more.results, strict=True):
            yield usage_of(rule, at_zero, one_more, shadow=shadow)


def _part_for(rules: tuple[Rule, ...], key: Key | None) -> Key | None:
    """Return the scopes of a key that rules use: a shadow rule alone has fewer than all rules."""
    if not isinstance(key, Mapping):
        return key
    scopes = {rule.scope for rule in rules}
    return {scope: part for scope, part in key.items() if scope in scopes} or None


# Through a server


def open_server(url: str, token: str | None = None) -> ServerStore:
    """Return a server by its URL; without a token, that of the environment is sent.

    Raises:
        Failure: The URL or the token cannot be used.
    """
    from headgate.client import ServerStore

    try:
        return ServerStore(url, token=token or os.environ.get(TOKEN_VARIABLE), deadline=PATIENCE)
    except ConfigError as error:
        raise Failure(str(error), code=2) from error


@contextmanager
def understood(server: ServerStore) -> Iterator[None]:
    """Raise StoreMisconfigured if a reply does not have the expected form."""
    import msgspec

    try:
        yield
    except (LookupError, msgspec.ValidationError) as error:
        raise StoreMisconfigured(
            f"{server.endpoint.name} did not answer as a Headgate server does"
        ) from error


def views_of_server(server: ServerStore) -> list[ServerView]:
    """Return a view of each limiter of a server.

    Raises:
        HeadgateError: The server failed.
    """
    answers: dict[str, Mapping[str, KeyState]] = {}
    return [ServerView(server, limiter, answers) for limiter in server.limiters()]


class ServerView:
    """A limiter of a server, with the methods of `StoreView`. One reply has all limiters, so the views share replies."""

    def __init__(
        self, server: ServerStore, limiter: ServerLimiter, answers: dict[str, Mapping[str, KeyState]]
    ) -> None:
        self.name = limiter.name
        self.store = limiter.store
        self.shared = tuple(rule.name for rule in limiter.rules if rule.scope == SHARED)
        self._rules = (*limiter.rules, *limiter.shadow)
        self._server = server
        self._answers = answers

    def key(self, asked: Asked) -> Key | None:
        return asked.key_for(rule.scope for rule in self._rules)

    def counts(self, key: Key | None, tier: str | None) -> list[RuleUsage]:
        question = repr((key, tier))
        if question not in self._answers:
            states = self._server.inspect(key, tier=tier)
            self._answers[question] = {state.limiter: state for state in states}
        with understood(self._server):
            state = self._answers[question][self.name]
        if state.error is not None:
            raise StoreUnavailable(state.error)
        return list(state.results)

    def reset(self, key: Key | None) -> None:
        self._server.bind(self.name, self._rules).reset(key)


View = StoreView | ServerView
