"""Bind a limiter to a store that may be down."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headgate.errors import ConfigError
from headgate.outage.breaker import breaker_of
from headgate.outage.fallback import FallbackLimiter, Health
from headgate.outage.policies import OnOverload, OnStoreError, check_overload, check_policy
from headgate.rules import Rule, fixed_window, scopes_of
from headgate.stores.base import AnyStore, check_deadline
from headgate.stores.request import Request

_PING_KEY = "ping"
_PING_RULE = fixed_window("1/second", name="headgate.ping")
"""A ping records a unit of this rule: a tiny state that expires after a second."""


def bind(
    store: AnyStore,
    bind_to_store: Callable[..., Any],
    resilient_gate: Callable[..., Any],
    limiter: str,
    rules: tuple[Rule, ...],
    on_store_error: OnStoreError | None,
    deadline: float | None,
    on_overload: OnOverload,
) -> tuple[Any, Health, Any]:
    """Return a limiter's gate on a store, its health, and the ping function or `None`.

    By default a network store that is down admits (`"open"`), and the errors of any other store are raised.

    Args:
        store: The store.
        bind_to_store: Its method `bind` or `bind_async`.
        resilient_gate: `ResilientGate` or `AsyncResilientGate`.
        limiter: The limiter's name.
        rules: Its rules.
        on_store_error: Its failure policy, or `None` for the default.
        deadline: Seconds for each call, or `None` for the store's own deadline.
        on_overload: Its policy for calls that this process could not send.

    Raises:
        ConfigError: A policy is unknown, or the store does not support deadlines.
    """
    policy = check_policy(on_store_error or ("open" if store.remote else "raise"))
    check_overload(on_overload)
    if deadline is not None and not store.remote and store.guarantees.shared:
        raise ConfigError(f"deadline= is for stores over a network; {type(store).__name__} has no use for it")
    gate = bind_to_store(limiter, rules, deadline=deadline)
    if not store.remote and not store.guarantees.shared:
        return gate, Health(), None
    is_tight = deadline is not None and check_deadline(deadline) < getattr(store, "deadline", deadline)
    # A ping gets the store's own deadline, even if calls have a shorter one.
    patient = bind_to_store(limiter, rules) if is_tight else gate
    if store.has_rules or getattr(store, "pings_by_looking", False):
        # A server whose own store is down answers by its policy, so a peek is enough.
        key = dict.fromkeys(scopes_of(rules), _PING_KEY) or _PING_KEY
        ping = partial(patient.decide, Request("peek", key, 0))
    else:
        ping_gate = bind_to_store(limiter, (_PING_RULE,), deadline=None if is_tight else deadline)
        ping = partial(ping_gate.decide, Request("record", _PING_KEY, 1))
    if not store.remote and policy == "raise":
        return gate, Health(), ping
    fallback = FallbackLimiter(limiter, rules, policy, breaker_of(store), on_overload)
    resilient = resilient_gate(store, gate, patient, ping, fallback, is_tight)
    return resilient, fallback.health, resilient.ping
