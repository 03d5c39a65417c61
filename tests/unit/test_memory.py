"""The memory store: it is bounded, keeps live keys, and survives forks and clock changes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import tracemalloc
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import (
    AsyncLimiter,
    ConfigError,
    Limiter,
    MemoryStore,
    Rule,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.clock import SteadyClock
from headgate.decision import Decision
from headgate.errors import CostTooHigh, StoreUnavailable
from headgate.quota import MAX_PERIOD_US, MAX_UNITS, Quota
from headgate.rules import rules_from
from headgate.stores.base import Gate, Operation, Receipts
from headgate.stores.counters import MemoryGate
from headgate.stores.request import Request
from headgate.testing import FakeClock
from headgate.testing.contract.races import in_threads
from headgate.testing.reference import ReferenceStore
from tests.searching import EXAMPLES
from tests.unit.processes import (
    SECONDS_TO_LIVE,
    Interrupted,
    Interruptions,
    all_succeeded,
    forking,
    in_child,
    interrupt_until,
    run_and_exit,
    untraced,
)

pytestmark = forking

KINDS = (fixed_window, sliding_window, sliding_log, token_bucket)
every_kind = pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
Make = Callable[..., Rule]


def limited(
    rule: Rule | str, clock: FakeClock, max_keys: int, name: str = "x"
) -> tuple[Limiter, MemoryStore]:
    store = MemoryStore(max_keys=max_keys, clock=clock)
    return Limiter(rule, name=name, store=store), store


# --- Comparison with the pure functions ------------------------------------------------------------------------------

MOST = MAX_UNITS
EXTREMES = {
    "the largest windows": [
        fixed_window(f"{MOST}/366d"),
        sliding_window(f"{MOST}/ms"),
        sliding_log(f"{MOST}/366d"),
    ],
    "the fastest bucket": [token_bucket(Quota(MOST // 1_000 * 1_000, 1_000, MOST))],
    "the slowest bucket": [token_bucket(Quota(1, MAX_PERIOD_US, MOST // (MAX_PERIOD_US // 1_000)))],
    "an uneven bucket": [token_bucket(Quota(MOST // 3_600_000_000 * 7 + 1, 3_600_000_000, 2_501_999))],
    "tiers far apart": [
        token_bucket(
            Quota(1, 3_600_000_000, 1_000), tiers={"pro": Quota(2_501_999, 3_600_000_000, 2_501_999)}
        )
    ],
}


@pytest.mark.parametrize("shape", EXTREMES)
def test_largest_numbers_are_counted_like_in_the_pure_functions(shape: str, clock: FakeClock) -> None:
    """Products of these numbers exceed 2^63; the times are in the years 1970 to 2255."""
    rules = rules_from(EXTREMES[shape])
    pair: list[Gate] = [store(clock=clock).bind("x", rules) for store in (ReferenceStore, MemoryStore)]
    dice, now = random.Random(shape), 0
    limit = min(rule.quota.burst or rule.quota.limit for rule in rules)
    costs = [0, 1, 2, limit // 3, limit // 2, limit - 1, limit]
    steps = [0, 0, 1, 1_000, rules[0].quota.period_us // 7, rules[0].quota.period_us, 2**40, 2**51]
    open_holds: list[tuple[list[Receipts], int]] = []
    for turn in range(30 * EXAMPLES):
        now = (now + dice.choice(steps) - (turn % 29 == 0) * dice.choice(steps)) % 2**53
        cost, tier = dice.choice(costs), dice.choice([None, "pro"])
        operation: Operation = dice.choice(["hit", "hit", "peek", "hold", "hold", "record"])
        if open_holds and dice.random() < 0.4:
            receipts, held = open_holds.pop(dice.randrange(len(open_holds)))
            back = dice.choice([1, held // 2, held])
            for gate, own in zip(pair, receipts, strict=True):
                gate.refund(own, back, now)
        answers = [asked(gate, Request(operation, "ada", cost, tier, now)) for gate in pair]
        assert answers[0][0] == answers[1][0], f"turn {turn}: {operation} {cost} {tier} at {now}"
        taken = [receipts for _, receipts in answers if receipts is not None]
        if taken:
            open_holds = [*open_holds[-12:], (taken, cost)]


def asked(gate: Gate, request: Request) -> tuple[Decision | str, Receipts | None]:
    try:
        return gate.decide(request)
    except CostTooHigh as error:
        return str(error), None


def test_large_uptime_does_not_change_counting() -> None:
    up = 2**48 - 10  # microseconds: nine years
    limiter = Limiter(token_bucket("3/s"), clock=SteadyClock(lambda: up * 1000))
    for expected in (True, True, True, False, False):
        assert bool(limiter.hit("ada")) is expected
        up += 10
    up += 10_000_000
    assert limiter.hit("ada").remaining == 2
    assert limiter.check("ada", 0).remaining == 2


def test_key_of_a_str_subclass_equals_its_text(clock: FakeClock) -> None:
    class Name(str):
        __slots__ = ()

        def __hash__(self) -> int:
            raise AssertionError("no code of the caller's is called in the middle of a call")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("nor this")

    class Raw(bytes):
        __slots__ = ()
        __hash__ = None  # type: ignore[assignment]

    for key, plain in ((Name("ada"), "ada"), (Raw(b"ada"), b"ada")):
        limiter = Limiter("3/minute", clock=clock)
        limiter.hit(key)
        assert limiter.hit(plain).remaining == 1


# --- A full store ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [["3/minute"], ["3/minute", "9/hour"]], ids=["one rule", "two rules"])
def test_room_for_a_key_does_not_end_the_overflow(clock: FakeClock, rules: list[str]) -> None:
    """Otherwise a key that was counted there would get a second quota."""
    limiter = Limiter(*rules, name="x", store=MemoryStore(max_keys=len(rules), clock=clock))
    limiter.hit("ada")
    assert limiter.hit("bob", 3)
    limiter.reset("ada")
    assert not limiter.hit("bob")


@every_kind
def test_overflow_key_is_used_until_it_is_fresh(make: Make, clock: FakeClock) -> None:
    limiter, store = limited(make("3/minute"), clock, max_keys=2)
    limiter.hit("ada")
    limiter.hit("eve")
    clock.advance(50)
    assert limiter.hit("bob", 3)
    fresh_after = limiter.check("bob", 0).reset_after_us
    assert fresh_after is not None
    clock.advance_us(fresh_after - 1)
    assert limiter.check("ada", 0).remaining == 3, "the states of ada and eve are fresh, so there is room"
    refused = limiter.hit("bob", 3)
    assert (refused.allowed, refused.retry_after_us) == (False, 1)
    clock.advance_us(1)
    before = store.overflowed
    assert limiter.hit("bob", 3)
    assert store.overflowed == before


@pytest.mark.parametrize("make", [sliding_window, sliding_log], ids=lambda make: make.__name__)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from("abcde"), st.sampled_from((0, 0, 1, 7, 30, 61)), st.integers(1, 3)),
        max_size=50,
    ),
    max_keys=st.integers(1, 3),
)
def test_full_store_enforces_the_limit_of_each_key_and_of_all_keys_in_overflow(
    make: Make, calls: list[tuple[str, int, int]], max_keys: int
) -> None:
    clock = FakeClock()
    limiter, store = limited(make("3/minute"), clock, max_keys)
    admitted: dict[str, list[tuple[int, int]]] = {}
    for key, seconds, cost in calls:
        clock.advance(seconds)
        before = store.overflowed
        if limiter.hit(key, cost):
            for counted in (key, "overflow") if store.overflowed > before else (key,):
                admitted.setdefault(counted, []).append((clock.now_us(), cost))
        assert len(store) <= max_keys
    for entries in admitted.values():
        for start, _ in entries:
            assert sum(cost for at, cost in entries if start <= at < start + 60_000_000) <= 3


@every_kind
def test_hold_in_the_overflow_state_is_released_there(make: Make, clock: FakeClock) -> None:
    limiter, _ = limited(make("3/minute"), clock, max_keys=1)
    limiter.hit("old")
    hold = limiter.hold("new", 2)
    assert limiter.check("newer", 0).remaining == 1
    hold.release()
    assert limiter.check("newer", 0).remaining == 3
    assert limiter.check("old", 0).remaining == 2


def test_expired_keys_of_another_limiter_are_replaced_in_a_full_store(clock: FakeClock) -> None:
    store = MemoryStore(max_keys=10, clock=clock)
    first, second = (Limiter("5/second", name=name, store=store) for name in ("first", "second"))
    for number in range(10):
        first.hit(f"{number}")
    clock.advance(10)
    second.hit("ada")
    assert store.overflowed == 0
    assert len(store) == 1


def test_each_rule_of_a_limiter_overflows_separately(clock: FakeClock) -> None:
    store = MemoryStore(max_keys=2, clock=clock)
    limiter = Limiter("5/second", "5/hour", name="x", store=store)
    limiter.hit("ada")
    assert len(store) == 2
    limiter.hit("bob", 5)
    assert store.overflowed == 1
    decision = limiter.check("cyd", 1)
    assert [result.allowed for result in decision.results] == [False, False]
    clock.advance(2)
    assert [result.allowed for result in limiter.check("cyd", 1).results] == [True, False]


def test_shared_counter_stays_one_counter_in_overflow(clock: FakeClock) -> None:
    store = MemoryStore(max_keys=1, clock=clock)
    Limiter("5/hour", name="other", store=store).hit("ada")
    limiter = Limiter(sliding_window("3/minute", scope="*"), name="x", store=store)
    assert [bool(limiter.hit()) for _ in range(4)] == [True, True, True, False]


# --- Removal of keys -------------------------------------------------------------------------------------------------


@every_kind
def test_one_call_examines_only_a_few_old_keys(make: Make, clock: FakeClock) -> None:
    limiter, store = limited(make("2/second"), clock, max_keys=100_000)
    for number in range(2_000):
        limiter.hit(f"{number}")
    clock.advance(100)
    before = len(store)
    limiter.hit("one more")
    assert before - 16 < len(store) <= before


def test_released_and_reset_keys_make_room(clock: FakeClock) -> None:
    limiter, store = limited("2/hour", clock, max_keys=5)
    for number in range(100):
        limiter.hold(f"held {number}").release()
        limiter.hit(f"hit {number}")
        limiter.reset(f"hit {number}")
    assert store.overflowed == 0


@every_kind
def test_state_with_an_explicit_time_is_kept_one_more_hour_of_store_time(
    make: Make, clock: FakeClock
) -> None:
    limiter, _ = limited(make("2/minute"), clock, max_keys=100_000)
    assert limiter.hit("ada", 2, now=60.0)
    for passed, alive in ((3_600, True), (59, True), (30, False)):
        clock.advance(passed)
        for number in range(3):
            limiter.hit(f"{passed} {number}")
        assert limiter.check("ada", 1, now=60.0).allowed is not alive


@every_kind
def test_key_used_with_store_time_and_explicit_time_is_kept(make: Make, clock: FakeClock) -> None:
    """Mixing both on one key is not recommended, but a live key must not be removed."""
    limiter, _ = limited(make("2/minute"), clock, max_keys=100_000)
    limiter.hit("ada", 1, now=clock.now)
    clock.advance(3_659)
    assert limiter.hit("ada", 2)
    clock.advance(2)
    for number in range(5):
        limiter.hit(f"{number}")
    assert not limiter.hit("ada", 2)


@every_kind
def test_closed_memory_store_is_empty_and_usable(make: Make, clock: FakeClock) -> None:
    limiter, store = limited(make("2/minute"), clock, max_keys=1)
    limiter.hit("ada", 2)
    limiter.hit("bob", 2)
    store.close()
    assert len(store) == 0
    assert limiter.hit("bob", 2)
    assert limiter.hit("ada", 2), "the overflow key is fresh as well"


def test_guarantees_of_the_store() -> None:
    guarantees = MemoryStore().guarantees
    assert guarantees.exact
    assert guarantees.all_or_nothing
    assert not guarantees.durable
    assert not guarantees.shared
    assert "each process counts separately" in guarantees.may_lose


# --- Separate and shared states --------------------------------------------------------------------------------------


def test_sync_and_async_limiters_share_states(clock: FakeClock) -> None:
    store = MemoryStore(clock=clock)
    limiter, other = (
        Limiter("2/minute", name="x", store=store),
        AsyncLimiter("2/minute", name="x", store=store),
    )
    assert limiter.hit("ada")
    assert asyncio.run(other.hit("ada"))
    assert not limiter.hit("ada")


# --- Entries of a log, and invalid clocks ----------------------------------------------------------------------------


@pytest.mark.deep
def test_released_holds_do_not_grow_a_log(clock: FakeClock) -> None:
    """There is always a newer hold when one is released, so none of them is ever the last entry."""
    limiter = Limiter(sliding_log("10/hour"), clock=clock)
    hold = limiter.hold("ada")
    tracemalloc.start()
    try:
        for _ in range(20_000):
            clock.advance_us(1)
            newer = limiter.hold("ada")
            hold.release()
            hold = newer
        assert tracemalloc.get_traced_memory()[0] < 20_000
    finally:
        tracemalloc.stop()
    assert limiter.check("ada", 0).remaining == 9


class FixedTimeClock(SteadyClock):
    """A clock that returns a given value, valid or not."""

    def __init__(self, time: Any) -> None:
        super().__init__()
        self.time = time

    def now_us(self) -> Any:
        return self.time


@every_kind
@pytest.mark.parametrize("time", [-1, -(2**62), 2**53, 2**63 - 1, 2**63, 2**70, 1.5, 1.7e15, None, "noon"])
@pytest.mark.parametrize("store", [None, "given"])
def test_invalid_time_from_a_clock_is_an_error(make: Make, time: Any, store: str | None) -> None:
    """With such a time, numbers could exceed 2^63, and unrelated keys could collide."""
    on = {} if store is None else {"name": "x", "store": MemoryStore()}
    limiter = Limiter(make("2/s"), clock=FixedTimeClock(time), **on)  # type: ignore[arg-type]
    for call in (limiter.hit, limiter.check, limiter.hold, limiter.record):
        with pytest.raises(ConfigError, match="clock"):
            call("ada")


@every_kind
@pytest.mark.parametrize("time", [0, 2**53 - 1])
def test_smallest_and_largest_times_are_valid(make: Make, time: int) -> None:
    limiter = Limiter(make("2/s"), clock=FixedTimeClock(time))
    assert [limiter.hit(key).allowed for key in "aaabbb"] == [True, True, False] * 2


def test_gate_refuses_none_as_a_request() -> None:
    """Compiled code would use `None` as a request, and crash the interpreter."""
    gate = MemoryStore().bind("x", rules_from(["2/s"]))
    with pytest.raises((TypeError, AttributeError)):
        gate.decide(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function", [Limiter.hit, AsyncLimiter.check, Decision.raise_if_denied, MemoryGate.decide]
)
def test_method_called_without_an_instance_raises(function: Any) -> None:
    """`Limiter.hit("ada")`, without a limiter: compiled code would use the key as the limiter, and crash."""
    with pytest.raises((TypeError, AttributeError)):
        function("ada")


def test_limiter_can_be_created_while_a_full_store_searches_expired_keys(clock: FakeClock) -> None:
    """Here the clock creates them during the search; in plain Python, another thread may do so at any time."""

    class Making(FakeClock):
        made = 0

        def now_us(self) -> int:
            if store is not None:
                self.made += 1
                Limiter("5/hour", name=f"made {self.made}", store=store)
            return super().now_us()

    store: MemoryStore | None = None
    busy = Making()
    store = MemoryStore(max_keys=1, clock=busy)
    limiter = Limiter("5/hour", "9/day", name="x", store=store)
    assert all(limiter.hit(f"user {number}") for number in range(4))
    assert busy.made > 4


# --- Forks -----------------------------------------------------------------------------------------------------------


def test_fork_while_other_threads_call_leaves_no_lock_held(hasty_threads: None) -> None:
    limiter, stop = Limiter("1000000/minute"), threading.Event()

    def work() -> None:
        # Otherwise this thread takes the lock again before another thread or a fork gets it.
        while not stop.wait(0.000_1):
            for _ in range(20):
                limiter.hold("ada").release()
                limiter.hit("bob")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert all(in_child(lambda: bool(limiter.hit("ada") and limiter.hit("cyd"))) for _ in range(10))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_both_processes_work_after_a_fork_during_a_call() -> None:
    """Like in a signal handler: the thread that forks is inside a call, and continues it in both processes."""

    class ForkingClock(SteadyClock):
        child: int | None = None
        refused = False

        def now_us(self) -> int:
            if self.child == -1:
                self.child = os.fork()
                try:
                    limiter.hit("ada")
                except StoreUnavailable:  # in both processes, during the call
                    self.refused = True
            return super().now_us()

    clock = ForkingClock()
    limiter = Limiter("3/minute", "10/hour", clock=clock)
    limiter.hit("ada")
    clock.child = -1
    admitted = limiter.hit("ada").remaining
    if clock.child == 0:
        run_and_exit(
            lambda: (
                (clock.refused, admitted) == (True, 1)
                and limiter.hit("ada").remaining == 0
                and not limiter.hit("ada")
            )
        )
    assert clock.child is not None
    assert all_succeeded(clock.child)
    assert (clock.refused, admitted) == (True, 1)
    assert limiter.hit("ada").remaining == 0


def test_both_processes_work_after_a_fork_in_a_signal_handler() -> None:
    """The hooks take the lock that the interrupted call waits for; this call must get it in the child, too."""
    inside, may_go_on = threading.Event(), threading.Event()
    calling, children = list[int](), list[int]()

    class Slow(SteadyClock):
        def now_us(self) -> int:
            if threading.current_thread() is slow:
                inside.set()
                while (
                    not calling
                ):  # after the loop the main thread waits, otherwise this thread would not run
                    pass
                interrupt_until(may_go_on, calling[0])
            return super().now_us()

    def fork_now(*_: object) -> None:
        if may_go_on.is_set():
            return
        may_go_on.set()
        children.append(os.fork())
        if not children[0]:
            signal.alarm(SECONDS_TO_LIVE)

    limiter = Limiter("5/hour", "9/day", clock=Slow())
    slow = threading.Thread(target=limiter.hit, args=("ada",), daemon=True)
    usual = signal.signal(signal.SIGUSR1, fork_now)
    try:
        with untraced():
            slow.start()
            inside.wait(60)
            calling.append(threading.get_ident())
            remaining = limiter.hit("ada").remaining
    finally:
        signal.signal(signal.SIGUSR1, usual)
    if not children[0]:
        run_and_exit(lambda: remaining == 3 and limiter.hit("ada").remaining == 2)
    assert all_succeeded(children[0])
    assert remaining == 3
    assert limiter.hit("ada").remaining == 2


def test_child_process_uses_different_births() -> None:
    """A receipt of the parent must not match a new state of the child, nor the other way round."""
    store = MemoryStore()
    before = store._counters.births
    assert in_child(lambda: abs(store._counters.births - before) > 1_000)


# --- Reentrant calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rules",
    [
        (token_bucket("7/second burst 5"),),
        (sliding_window("7/second"), token_bucket("11/2s"), fixed_window("20/5s"), sliding_log("12/2s")),
    ],
    ids=["one rule", "four rules"],
)
@pytest.mark.parametrize("call", ["hit", "check", "hold", "record", "reset"])
def test_reentrant_call_is_refused_and_changes_nothing(rules: tuple[Rule, ...], call: str) -> None:
    """A signal handler, a `__del__` or a weak reference callback may run at any point of a call, in the same thread."""

    class Reentering(SteadyClock):
        armed = False

        def now_us(self) -> int:
            if self.armed:
                self.armed = False
                with pytest.raises(StoreUnavailable, match="already inside a call"):
                    getattr(limiter, call)("bob")
            return super().now_us()

    clock = Reentering()
    store = MemoryStore(clock=clock)
    limiter = Limiter(*rules, name="x", store=store)
    clock.armed = True
    assert limiter.hit("ada")
    assert not clock.armed
    assert len(store) == len(rules), "of the one inside nothing was counted"
    assert limiter.hit("bob")


# --- Threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [(), (sliding_window("1000/day"),)], ids=["one rule", "several rules"])
@every_kind
def test_no_other_call_runs_between_read_and_write(make: Make, others: tuple[Rule, ...]) -> None:
    """In the middle of one hit, another thread tries to hit as well, and must wait."""
    threads: list[threading.Thread] = []

    class InterleavingClock(SteadyClock):
        """A clock that starts another thread in the middle of a call.

        With an explicit time, a new key reads the clock to remove expired keys, before its state is written.
        """

        def now_us(self) -> int:
            if not threads:
                threads.append(threading.Thread(target=limiter.hit, args=("ada",), kwargs={"now": 1.0}))
                threads[0].start()
                threads[0].join(0.02)  # no effect if the lock is held
            return super().now_us()

    limiter = Limiter(make("100/hour"), *others, clock=InterleavingClock())
    assert limiter.hit("ada", now=1.0)
    for thread in threads:
        thread.join()
    assert threads
    assert limiter.check("ada", 0, now=1.0).remaining == 98


@pytest.mark.usefixtures("hasty_threads")
def test_threads_with_new_keys_share_exactly_the_overflow_quota(clock: FakeClock) -> None:
    store = MemoryStore(max_keys=1, clock=clock)
    limiter = Limiter("100/hour", name="x", store=store)
    limiter.hit("first")
    admitted = sum(in_threads(8, lambda thread: sum(bool(limiter.hit(f"{thread} {n}")) for n in range(30))))
    assert admitted == 100


# --- Interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hasty_threads")
def test_exception_from_a_signal_handler_with_busy_threads_leaves_no_lock_held(
    interruptions: Interruptions,
) -> None:
    """With a clock written in Python, threads switch in the middle of calls, and then wait for each other."""

    class Slow(SteadyClock):
        def now_us(self) -> int:
            return super().now_us()

    limiter, stop, admitted = Limiter("1000000000/hour", clock=Slow()), threading.Event(), [0] * 3

    def work(number: int) -> None:
        while not stop.is_set():
            admitted[number] += limiter.hit("ada").allowed

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in interruptions(lambda: limiter.hit("bob")):
            pass
    finally:
        stop.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert is_free(limiter.store._counters.lock)  # type: ignore[attr-defined]
    assert limiter.check("ada", 0).remaining == 1_000_000_000 - sum(admitted)


class InterruptedLock(type(threading.RLock())):  # type: ignore[misc]
    """A lock that is interrupted by a signal right after a call has taken it; the test itself takes it without blocking."""

    def acquire(self, blocking: bool = True) -> bool:
        taken: bool = super().acquire(blocking)
        if blocking:
            raise Interrupted
        return taken


@pytest.mark.parametrize("call", ["hit", "reset"])
def test_signal_right_after_lock_acquisition_leaves_no_lock_held(call: str) -> None:
    limiter = Limiter("2/hour")
    counters = limiter.store._counters  # type: ignore[attr-defined]
    usual, counters.lock = counters.lock, InterruptedLock()
    with pytest.raises(Interrupted):
        getattr(limiter, call)("ada")
    assert is_free(counters.lock)
    counters.lock = usual
    assert limiter.hit("ada").remaining == 1


def is_free(lock: Any) -> bool:
    """Return whether another thread could take the lock."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(60)
    return taken == [True]


def test_interrupted_call_never_frees_charged_units(interruptions: Interruptions) -> None:
    """Every few hits add a new bucket, so that this step is interrupted too."""
    limiter = Limiter(
        fixed_window("1000000000/day"),
        sliding_window("1000000000/day", buckets=100_000),
        sliding_log("1000000000/day"),
        token_bucket("1/day burst 100000000"),
    )
    admitted = 0

    def hit() -> None:
        nonlocal admitted
        admitted += limiter.hit("ada").allowed

    for _ in interruptions(hit):
        results = limiter.check("ada", 0).results
        assert all(result.limit - result.remaining >= admitted for result in results)
    assert admitted


def test_interrupted_renew_keeps_the_place_and_its_receipt(interruptions: Interruptions) -> None:
    limiter = Limiter(concurrent(9, lease="1h"), sliding_log("9/hour"))
    holds = [limiter.hold("ada") for _ in range(3)]
    for _ in interruptions(lambda: [hold.renew() for hold in holds]):
        assert [result.remaining for result in limiter.check("ada", 0).results] == [6, 6]
    for hold in holds:
        hold.release()
    assert [result.remaining for result in limiter.check("ada", 0).results] == [9, 9]


def test_buckets_expire_when_a_reset_window_repeats_the_same_times() -> None:
    limiter = Limiter("10/minute")
    for now in (1000, 1050, 1075):  # at the last time, the first bucket has expired
        limiter.hit("ada", now=now)
    limiter.reset("ada")
    for now in (1000, 1050):
        limiter.hit("ada", now=now)
    assert limiter.check("ada", 0, now=1075).remaining == 9


def test_interrupted_call_keeps_the_key_count_correct(interruptions: Interruptions) -> None:
    """Keys are added and expire all the time; after any interruption, the store still knows their number."""
    now = 0
    store = MemoryStore(max_keys=100, clock=SteadyClock(lambda: now))
    limiter = Limiter("5/ms", name="x", store=store)
    numbers = count()

    def hit() -> None:
        nonlocal now
        now += 100_000
        limiter.hit(f"user {next(numbers)}")

    for _ in interruptions(hit):
        assert len(store) <= 100
    now += 1_000_000_000
    for number in range(100):  # each hit removes two expired keys
        limiter.hit(f"later {number}")
    assert len(store) == 100
    assert limiter.check("one more", 0).remaining != 0
