# Generated from src/headgate/_async/limiter.py by tools/unasync.py. Do not edit.
"""The limiter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Never, ParamSpec, TypeVar, overload

from headgate._concurrency import (
    check_plain_function,
    check_undecorated,
    qualified_name,
)
from headgate._fair_queue import POLL_EVERY
from headgate._hit import HitMethods
from headgate._limiting import LimiterBase, raise_unknown_option
from headgate._sync.gates import Observed, Quoted, Timed, Unlimited
from headgate._sync.hold import Hold, ObservedHold
from headgate._sync.waiting import LocalQueues, WaitingTurn
from headgate.algorithms.waiting import DEFAULT_PRIORITY, check_priority
from headgate.clock import MICROSECONDS, Clock, time_limit, to_microseconds
from headgate.costs import Cost
from headgate.decision import Decision
from headgate.errors import ConfigError, RateLimited
from headgate.hooks import Hook, Hooks
from headgate.keys import Key
from headgate.leases._sync.gate import LeasedGate
from headgate.outage._sync.gate import ResilientGate
from headgate.outage.binding import bind
from headgate.outage.policies import OnOverload, OnStoreError
from headgate.quotas import QuotaCache, QuotaFunction, QuotaValue, check_kept_for, check_quota_function
from headgate.rules import Rule, leased, scopes_of
from headgate.stores.base import Gate, Operation, Store, check_deadline
from headgate.stores.queues import Queues

P = ParamSpec("P")
R = TypeVar("R")


class Limiter(LimiterBase[Store, Gate], HitMethods):
    """A named set of rules over a store. Every call is decided by all rules together: all are charged, or none.

    Args:
        rules: Rules, or text like `"5/minute"` or `"5/minute; 50/hour"`. Without any, everything is admitted.
        name: Part of the identity of its counts; required with `store=`.
        store: A store or its URL (`sqlite:///path`, …); by default private memory.
        clock: A clock to use instead of the store's.
        on_store_error: The answer when the store is down: `"open"` admits, `"closed"` refuses,
            `local(share=0.25)` limits in memory, `"raise"` raises `StoreError`. The default is `"open"` for network
            stores and `"raise"` for all others.
        deadline: Seconds before a call to a network store is abandoned; by default the store's deadline. A time-out
            after a shorter deadline is not evidence that the store is down.
        on_overload: The answer when this process is too busy to send a call in time: `"refuse"`, or `"policy"` for the
            answer of `on_store_error`.
        hooks: Hooks called on every decision; see `headgate.observe`.
        quotas: A function from a call's key and tier to its quota, for quotas that live in a database. It returns a value
            for `quota=`, or `None` for the quota of the tier.
        quotas_for: Seconds for which its results are cached; 0 calls the function every time.
        strict_tiers: Whether a tier that no rule has raises `ConfigError`. By default the call has the quotas without a
            tier, and the first such call causes a warning.
        lease: The time for which this process may take units of hot keys from a shared store, to decide locally; at most
            1/20 of the shortest period. See `headgate.leases`.

    Keys are text or bytes, or a mapping with an entry per scope. A cost is a number for every rule, or a mapping by unit, as
    in `{"tokens": 800}`, which also counts as one request. Counting calls accept `now=`, the time of the decision
    in seconds since the epoch; do not mix it with the store's time on one key. `quota=` is a quota for this call alone:
    text, a `Quota`, or a mapping by rule name. The counts stay.

    Attributes:
        rules: The rules, in order.
        units: The units of the rules.
        name: The limiter's name; empty if it has none.
        store: The store.
        new_hold: Hold factory.
        health: The health of the store.
    """

    new_hold: Callable[..., Hold]
    _leased: LeasedGate | None = None

    def __init__(
        self,
        *rules: str | Rule,
        name: str | None = None,
        store: Store | str | None = None,
        clock: Clock | None = None,
        on_store_error: OnStoreError | None = None,
        deadline: float | None = None,
        on_overload: OnOverload = "refuse",
        hooks: Iterable[Hook] = (),
        quotas: QuotaFunction | None = None,
        quotas_for: float = 60.0,
        strict_tiers: bool = False,
        lease: str | float | timedelta | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise_unknown_option(type(self).__name__, unknown)
        if deadline is not None:
            check_deadline(deadline)
        self._deadline = deadline
        if quotas is not None:
            check_quota_function(quotas)
        check_kept_for("quotas_for=", quotas_for)
        self._prepare(rules, name, store, clock, "bind", lease)
        self._watch_tiers(strict_tiers, is_used_otherwise=quotas is not None)
        try:
            gate: Gate = Unlimited()
            if self.rules or self.store.has_rules:
                gate, self.health, self._ping = bind(
                    self.store,
                    self.store.bind,
                    ResilientGate,
                    self.name,
                    self.rules,
                    on_store_error,
                    deadline,
                    on_overload,
                )
            if self._chunks is not None:
                gate = self._leased = LeasedGate(gate, self._chunks)
            if store is not None and clock is not None:
                gate = Timed(gate, clock)  # a private memory store has the clock already
            self._queues = self._bind_queues()
            if quotas is not None:
                self.quotas = QuotaCache(self.rules, quotas, quotas_for, self._clock)
                gate = Quoted(gate, self.quotas, self._turn_of)
            called = Hooks(hooks) if hooks else None
            self.gate, self.new_hold = self._wrap(gate, called)
            if called is not None:
                called.attached(self)
        except BaseException:
            if self._handle is not None:
                self._handle.close()
            raise

    def _bind_queues(self) -> Queues:
        """Return the queues of waiting calls: those of a shared store, or else of this process.

        Chunks of leased units are decided in this process, and a clock of tests cannot wait for other processes.
        """
        bind_queues = getattr(self.store, "bind_queues", None)
        if bind_queues is None or self._chunks is not None or not self._has_real_time:
            return LocalQueues(self.rules, self._lines)
        queues: Queues = bind_queues(self.name, self.rules, deadline=self._deadline)
        return queues

    def _wrap(self, gate: Gate, hooks: Hooks | None) -> tuple[Gate, Callable[..., Hold]]:
        """Return the gate with hooks, and the hold factory."""
        if hooks is None:
            return gate, Hold
        observed = Observed(gate, self.name, self.units, hooks)
        return observed, functools.partial(ObservedHold, hooks, self.name)

    def record(
        self,
        key: Key | None = None,
        cost: Cost = 1,
        *,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        now: float | None = None,
    ) -> Decision:
        """Count units that have been used already, even beyond the limit.

        The decision is always an admission, without figures. Only `degraded` is of interest: if it is true, the store could
        not be reached and the units may not be counted.
        """
        return self._decide("record", key, cost, tier, quota, now)

    def hold(
        self,
        key: Key | None = None,
        cost: Cost = 1,
        *,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        now: float | None = None,
        timeout: float | None = None,
        priority: int = DEFAULT_PRIORITY,
    ) -> Hold:
        """Take units that are not final yet: `with limiter.hold(key) as hold`, or `hold = …`.

        Settle the hold at its true cost, confirm it, or release it. If the holder crashes, its units count until they
        expire, and its places in a `concurrent` rule until their lease ends.

        With a `timeout` it waits like `wait`, with a `priority`, and is woken when another hold releases a place.

        Raises:
            ConfigError: The time-out or the priority is not valid, or `now=` is given too.
            RateLimited: With a `timeout`: the units would not be admitted within that time. Without one, a refused hold is
                returned; it is false.
        """
        return self._hold(key, cost, tier, quota, now, timeout, priority)

    def _hold(
        self,
        key: Key | None,
        cost: Cost,
        tier: str | None,
        quota: QuotaValue | None,
        now: float | None,
        timeout: float | None,
        priority: int,
    ) -> Hold:
        check_priority(priority)
        if timeout is None:
            return self._take(key, cost, tier, quota, now)
        if now is not None:
            raise ConfigError("hold waits by its clock: use either now= or timeout=")
        take = functools.partial(self._take, key, cost, tier, quota, None)
        hold: Hold = self._take_in_turn(take, key, cost, tier, quota, timeout, priority)
        return hold

    def _attempt(
        self, key: Key | None, cost: Cost, tier: str | None, quota: QuotaValue | None, is_final: bool
    ) -> Decision:
        """Return the decision of one attempt of `wait`."""
        version = self.current
        request = version.request("hit", key, cost, tier, quota, is_final=is_final)
        return (version.gate.decide(request))[0]

    def _decide(
        self,
        operation: Operation,
        key: Key | None,
        cost: Cost,
        tier: str | None,
        quota: QuotaValue | None,
        now: float | None,
    ) -> Decision:
        version = self.current  # rules, units and gate of one version
        request = version.request(operation, key, cost, tier, quota, now)
        return (version.gate.decide(request))[0]

    def _take(
        self,
        key: Key | None,
        cost: Cost,
        tier: str | None,
        quota: QuotaValue | None,
        now: float | None,
        is_final: bool = True,
    ) -> Hold:
        request = self.request("hold", key, cost, tier, quota, now, is_final=is_final)
        decision, receipts = self.gate.decide(request)
        gate, quotas = self.settling(receipts), request.quotas
        hold = self.new_hold(
            gate, decision, receipts, key, cost, tier, request.now, units=self.units, quotas=quotas
        )
        if self.units.has_places:
            hold.on_end = functools.partial(self._release_places, key)
        return hold

    def wait(
        self,
        key: Key | None = None,
        cost: Cost = 1,
        *,
        tier: str | None = None,
        quota: QuotaValue | None = None,
        timeout: float | None = None,
        priority: int = DEFAULT_PRIORITY,
    ) -> Decision:
        """Wait until the units are admitted and taken: first come, first served per key, in all processes on a shared store.

        With a `timeout` of `None` or infinity it waits without limit; with 0 or less it does not wait. For a `concurrent`
        rule it waits until a place is free, and does not keep the place; `hold` with a `timeout` does.

        While calls of several priorities (1 to 10) wait for a key, each priority is served in proportion to its number: with
        4 and 1, four of five admitted calls have priority 4.

        Raises:
            ConfigError: The time-out or the priority is not valid.
            RateLimited: The units would not be admitted within `timeout` seconds, or never. It is raised as soon as this is
                known, not after the time-out.
        """
        return self._wait(key, cost, tier, quota, timeout, priority)

    def _wait(
        self,
        key: Key | None,
        cost: Cost,
        tier: str | None,
        quota: QuotaValue | None,
        timeout: float | None,
        priority: int,
    ) -> Decision:
        check_priority(priority)
        if self.units.has_places:
            take = functools.partial(self._take, key, cost, tier, quota, None)
            hold: Hold = self._take_in_turn(take, key, cost, tier, quota, timeout, priority)
            hold.settle(hold.cost)
            return hold.decision
        hit = functools.partial(self._attempt, key, cost, tier, quota)
        decision: Decision = self._take_in_turn(hit, key, cost, tier, quota, timeout, priority)
        return decision

    def _take_in_turn(
        self,
        take: Callable[[bool], Any],
        key: Key | None,
        cost: Cost,
        tier: str | None,
        quota: QuotaValue | None,
        timeout: float | None,
        priority: int,
    ) -> Any:
        """Call `take` until it is admitted, behind earlier callers with the same key; return its decision or hold.

        Its argument is whether a refusal is final.
        """
        version, timeout = self.current, time_limit(timeout)
        deadline = None if timeout is None else self._clock.now_us() + to_microseconds(timeout)
        turn = WaitingTurn(version._queues, version.health, version._turn_of(key), priority, timeout)
        checks = deadline is not None
        try:
            while True:
                if turn.comes():
                    taken = take(False)
                    if taken:
                        return taken
                    refusal: Decision = getattr(taken, "decision", taken)
                    if self._is_too_late(refusal, deadline):
                        return self._take_finally(take, refusal)
                    self._sleep_until_admitted(turn, refusal, deadline)
                    continue
                is_over = turn.left <= 0
                if checks or is_over:
                    # A call is never admitted sooner in a queue than alone; if it would be too late alone, waiting is
                    # useless.
                    checks, alone = False, self.check(key, cost, tier=tier, quota=quota)
                    if alone and is_over:
                        raise RateLimited(alone.as_refused())
                    if not alone and (is_over or self._is_too_late(alone, deadline)):
                        return self._take_finally(take, alone)
                turn.sleep()
        finally:
            turn.event.is_over = True  # before the call, in which a signal handler could raise
            turn.leave()

    def _sleep_until_admitted(self, turn: WaitingTurn, refusal: Decision, deadline: int | None) -> None:
        """Sleep after a refusal, until time has passed or a place may have been released."""
        pause, rule = self._waits_for(refusal)
        if turn.moves_to(rule):
            return
        if rule is None:
            seconds, sleep = (pause or 0) / MICROSECONDS, turn.rest
        else:
            seconds, sleep = self._place_pause(refusal, deadline), turn.sleep
        if self._has_real_time:
            sleep(seconds)
        else:
            self._clock.sleep(seconds if rule is None else min(seconds, POLL_EVERY))

    def _take_finally(self, take: Callable[[bool], Any], refusal: Decision) -> Any:
        """Raise the final refusal; with a penalty, call `take` once more, so that the refusal counts."""
        if self.units.has_penalties:
            taken = take(True)
            if taken:
                return taken
            refusal = getattr(taken, "decision", taken)
        raise RateLimited(refusal)

    def reset(self, key: Key | None = None) -> None:
        """Delete the counts of a key in every rule; a rule with the scope `"*"` is reset for all callers."""
        self.gate.reset(key)

    def ping(self) -> None:
        """Check that the store can count for this limiter; for the start of a program.

        It connects, and checks rights, schema and everything else that counting needs. It changes no counts.

        Raises:
            StoreUnavailable: The store is down. `on_store_error` decides calls in this state.
            StoreMisconfigured: The store refuses; the message explains the correction.
        """
        if self._ping is not None:
            self._ping()

    @overload
    def guard(self, function: Callable[P, R], /) -> Callable[P, R]: ...

    @overload
    def guard(
        self,
        function: Key | None = None,
        /,
        cost: Cost | Callable[..., Cost] = 1,
        *,
        key: Key | Callable[..., Key] | None = None,
        tier: str | Callable[..., str | None] | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    def guard(
        self,
        function: Any = None,
        /,
        cost: Cost | Callable[..., Cost] = 1,
        *,
        key: Key | Callable[..., Key] | None = None,
        tier: str | Callable[..., str | None] | None = None,
    ) -> Any:
        """Call the decorated function only if the units are admitted.

        `@limiter.guard` counts all calls of the function together, under its name. `@limiter.guard("mail")` and
        `@limiter.guard(key=function)` count by a key. Key, cost and tier are values, or functions of the call's arguments.
        A refused call raises `RateLimited`. Places in a `concurrent` rule are held during the call.
        """
        if callable(function):
            check_undecorated(function)
            return self._guarded(function, key, cost, tier)
        own = key if function is None else function
        return functools.partial(self._guarded, key=own, cost=cost, tier=tier)

    def _guarded(self, function: Callable[..., Any], key: Any, cost: Any, tier: Any) -> Callable[..., Any]:
        check_plain_function(function)
        name = None if key is not None or scopes_of(self.rules) else qualified_name(function)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            own = key(*args, **kwargs) if callable(key) else name if key is None else key
            units = cost(*args, **kwargs) if callable(cost) else cost
            level = tier(*args, **kwargs) if callable(tier) else tier
            if not self.units.has_places:
                (self.hit(own, units, tier=level)).raise_if_denied()
                return function(*args, **kwargs)
            hold = self.hold(own, units, tier=level)
            hold.decision.raise_if_denied()
            try:
                return function(*args, **kwargs)
            finally:  # also after an exception: the cost counts, only places are freed
                hold.settle(hold.cost)

        return guarded

    def _in_memory(self, clock: Clock | None) -> Limiter:
        """Return a limiter with the same rules and no counts, in private memory, for tests."""
        strict = self._has_strict_tiers
        if self.quotas is None:
            return Limiter(*leased(self.rules, 0), clock=clock, strict_tiers=strict)
        quotas, seconds = self.quotas.function, self.quotas.seconds
        return Limiter(
            *leased(self.rules, 0), clock=clock, quotas=quotas, quotas_for=seconds, strict_tiers=strict
        )

    @property
    def current(self) -> Limiter:
        """The limiter that decides at present, whose rules and quotas never change."""
        return self

    def close(self) -> None:
        """Return the units of leases, and close the store that the limiter opened, unless other limiters share it.

        A given store stays open.
        """
        if self._leased is not None:
            self._leased.close()
        if self._handle is not None:
            self._handle.close()

    def __enter__(self) -> Limiter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
