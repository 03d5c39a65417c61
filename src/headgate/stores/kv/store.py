"""Rate limiting over a key-value store.

A key-value store offers get and put, but no atomic update. The consequences:

- Within an event loop, calls for one key run one after the other, so each sees the previous write.
- Between loops and processes, `swap` fails if another process has changed the value; the call is then decided again. A store
  with `swap` is exact. Without it, processes that read the same value overwrite each other's counts: each process keeps the
  limit, but all processes together may exceed it if their calls overlap.
- Two values cannot be written atomically, so a limiter on this store has exactly one rule.
- Records and refunds are written even if the caller is cancelled, and a hold is given back if its caller is cancelled. Both
  run in the background, so a key-value store should have a timeout.

A refusal writes nothing; an admission is one get and one put (or swap), and one more of each for every conflict with another
process.

Storage format: a fixed window has an entry per window, `<stem>:<index of the window>`, whose value is the count in decimal,
readable for people and other programs. This limits two promises: a refund after a reset reduces the count since the reset;
and if the clock goes back to an earlier window, the count of that window is used. Every other rule has one entry, `<stem>`,
with its kind, period and name, and all numbers of its state. A value that is invalid or belongs to another rule is ignored.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TypeVar
from urllib.parse import quote, quote_from_bytes

from headgate._checks import Unpicklable, check_kind
from headgate._concurrency import complete
from headgate.algorithms import Algorithm, State, algorithm_for, is_state
from headgate.clock import MICROSECONDS, Clock, WallClock, check_clock
from headgate.costs import Costs
from headgate.decision import Decision, Verdict
from headgate.errors import ConfigError, StoreConflict, StoreUnavailable
from headgate.keys import Key, PlainKey, key_picker, storage_key
from headgate.rules import RATES, Rule
from headgate.stores.base import RECORDED, Answer, AsyncGate, Births, Guarantees, Receipts, plain_tiers
from headgate.stores.kv.base import KV, SwappingKV
from headgate.stores.kv.turns import KeyTurns
from headgate.stores.request import Request

T = TypeVar("T")

Stem = Callable[[str, Rule, PlainKey], str]
"""Returns the start of an entry's name, given the limiter's name, its rule and the key."""

SHORTEST_TTL = 60
"""Seconds. Cloudflare's KV refuses less. Expired states are never used, so a longer life does not matter."""

_ATTEMPTS = 50
_LONGEST_STEM = 450  # keys in Cloudflare's KV have at most 512 bytes


def default_stem(limiter: str, rule: Rule, key: PlainKey) -> str:
    """Return `headgate:<limiter>:<rule>:<key>`, escaped so that it is unique, or its digest if that is long."""
    parts = ("headgate", quote(limiter), quote(rule.identity), quote_from_bytes(storage_key(b"", key)))
    stem = ":".join(parts)
    return (
        stem
        if len(stem) <= _LONGEST_STEM
        else f"headgate:{blake2b(stem.encode(), digest_size=32).hexdigest()}"
    )


class KVStore(Unpicklable):
    """A store for `AsyncLimiter`s of one rule each, over any key-value store.

    Args:
        kv: The key-value store. The store does not close it.
        stem: A function for the names of entries; names must differ for everything that is counted separately.
        clock: The clock; by default the wall clock, which other processes share. Set it here rather than in the limiter,
            so that a reset uses the same window as other calls.
    """

    remote = False
    has_rules = False
    notes = None
    # Writes may cost money, and the names of entries may follow a scheme of the application.
    pings_by_looking = True

    def __init__(self, kv: KV, *, stem: Stem = default_stem, clock: Clock | None = None) -> None:
        self.kv = check_kind("kv", kv, KV, "a key-value store, like MemoryKV() or open_kv(url)")
        self.stem = stem
        self.clock: Clock = check_clock(clock) or WallClock()
        self.turns = KeyTurns()

    def __repr__(self) -> str:
        return f"KVStore({self.kv!r})"

    @property
    def guarantees(self) -> Guarantees:
        """The guarantees of the key-value store, by default shared and not exact; never for several rules together."""
        own: Guarantees = getattr(self.kv, "guarantees", Guarantees(exact=False, shared=True))
        return replace(own, all_or_nothing=False)

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        if len(rules) != 1:
            raise ConfigError(
                f"a key-value store cannot charge {len(rules)} rules together; give the limiter one rule, or use a "
                f"store such as 'sqlite:///limits.db'"
            )
        return _KVGate(self, limiter, rules[0])

    async def aclose(self) -> None:
        """Do nothing: the key-value store is closed by the code that opened it."""


class _KVGate:
    """A limiter's one rule over the entries of a key-value store."""

    def __init__(self, store: KVStore, limiter: str, rule: Rule) -> None:
        self._store = store
        self._kv = store.kv
        self._swapping = store.kv if isinstance(store.kv, SwappingKV) else None
        self._limiter = limiter
        self._rule = rule
        if rule.kind not in RATES:
            raise ConfigError(f"rule {rule.name!r}: a key-value store does not support {rule.kind} rules")
        self._tiers = plain_tiers((rule,))
        self._key = key_picker((rule,))
        self._format = _Counts(rule) if rule.kind == "fixed_window" else _Numbers(rule)

    async def decide(self, request: Request) -> Answer:
        if request.replaces is not None:
            raise ConfigError(
                "a key-value store cannot move a hold in one step, so hold.confirm() is not possible"
            )
        (algorithm,) = self._tiers.for_request(request)
        request = request.with_costs(request.costs(1)[0])
        stem = self._stem(request.key)
        if request.operation == "record":
            if request.cost:
                await complete(self._record(algorithm, stem, request))
            return RECORDED
        if request.operation == "peek" or not request.cost:
            return await self._peek(algorithm, stem, request)
        charge = self._charge(algorithm, stem, request)
        return await (complete(charge, partial(self._release, request)) if request.is_given_up else charge)

    async def _peek(self, algorithm: Algorithm, stem: str, request: Request) -> Answer:
        at = self._time(request.now)
        text = await self._kv.get(self._format.entry(stem, at))
        _, verdict = algorithm.decide(self._format.read(text, at), at, request.cost, 0)
        return self._decision(verdict), None

    async def _charge(self, algorithm: Algorithm, stem: str, request: Request) -> Answer:
        cost = request.cost
        async with self._turn(stem):
            at = self._time(request.now)
            entry, birth = self._format.entry(stem, at), self._format.new_birth()

            def decide(before: State | None) -> tuple[State | None, tuple[Verdict, State | None]]:
                after, verdict = algorithm.decide(before, at, cost, birth)
                return after, (verdict, before)

            after, (verdict, before) = await self._change(algorithm, entry, at, decide)
        if not verdict.allowed or after is None or request.operation != "hold":
            return self._decision(verdict), None
        return self._decision(verdict), (((stem, entry, at), algorithm.receipt(before, after, cost)),)

    async def _record(self, algorithm: Algorithm, stem: str, request: Request) -> None:
        async with self._turn(stem):
            at = self._time(request.now)
            entry, birth = self._format.entry(stem, at), self._format.new_birth()

            def record(before: State | None) -> tuple[State | None, None]:
                return algorithm.record(before, at, request.cost, birth), None

            await self._change(algorithm, entry, at, record)

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        await complete(self._refund(receipts, cost, now))

    async def _release(self, request: Request, answer: Answer) -> None:
        """Give back the units of a hold whose caller was cancelled."""
        if answer[1] is not None:
            await self._refund(answer[1], request.cost, request.now)

    async def _refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        (algorithm,) = self._tiers.own
        [(where, receipt)] = receipts
        assert isinstance(where, tuple)
        stem, entry, charged_at = where
        (units,) = cost if isinstance(cost, tuple) else (cost,)
        async with self._turn(stem):
            at = self._time(now)

            def refund(before: State | None) -> tuple[State | None, None]:
                if before is None or algorithm.fresh_at(before) <= at:
                    return before, None  # its units have expired
                return algorithm.refund(before, receipt, units, at), None

            await self._change(algorithm, entry, charged_at, refund)

    async def reset(self, key: Key | None) -> None:
        await complete(self._reset(self._stem(key)))

    async def _reset(self, stem: str) -> None:
        async with self._turn(stem):
            entry = self._format.entry(stem, self._store.clock.now_us())
            await self._kv.put(entry, self._format.write(None), SHORTEST_TTL)

    @asynccontextmanager
    async def _turn(self, stem: str) -> AsyncIterator[None]:
        """Wait for the turn on an entry; fail at once if the store failed for an earlier call in the queue."""
        async with self._store.turns.take(stem) as turn:
            if turn.is_hopeless:
                raise StoreUnavailable(f"{stem!r}: the store failed for an earlier call")
            try:
                yield
            except StoreUnavailable:
                turn.fail()
                raise

    async def _change(
        self,
        algorithm: Algorithm,
        entry: str,
        at: int,
        change: Callable[[State | None], tuple[State | None, T]],
    ) -> tuple[State | None, T]:
        """Read, change and write an entry; an unchanged state is not written."""
        for _ in range(_ATTEMPTS):
            text = await self._kv.get(entry)
            before = self._format.read(text, at)
            after, result = change(before)
            if after is before or await self._write(entry, text, after, self._ttl(algorithm, after, at)):
                return after, result
        raise StoreConflict(f"{entry!r} was changed by other processes {_ATTEMPTS} times during this call")

    async def _write(self, entry: str, seen: str | None, state: State | None, ttl: int) -> bool:
        value = self._format.write(state)
        if self._swapping is not None:
            return await self._swapping.swap(entry, seen, value, ttl)
        await self._kv.put(entry, value, ttl)
        return True

    def _ttl(self, algorithm: Algorithm, state: State | None, at: int) -> int:
        """Return the time to live in seconds: a whole period, or until the state equals a fresh one if that is later."""
        life_us = self._rule.quota.period_us
        if state is not None:
            life_us = max(life_us, algorithm.fresh_at(state) - at)
        return max(SHORTEST_TTL, -(life_us // -MICROSECONDS))

    def _time(self, now: int | None) -> int:
        return self._store.clock.now_us() if now is None else now

    def _stem(self, key: Key | None) -> str:
        (plain,) = self._key(key)
        return self._store.stem(self._limiter, self._rule, plain)

    def _decision(self, verdict: Verdict) -> Decision:
        return Decision.make((self._rule.name,), [verdict])


class _Counts:
    """Fixed windows: an entry per window, with the count in decimal. The birth is always 0, and not stored."""

    _COUNT = re.compile(r"[0-9]{1,16}", re.ASCII)

    def __init__(self, rule: Rule) -> None:
        self._period_us = rule.quota.period_us

    def entry(self, stem: str, now: int) -> str:
        """Return the name of the entry for this time."""
        return f"{stem}:{now // self._period_us}"

    def read(self, text: str | None, now: int) -> State | None:
        """Return the state of an entry, or `None` if the value is missing or invalid."""
        if text is None or not self._COUNT.fullmatch(text) or int(text) == 0:
            return None
        return 0, now // self._period_us, int(text)

    def write(self, state: State | None) -> str:
        return "0" if state is None else str(state[2])

    def new_birth(self) -> int:
        return 0


class _Numbers:
    """Other rules: one entry, with the rule and all numbers of the state.

    The rule is stored, because a custom `stem` may be the same for two rules, and the numbers of one rule could block a key
    of the other for centuries.
    """

    _NUMBERS = re.compile(r"-?[0-9]{1,19}(?: -?[0-9]{1,19})*", re.ASCII)

    def __init__(self, rule: Rule) -> None:
        self.new_birth = Births()
        self._rule = f"v1:{quote(rule.identity)}"
        self._algorithm = algorithm_for(rule)

    def entry(self, stem: str, now: int) -> str:
        return stem

    def read(self, text: str | None, now: int) -> State | None:
        rule, _, numbers = (text or "").partition(" ")
        if rule != self._rule or not self._NUMBERS.fullmatch(numbers):
            return None
        state = tuple(map(int, numbers.split()))
        return state if is_state(self._algorithm, state) else None

    def write(self, state: State | None) -> str:
        return " ".join((self._rule, *map(str, state or ())))  # without numbers it is a fresh state
