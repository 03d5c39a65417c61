"""The memory store: bounded, never forgetting a live key, whatever forks and whatever the time is called."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    Limiter,
    MemoryStore,
    Rule,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.clock import SteadyClock
from headgate.stores import memory
from headgate.stores.memory import OVERFLOW
from headgate.testing import FakeClock
from tests.unit.clocks import steady
from tests.unit.processes import Interrupted, Interruptions, forking, in_child

pytestmark = forking

KINDS = (fixed_window, sliding_window, sliding_log, token_bucket)
every_kind = pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
Make = Callable[..., Rule]


def limited(
    rule: Rule | str, clock: FakeClock, max_keys: int, name: str = "x"
) -> tuple[Limiter, MemoryStore]:
    store = MemoryStore(max_keys=max_keys, clock=clock)
    return Limiter(rule, name=name, store=store), store


# --- The quick way and the general way -------------------------------------------------------------------------------

QUICK = {
    "fixed": fixed_window("7/second", tiers={"pro": "9/second"}),
    "strict": sliding_window("7/second", buckets=10, tiers={"pro": "9/second"}),
    "uneven": sliding_window("7/second", tiers={"pro": "9/second"}),
    "lenient": sliding_window("7/second", buckets=10, strict=False, tiers={"pro": "9/second"}),
    "bucket": token_bucket("7/second burst 5", tiers={"pro": "9/second burst 7"}),
    "slow bucket": token_bucket("7/7h burst 5", tiers={"pro": "9/7h burst 7"}),
}


@pytest.mark.parametrize("may_go_back", [True, False])
@pytest.mark.parametrize("rule", QUICK.values(), ids=QUICK)
def test_the_quick_way_answers_like_the_general_one(rule: Rule, clock: FakeClock, may_go_back: bool) -> None:
    """A time given with the call takes the general way; the store's own clock, which shows the same, the quick one."""
    quick = Limiter(rule, clock=clock if may_go_back else steady(clock))
    general = Limiter(rule, clock=clock)
    dice = random.Random(1)
    period_us = rule.quota.period_us
    steps = [
        0,
        0,
        0,
        1,
        999,
        1000,
        period_us // 60,
        period_us // 10,
        period_us // 7,
        period_us // 3,
        period_us,
    ]
    refused = 0
    for turn in range(3_000):
        clock.advance_us(max(-may_go_back, dice.choice(steps) + dice.choice([-1, 0, 0, 1])))
        key, cost = dice.choice(["ada", "bob"]), dice.choice([1, 1, 1, 2, 3, 5])
        if turn % 29 == 0 and may_go_back:
            clock.advance_us(-dice.choice(steps))
        if turn % 31 == 0:
            holds = quick.hold(key, cost), general.hold(key, cost, now=clock.now)
            for hold in holds:
                hold.settle(turn % 2, now=None if hold is holds[0] else clock.now)
        if turn % 37 == 0:
            quick.record(key, 9)
            general.record(key, 9, now=clock.now)
        tier = "pro" if turn % 23 == 0 else None
        answer = quick.hit(key, cost, tier=tier)
        assert answer == general.hit(key, cost, tier=tier, now=clock.now)
        refused += not answer
    assert 300 < refused < 2_700, "the script must try both"


def test_a_machine_that_has_been_up_for_years_counts_like_any_other() -> None:
    up = 2**48 - 10  # microseconds: nine years
    limiter = Limiter(token_bucket("3/s"), clock=SteadyClock(lambda: up * 1000))
    for expected in (True, True, True, False, False):
        assert bool(limiter.hit("ada")) is expected
        up += 10
    up += 10_000_000
    assert limiter.hit("ada").remaining == 2
    assert limiter.check("ada", 0).remaining == 2


def test_of_several_buckets_the_oldest_is_gone_to_the_microsecond(clock: FakeClock) -> None:
    limiter = Limiter(sliding_window("7/second", buckets=10), clock=clock)
    for _ in range(3):
        last = limiter.hit("ada")
        clock.advance_us(100_000)
    assert last.reset_after_us is not None
    oldest_expires_in = last.reset_after_us - 3 * 100_000
    clock.advance_us(oldest_expires_in - 1)
    assert limiter.hit("ada").remaining == 3
    clock.advance_us(1)
    assert limiter.hit("ada").remaining == 3


@every_kind
@pytest.mark.parametrize("key", [["ada"], None, 5, {"user": "ada"}])
def test_the_quick_way_leaves_it_to_the_general_one_what_is_wrong_with_a_key(make: Make, key: Any) -> None:
    store = MemoryStore()
    limiter = Limiter(make("5/minute"), name="x", store=store)
    with pytest.raises(ConfigError, match=r"a key is|the key is"):
        limiter.hit(key)
    assert len(store) == 0
    assert limiter.hit("ada")


@pytest.mark.parametrize("rule", QUICK.values(), ids=QUICK)
def test_a_changed_limit_takes_the_quick_way_no_further_than_it_goes(rule: Rule, clock: FakeClock) -> None:
    """Of two limiters that share their states, the second finds what the first one has packed in its own way."""
    both, dice = [], random.Random(2)
    for each_clock in (steady(clock), clock):
        store = MemoryStore(clock=each_clock)
        raised = dataclasses.replace(rule, quota=dataclasses.replace(rule.quota, limit=rule.quota.limit + 4))
        both.append([Limiter(each, name="x", store=store) for each in (rule, raised)])
    for _ in range(1_000):
        clock.advance_us(dice.choice([0, 0, 1, rule.quota.period_us // 9]))
        which, cost = dice.randrange(2), dice.choice([1, 1, 2, 5])
        assert both[0][which].hit("ada", cost) == both[1][which].hit("ada", cost, now=clock.now)


# --- A full store ----------------------------------------------------------------------------------------------------


@every_kind
def test_a_full_store_never_evicts_a_live_key(make: Make, clock: FakeClock) -> None:
    limiter, store = limited(make("2/minute"), clock, max_keys=3)
    for key in ("ada", "bob", "cyd"):
        assert limiter.hit(key, 2)
    for number in range(200):
        limiter.hit(f"crowd {number}")
    assert not any(limiter.hit(key) for key in ("ada", "bob", "cyd"))
    assert len(store) <= 4


@every_kind
def test_new_keys_of_a_full_store_share_one_quota(make: Make, clock: FakeClock) -> None:
    limiter, store = limited(make("3/minute"), clock, max_keys=1)
    limiter.hit("ada")
    assert store.overflowed == 0
    admitted = [bool(limiter.hit(f"crowd {number}")) for number in range(10)]
    assert admitted == [True] * 3 + [False] * 7
    assert store.overflowed == 10


@every_kind
def test_the_overflow_key_is_used_until_it_is_fresh_again(make: Make, clock: FakeClock) -> None:
    """Room alone does not end it: who was counted there would have a second quota of its own."""
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


@every_kind
def test_a_key_counted_in_overflow_never_has_twice_its_quota(make: Make, clock: FakeClock) -> None:
    limiter, _ = limited(make("3/minute"), clock, max_keys=2)
    times = []
    for step in range(400):
        limiter.hit(f"crowd {step % 7}")
        if limiter.hit("bob"):
            times.append(clock.now_us())
        clock.advance(1.7)
    most = (
        6 if make in (fixed_window, token_bucket) else 3
    )  # what these two admit around an edge, or with their burst
    for start in times:
        assert sum(start <= time < start + 60_000_000 for time in times) <= most


@every_kind
def test_units_held_in_overflow_are_given_back_there(make: Make, clock: FakeClock) -> None:
    limiter, store = limited(make("3/minute"), clock, max_keys=1)
    limiter.hit("ada", 3)
    hold = limiter.hold("bob", 3)
    assert not limiter.hit("cyd")
    hold.settle(1)
    assert limiter.hit("cyd", 2)
    assert not limiter.hit("ada")
    assert OVERFLOW in next(iter(store._tables.values())).values


def test_a_store_full_of_another_limiters_dead_keys_has_room(clock: FakeClock) -> None:
    store = MemoryStore(max_keys=10, clock=clock)
    first, second = (Limiter("5/second", name=name, store=store) for name in ("first", "second"))
    for number in range(10):
        first.hit(f"{number}")
    clock.advance(10)
    second.hit("ada")
    assert store.overflowed == 0
    assert len(store) == 1


def test_each_rule_of_a_limiter_overflows_by_itself(clock: FakeClock) -> None:
    store = MemoryStore(max_keys=2, clock=clock)
    limiter = Limiter("5/second", "5/hour", name="x", store=store)
    limiter.hit("ada")
    assert len(store) == 2
    limiter.hit("bob", 5)
    decision = limiter.check("cyd", 1)
    assert [result.allowed for result in decision.results] == [False, False]
    clock.advance(2)
    assert [result.allowed for result in limiter.check("cyd", 1).results] == [True, False]


def test_a_shared_counter_is_one_counter_in_overflow_too(clock: FakeClock) -> None:
    store = MemoryStore(max_keys=1, clock=clock)
    Limiter("5/hour", name="other", store=store).hit("ada")
    limiter = Limiter(sliding_window("3/minute", scope="*"), name="x", store=store)
    assert [bool(limiter.hit()) for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None, "5"])
def test_a_store_without_room_for_a_key_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="max_keys"):
        MemoryStore(max_keys=wrong)


# --- Forgetting ------------------------------------------------------------------------------------------------------


@every_kind
def test_dead_keys_go_as_new_ones_come(make: Make, clock: FakeClock) -> None:
    limiter, store = limited(make("2/second"), clock, max_keys=100_000)
    for number in range(5_000):
        limiter.hit(f"{number}")
        clock.advance(0.01)
    assert len(store) < 1_000, "about 100 to 200 keys are alive at any time"
    assert store.overflowed == 0


@every_kind
def test_no_single_call_looks_at_more_than_a_few_old_keys(make: Make, clock: FakeClock) -> None:
    limiter, store = limited(make("2/second"), clock, max_keys=100_000)
    for number in range(2_000):
        limiter.hit(f"{number}")
    clock.advance(100)
    before = len(store)
    limiter.hit("one more")
    assert before - 2 < len(store) <= before


@every_kind
def test_live_keys_stay_among_dead_ones(make: Make, clock: FakeClock) -> None:
    limiter, store = limited(make("2/hour"), clock, max_keys=100_000)
    assert limiter.hit("ada", 2)
    for number in range(50):
        limiter.hold(f"{number}").release()
    for number in range(500):
        limiter.hit(f"late {number}")
    assert not limiter.hit("ada")
    assert len(store) <= 501


def test_released_and_reset_keys_make_room(clock: FakeClock) -> None:
    limiter, store = limited("2/hour", clock, max_keys=5)
    for number in range(100):
        limiter.hold(f"held {number}").release()
        limiter.hit(f"hit {number}")
        limiter.reset(f"hit {number}")
    assert store.overflowed == 0


@every_kind
def test_a_state_at_a_time_of_the_callers_own_outlives_it_by_an_hour_of_the_stores(
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
def test_a_key_used_at_both_kinds_of_time_is_kept_by_the_later_call(make: Make, clock: FakeClock) -> None:
    """Mixing them on one key is asking for trouble, but a live key must not be forgotten for it."""
    limiter, _ = limited(make("2/minute"), clock, max_keys=100_000)
    limiter.hit("ada", 1, now=clock.now)
    clock.advance(3_659)
    assert limiter.hit("ada", 2)
    clock.advance(2)
    for number in range(5):
        limiter.hit(f"{number}")
    assert not limiter.hit("ada", 2)


@every_kind
def test_a_closed_store_has_forgotten_everything_and_can_be_used(make: Make, clock: FakeClock) -> None:
    limiter, store = limited(make("2/minute"), clock, max_keys=1)
    limiter.hit("ada", 2)
    limiter.hit("bob", 2)
    store.close()
    assert len(store) == 0
    assert limiter.hit("bob", 2)
    assert limiter.hit("ada", 2), "the overflow key is fresh as well"


def test_a_store_is_a_context_manager(clock: FakeClock) -> None:
    with MemoryStore(clock=clock) as store:
        Limiter("2/minute", name="x", store=store).hit("ada")
        assert len(store) == 1
    assert len(store) == 0


async def test_a_store_is_an_async_context_manager(clock: FakeClock) -> None:
    async with MemoryStore(clock=clock) as store:
        await AsyncLimiter("2/minute", name="x", store=store).hit("ada")
        assert len(store) == 1
    assert len(store) == 0


def test_it_says_what_it_keeps() -> None:
    guarantees = MemoryStore().guarantees
    assert guarantees.exact
    assert guarantees.all_or_nothing
    assert not guarantees.durable
    assert not guarantees.shared
    assert "each process counts for itself" in guarantees.may_lose


# --- Whose state is whose --------------------------------------------------------------------------------------------


def test_limiters_of_one_name_share_their_states_and_others_do_not(clock: FakeClock) -> None:
    store = MemoryStore(clock=clock)
    one, same, other = (Limiter("2/minute", name=name, store=store) for name in ("x", "x", "y"))
    assert one.hit("ada", 2)
    assert not same.hit("ada")
    assert other.hit("ada", 2)


@every_kind
def test_a_changed_limit_keeps_what_was_counted(make: Make, clock: FakeClock) -> None:
    store = MemoryStore(clock=clock)
    before, after = (Limiter(make(f"{limit}/minute"), name="x", store=store) for limit in (4, 6))
    assert before.hit("ada", 4)
    assert not before.hit("ada")
    decision = after.hit("ada", 2)
    assert (decision.allowed, decision.remaining) == (True, 0)
    assert not before.hit("ada")


def test_a_limiter_shares_its_states_between_sync_and_async(clock: FakeClock) -> None:
    store = MemoryStore(clock=clock)
    limiter, other = (
        Limiter("2/minute", name="x", store=store),
        AsyncLimiter("2/minute", name="x", store=store),
    )
    assert limiter.hit("ada")
    assert asyncio.run(other.hit("ada"))
    assert not limiter.hit("ada")


# --- Forks -----------------------------------------------------------------------------------------------------------


def test_a_child_begins_with_what_the_parent_counted_and_then_counts_for_itself(clock: FakeClock) -> None:
    limiter = Limiter("3/minute", clock=clock)
    limiter.hit("ada", 2)
    assert in_child(lambda: limiter.hit("ada").allowed and not limiter.hit("ada"))
    assert limiter.hit("ada")


def test_a_fork_while_other_threads_are_at_work_leaves_no_lock_behind(hasty_threads: None) -> None:
    limiter, stop = Limiter("1000000/minute"), threading.Event()

    def work() -> None:
        while not stop.wait(
            0.000_1
        ):  # else the lock is taken again before anybody else gets it, least of all a fork
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


def test_two_threads_that_fork_at_once_leave_no_lock_behind(hasty_threads: None) -> None:
    limiters = [Limiter("1000000/minute") for _ in range(5)]
    results: list[bool] = []

    def fork_often() -> None:
        results.extend(in_child(lambda: all(limiter.hit("ada") for limiter in limiters)) for _ in range(8))

    threads = [threading.Thread(target=fork_often, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 24
    assert all(limiter.hit("ada") for limiter in limiters)


FORK_WITH_A_SIGNAL = """
import os, signal, sys
from _thread import interrupt_main
from functools import partial

def interrupt(*_):
    raise InterruptedError

def register(*, before=None, **after):
    if all(hook.__module__ == "headgate.stores.memory" for hook in (before, *after.values()) if hook):
        real_register(**after, **({"before": before} if before else {}))

# The signal comes last before the fork: what is registered first is called last there. It is not sent by Python code,
# so it is handled by the first Python code after the fork: ours, if nobody else has registered any.
os.register_at_fork(before=partial(interrupt_main, signal.SIGUSR1))
real_register, os.register_at_fork = os.register_at_fork, register

from headgate import MemoryStore
from headgate.stores import memory

signal.signal(signal.SIGUSR1, interrupt)
sys.unraisablehook = lambda raised: print(raised.exc_type.__name__, raised.object.__name__)
store = MemoryStore()
child = os.fork()
free = 0 in store._free and 0 in memory._live_stores._free
if child == 0:
    os._exit(0 if free else 1)
print("parent", free, "child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
"""


def test_a_signal_that_comes_during_a_fork_leaves_no_lock_behind() -> None:
    program = [sys.executable, "-c", FORK_WITH_A_SIGNAL]
    result = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines() == ["InterruptedError _after_fork", "parent True child True"]


def test_nobody_gives_back_what_another_one_holds_for_a_fork() -> None:
    store = MemoryStore()
    is_forking, may_end = threading.Event(), threading.Event()

    def fork_slowly() -> None:
        memory._before_fork()
        is_forking.set()
        may_end.wait(60)
        memory._after_fork()

    thread = threading.Thread(target=fork_slowly)
    thread.start()
    try:
        assert is_forking.wait(60)
        memory._after_fork()  # the second time of somebody whose fork is over
        assert not store._free
        assert not memory._live_stores._free
    finally:
        may_end.set()
        thread.join(60)
    assert store._free
    assert memory._live_stores._free


# --- The lock --------------------------------------------------------------------------------------------------------


@every_kind
def test_a_hit_waits_for_whoever_is_inside(make: Make) -> None:
    store = MemoryStore()
    limiter = Limiter(make("5/hour"), name="x", store=store)
    limiter.hit("ada")
    del store._free[0]  # as another thread does that was interrupted there
    waiting = threading.Thread(target=limiter.hit, args=("ada",), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    store._free[0] = None
    waiting.join(60)
    assert limiter.check("ada", 0).remaining == 3


# --- Interruptions ---------------------------------------------------------------------------------------------------


@every_kind
def test_an_exception_from_a_signal_handler_leaves_no_lock_behind(
    make: Make, interruptions: Interruptions
) -> None:
    """As of Ctrl-C in a notebook, or of a worker's soft time-out: the limiter must go on working afterwards."""
    store = MemoryStore()
    limiter = Limiter(make("1000000/hour"), name="x", store=store)
    for _ in interruptions(lambda: limiter.hit("ada")):
        assert store._free, "and nobody else is here to let go of it"


def test_an_interrupted_hit_counts_whole_or_not_at_all(interruptions: Interruptions) -> None:
    """The packed state of a sliding window says twice how much it counts; here new buckets come every few hits."""
    store = MemoryStore()
    limiter = Limiter(sliding_window("1000000000/10ms", buckets=1_000), name="x", store=store)
    (table,) = store._tables.values()
    for _ in interruptions(lambda: limiter.hit("ada")):
        state = table.load("ada")
        if state is not None:
            assert list(state[1::2]) == sorted(set(state[1::2]))
            assert table.packing.pack(state) == table.values["ada"]


class Tripwire(str):
    """A key whose lookup is interrupted, when so many have passed: that is where signal handlers run."""

    __slots__ = ("lookups_left",)
    lookups_left: int

    def __hash__(self) -> int:
        self.lookups_left -= 1
        if not self.lookups_left:
            raise Interrupted
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, str(other))


@pytest.mark.parametrize("lookup", [1, 2, 3])
@pytest.mark.parametrize("is_over", [False, True], ids=["live", "over"])
def test_an_interrupted_call_loses_no_key(lookup: int, is_over: bool, clock: FakeClock) -> None:
    """Neither one that is looked at and stays, nor one that is dropped."""
    limiter, store = limited("5/minute", clock, max_keys=10)
    (table,) = store._tables.values()
    key = Tripwire("ada")
    key.lookups_left = 1000
    limiter.hit(key)
    clock.advance(3600 * is_over)
    key.lookups_left = lookup
    with suppress(Interrupted):
        limiter.hit("bob")
    key.lookups_left = 1000
    assert len(store) == len(table._queue)
    assert set(table.values) <= set(table._queue)
    clock.advance(3600)
    limiter.hit("cyd")
    assert list(table.values) == ["cyd"]
    assert len(store) == 1


def test_an_interrupted_call_loses_no_count_of_its_key(clock: FakeClock) -> None:
    class Interrupting(deque[Any]):
        def append(self, key: Any) -> None:
            super().append(key)
            raise Interrupted

    limiter, store = limited("5/minute", clock, max_keys=10)
    (table,) = store._tables.values()
    table._queue = Interrupting()
    with pytest.raises(Interrupted):
        limiter.hit("ada")
    assert len(store) == len(table._queue) == 1
