"""The limiter: what users call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Generator, Iterable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from headgate._async.hold import AsyncHold
from headgate._async.observed import observed
from headgate._async.resilience import bind
from headgate._async.turns import AsyncTurns
from headgate._concurrency import AsyncEvent
from headgate.clock import Clock, SteadyClock, WallClock, instant, time_limit, to_microseconds
from headgate.decision import UNLIMITED, Decision
from headgate.errors import ConfigError, RateLimited
from headgate.hooks import Hook, Hooks
from headgate.keys import Key, key_picker
from headgate.rules import Rule, rules_from
from headgate.stores import MemoryStore, open_async_store
from headgate.stores.base import AsyncGate, AsyncStore, Receipts
from headgate.stores.outage import Health, OnStoreError

P = ParamSpec("P")
R = TypeVar("R")


class AsyncLimiter:
    """A named set of rules over a store. Every call is decided by all rules together: all are charged, or none.

    Args:
        rules: Rules, or text like `"5/minute"` or `"5/minute; 50/hour"`. Without any, everything is admitted.
        name: Part of the identity of what is counted; needed when the store is not the limiter's own.
        store: A store or its URL (`sqlite:///path`, …); by default memory of this limiter's own.
        clock: Where time comes from, instead of the store's own clock.
        on_store_error: What to answer when the store cannot be asked: `"open"` admits, `"closed"` refuses,
            `local(share=0.25)` limits in memory, `"raise"` raises `StoreError`. By default a store over a network is
            `"open"`, and the errors of any other are raised.
        deadline: Seconds after which a call to a store over a network is given up; by default what the store says.
        hooks: Who is told what the limiter decides; see `headgate.hooks`.

    Keys are text or bytes, or a mapping with an entry per scope. Every method takes `now=`, a time in seconds since the
    epoch to decide at; do not mix it with the store's own time on one key.
    """

    def __init__(
        self,
        *rules: str | Rule,
        name: str | None = None,
        store: AsyncStore | str | None = None,
        clock: Clock | None = None,
        on_store_error: OnStoreError | None = None,
        deadline: float | None = None,
        hooks: Iterable[Hook] = (),
    ) -> None:
        self.rules = rules_from(rules)
        if store is not None and not name:
            raise ConfigError(
                "a limiter on a given store needs a name=, to tell its counts from those of others"
            )
        self.name = name or ""
        self._owns_store = store is None or isinstance(store, str)
        self.store: AsyncStore
        if store is None:
            self.store = MemoryStore(clock=clock)
        elif isinstance(store, str):
            self.store = open_async_store(store)
        elif hasattr(store, "bind_async"):
            self.store = store
        else:
            raise ConfigError(f"{store!r} is not a store that {type(self).__name__} can use")
        gate, self.health = (
            bind(self.store, self.name, self.rules, on_store_error, deadline)
            if self.rules or getattr(self.store, "has_rules", False)
            else (_unlimited(), Health())
        )
        # A memory of our own has the clock already; to any other store its time goes with every call.
        timed = gate if store is None or clock is None else _timed(gate, clock)
        self._gate, self._new_hold = self._around(timed, hooks)
        self._hit = self._gate.hit
        if gate.public_hit is not None and self._gate is gate and type(self).hit is AsyncLimiter.hit:
            self.hit = gate.public_hit  # type: ignore[method-assign]  # the method below would only pass it on
        self._clock: Clock = clock or _pace_of(self.store)
        self._turns = AsyncTurns()
        self._turn_of = key_picker(self.rules)

    def _around(self, gate: AsyncGate, hooks: Iterable[Hook]) -> tuple[AsyncGate, Callable[..., AsyncHold]]:
        """Return the gate with what calls have to pass around it, and what makes its holds."""
        if not hooks:
            return gate, AsyncHold
        told = Hooks(hooks)
        told.attached(self)
        return observed(gate, self.name, told)

    async def hit(
        self, key: Key | None = None, cost: int = 1, *, tier: str | None = None, now: float | None = None
    ) -> Decision:
        """Ask for units, and take them if all rules admit.

        A refusal takes nothing. A cost of 0 is admitted and writes nothing.

        Raises:
            CostTooHigh: The cost is above what a rule could ever admit at once.
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
        """
        return await self._hit(key, cost, tier, now if now is None else instant(now))

    async def check(
        self, key: Key | None = None, cost: int = 1, *, tier: str | None = None, now: float | None = None
    ) -> Decision:
        """Return what `hit` would answer, and take nothing."""
        return await self._gate.peek(key, cost, tier, instant(now))

    async def record(
        self, key: Key | None = None, cost: int = 1, *, tier: str | None = None, now: float | None = None
    ) -> None:
        """Count units that have been used already, even beyond the limit."""
        await self._gate.record(key, cost, tier, instant(now))

    # begin async only
    def hold(
        self, key: Key | None = None, cost: int = 1, *, tier: str | None = None, now: float | None = None
    ) -> PendingHold:
        """Take units that are not final yet: `async with limiter.hold(key) as hold`, or `hold = await …`.

        Settle the hold at its true cost, or release it. If the holder crashes, its units count until they expire.
        """
        return PendingHold(self._take(key, cost, tier, now))

    # end async only
    # begin sync only
    # def hold(
    #     self, key: Key | None = None, cost: int = 1, *, tier: str | None = None, now: float | None = None
    # ) -> Hold:
    #     """Take units that are not final yet: `with limiter.hold(key) as hold`, or `hold = …`.
    #
    #     Settle the hold at its true cost, or release it. If the holder crashes, its units count until they expire.
    #     """
    #     return self._take(key, cost, tier, now)
    #
    # end sync only
    async def _take(self, key: Key | None, cost: int, tier: str | None, now: float | None) -> AsyncHold:
        at = instant(now)
        decision, receipts = await self._gate.hold(key, cost, tier, at)
        return self._new_hold(self._gate, decision, receipts, key, cost, tier, at)

    async def wait(
        self,
        key: Key | None = None,
        cost: int = 1,
        *,
        tier: str | None = None,
        timeout: float | None = None,
    ) -> Decision:
        """Wait until the units are admitted and taken; first come, first served per key within this process.

        `None` and infinity for `timeout` wait for as long as it takes; 0 and less do not wait.

        Raises:
            ConfigError: The time-out is not a number.
            RateLimited: They would not be admitted within `timeout` seconds, or never. This is raised as soon as it is
                known, not when the time is up.
        """
        turn = self._turn_of(key)
        timeout = time_limit(timeout)
        deadline = None if timeout is None else self._clock.now_us() + to_microseconds(timeout)
        if deadline is not None and self._turns.taken(turn):
            # Behind others nobody is admitted sooner than alone: if that is too late, queueing is in vain.
            alone = await self.check(key, cost, tier=tier)
            if not alone and self._is_in_vain(alone, deadline):
                raise RateLimited(alone)
        ticket = AsyncEvent()
        try:
            if not await self._turns.take(turn, ticket, timeout):
                raise RateLimited((await self.check(key, cost, tier=tier)).as_refused())
            while not (decision := await self.hit(key, cost, tier=tier)):
                if self._is_in_vain(decision, deadline):
                    raise RateLimited(decision)
                await self._clock.asleep(decision.retry_after or 0)
        finally:
            ticket.is_over = True  # ahead of the call, at which a signal handler could raise
            self._turns.leave(turn, ticket)
        return decision

    def _is_in_vain(self, refusal: Decision, deadline: int | None) -> bool:
        """Return whether waiting would end too late, or never."""
        pause = refusal.retry_after_us
        return pause is None or (deadline is not None and self._clock.now_us() + pause > deadline)

    async def reset(self, key: Key | None = None) -> None:
        """Forget what was counted for a key, in every rule; of a rule with the scope `"*"`, for everybody."""
        await self._gate.reset(key)

    def guard(
        self,
        key: Key | Callable[..., Key] | None = None,
        cost: int | Callable[..., int] = 1,
        *,
        tier: str | Callable[..., str | None] | None = None,
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """Return a decorator: the coroutine function is called only if the units are admitted.

        Key, cost and tier are values, or functions of the call's arguments. A refused call raises `RateLimited`.
        """

        def decorate(
            function: Callable[P, Coroutine[Any, Any, R]],
        ) -> Callable[P, Coroutine[Any, Any, R]]:
            # begin async only
            if not inspect.iscoroutinefunction(function):
                raise ConfigError(f"{function!r} is not a coroutine function; use Limiter.guard for it")
            # end async only
            # begin sync only
            # if inspect.iscoroutinefunction(function):
            #     raise ConfigError(f"{function!r} is a coroutine function; use AsyncLimiter.guard for it")
            # if not callable(function):
            #     raise ConfigError(f"{function!r} is not a function; write @limiter.guard(...) with its brackets")
            # end sync only

            @functools.wraps(function)
            async def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
                decision = await self.hit(
                    key(*args, **kwargs) if callable(key) else key,
                    cost(*args, **kwargs) if callable(cost) else cost,
                    tier=tier(*args, **kwargs) if callable(tier) else tier,
                )
                decision.raise_if_denied()
                return await function(*args, **kwargs)

            return guarded

        return decorate

    # A limiter of a policy file changes with the file. Who prepares what depends on the rules, as the HTTP edges do,
    # prepares it for `_as_of_now` and is told when that is another one; any other limiter stays what it is.

    _headers: str | None = None
    """Which header fields a policy asks for."""

    def _as_of_now(self) -> AsyncLimiter:
        """Return the limiter that decides at present, whose rules and quotas never change."""
        return self

    def _on_change(self, tell: Callable[[], None]) -> None:
        """Have a method called whenever `_as_of_now` has become another one, for as long as its object lives."""

    def _decided_as(self) -> Callable[[Key | None, str | None], str | None] | None:
        """Return what says under which tier a call is decided, from its key and tier; `None` if under the one it names."""
        return None

    async def aclose(self) -> None:
        """Close the store, if it is the limiter's own."""
        if self._owns_store:
            await self.store.aclose()

    async def __aenter__(self) -> AsyncLimiter:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        rules = ", ".join(str(rule) for rule in self.rules) or "unlimited"
        return f"<{type(self).__name__} {self.name or 'unnamed'}: {rules}>"


# begin async only
class PendingHold:
    """A hold that is taken when it is awaited or entered."""

    def __init__(self, taking: Coroutine[Any, Any, AsyncHold]) -> None:
        self._taking = taking
        self._hold: AsyncHold | None = None

    def __await__(self) -> Generator[Any, None, AsyncHold]:
        return self._taking.__await__()

    async def __aenter__(self) -> AsyncHold:
        self._hold = await self._taking
        return await self._hold.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._hold is not None
        await self._hold.__aexit__(exc_type, exc, tb)


# end async only
def _unlimited() -> AsyncGate:
    """Return the gate of a limiter without rules."""

    async def decide(key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        return UNLIMITED

    async def hold(
        key: Key | None, cost: int, tier: str | None, now: int | None
    ) -> tuple[Decision, Receipts | None]:
        return UNLIMITED, None

    async def record(key: Key | None, cost: int, tier: str | None, now: int | None) -> None:
        return None

    async def refund(receipts: Receipts, cost: int, now: int | None) -> None:
        return None

    async def reset(key: Key | None) -> None:
        return None

    return AsyncGate(decide, decide, hold, record, refund, reset)


def _pace_of(store: AsyncStore) -> Clock:
    """Return the clock to wait by: that of the store, so that a test's is not waited for in vain.

    A wall clock is none to wait by: a time-out must not end early or late because somebody set it.
    """
    clock: Clock | None = getattr(store, "clock", None)
    return SteadyClock() if clock is None or isinstance(clock, WallClock) else clock


def _timed(gate: AsyncGate, clock: Clock) -> AsyncGate:
    """Return the gate with this clock's time where the caller gives none."""

    async def hit(key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        return await gate.hit(key, cost, tier, clock.now_us() if now is None else now)

    async def peek(key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        return await gate.peek(key, cost, tier, clock.now_us() if now is None else now)

    async def hold(
        key: Key | None, cost: int, tier: str | None, now: int | None
    ) -> tuple[Decision, Receipts | None]:
        return await gate.hold(key, cost, tier, clock.now_us() if now is None else now)

    async def record(key: Key | None, cost: int, tier: str | None, now: int | None) -> None:
        await gate.record(key, cost, tier, clock.now_us() if now is None else now)

    async def refund(receipts: Receipts, cost: int, now: int | None) -> None:
        await gate.refund(receipts, cost, clock.now_us() if now is None else now)

    return AsyncGate(hit, peek, hold, record, refund, gate.reset)
