"""Limiters as the command sees them: by the stores that a policy file names, or through a running server.

Nothing here charges anybody. A store is asked what it would answer to a cost of 0, which shows what is counted, and to a
cost of 1, which shows when there is room for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from headgate import Rule, StoreUnavailable
from headgate.client import KeyState, ServerLimiter, ServerStore
from headgate.keys import Key
from headgate.observe import redact
from headgate.policy import LimiterPolicy, Policy, known_tiers
from headgate.rules import SHARED
from headgate.stores import Request, Store, open_store
from headgate.usage import RuleUsage, usage_of, with_unreachable_limits
from headgate_server.cli.remote import understood


class Unseen(Exception):
    """Why the counts of a limiter cannot be seen from here, though nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Whose counts are meant: a text that stands for every scope, or an entry per scope."""

    text: str | None
    scopes: Mapping[str, str]

    def __str__(self) -> str:
        return self.text if self.text is not None else ", ".join(f"{k}={v}" for k, v in self.scopes.items())

    def key_for(self, scopes: Iterable[str | None]) -> Key | None:
        """Return the key for rules with these scopes.

        Raises:
            Unseen: It is not said who is meant.
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


class View(Protocol):
    """One limiter."""

    name: str
    store: str
    """Where it counts, without credentials."""
    shared: tuple[str, ...]
    """Names of the rules that count for everybody together."""

    def key(self, asked: Asked) -> Key | None:
        """Return the key by which the limiter counts the caller that was named.

        Raises:
            Unseen: What it counts cannot be seen from here, or it is not said who is meant.
        """

    def counts(self, key: Key | None, tier: str | None) -> list[RuleUsage]:
        """Return what was counted for a key, by rule.

        Raises:
            HeadgateError: The store cannot be asked.
        """

    def reset(self, key: Key | None) -> None:
        """Forget what was counted for a key; of a rule for everybody together, for everybody.

        Raises:
            HeadgateError: The store cannot be asked.
        """


# By the stores of a policy file


@contextmanager
def views_of_policy(policy: Policy) -> Iterator[list[View]]:
    """Give a view of each limiter; stores are opened when they are asked, and closed at the end."""
    with ExitStack() as stack:
        opened = cache(lambda url: stack.enter_context(closing(open_store(url))))
        yield [_StoreView(limiter, opened) for limiter in policy.limiters.values()]


def _check_visible(url: str) -> None:
    """Refuse stores that only one process can see, and files that asking would make."""
    scheme, _, rest = url.partition(":")
    path = rest.removeprefix("///")
    if scheme.lower() == "memory" or path == ":memory:":
        raise Unseen("it counts in the memory of the process that uses it; if that is a server, add --server")
    if scheme.lower() == "sqlite" and not Path(unquote(path)).exists():
        raise Unseen(f"nothing was counted yet: there is no file {Path(unquote(path)).absolute()}")


class _StoreView:
    """A limiter of a policy file, by its store."""

    def __init__(self, limiter: LimiterPolicy, opened: Callable[[str], Store]) -> None:
        self.name = limiter.name
        self.store = redact(limiter.store)
        self.shared = tuple(rule.name for rule in limiter.rules if rule.scope == SHARED)
        self._limiter = limiter
        self._opened = opened
        # All live rules are decided together, each shadow rule for itself. There may be shadow rules only.
        self._sets = [(limiter.rules, False)] if limiter.rules else []
        self._sets += [((rule,), True) for rule in limiter.shadow]

    def key(self, asked: Asked) -> Key | None:
        _check_visible(self._limiter.store)
        return asked.key_for(rule.scope for rules, _ in self._sets for rule in rules)

    def counts(self, key: Key | None, tier: str | None) -> list[RuleUsage]:
        return [count for rules, shadow in self._sets for count in self._counts(rules, key, tier, shadow)]

    def reset(self, key: Key | None) -> None:
        store = self._opened(self._limiter.store)
        for rules, _ in self._sets:
            store.bind(self.name, rules).reset(_part_for(rules, key))

    def _counts(
        self, rules: tuple[Rule, ...], key: Key | None, tier: str | None, shadow: bool
    ) -> Iterator[RuleUsage]:
        store = self._opened(self._limiter.store)
        tier = self._limiter.tier_among(known_tiers((*self._limiter.rules, *rules)), key, tier)
        key = _part_for(rules, key)
        counted, _ = store.bind(self.name, tuple(map(with_unreachable_limits, rules))).ask(
            Request("peek", key, 0, tier)
        )
        for_one_more, _ = store.bind(self.name, rules).ask(Request("peek", key, 1, tier))
        for rule, at_zero, one_more in zip(rules, counted.results, for_one_more.results, strict=True):
            yield usage_of(rule, at_zero, one_more, shadow=shadow)


def _part_for(rules: tuple[Rule, ...], key: Key | None) -> Key | None:
    """Return what rules want of a key: each shadow rule is asked for itself, and has fewer scopes than all."""
    if not isinstance(key, Mapping):
        return key
    scopes = {rule.scope for rule in rules}
    return {scope: part for scope, part in key.items() if scope in scopes} or None


# Through a server


def views_of_server(server: ServerStore) -> list[View]:
    """Return a view of each limiter of a server.

    Raises:
        HeadgateError: It cannot be asked.
    """
    answers: dict[str, Mapping[str, KeyState]] = {}
    return [_ServerView(server, limiter, answers) for limiter in server.limiters()]


class _ServerView:
    """A limiter of a server. One answer has the counts of all limiters, so the views share their answers."""

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
