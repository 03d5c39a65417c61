"""Leases: which calls a chunk decides, its size and its end, and what is returned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headgate import (
    ConfigError,
    CostTooHigh,
    Decision,
    Limiter,
    SQLiteStore,
    concurrent,
    fixed_window,
    sliding_window,
    token_bucket,
)
from headgate.costs import Costs
from headgate.keys import Key
from headgate.leases._async.gate import AsyncLeasedGate
from headgate.leases.chunks import HOT_UNITS, MAX_HOT_KEYS, ChunkBook, chunk_size
from headgate.rules import leased, rules_from
from headgate.stores.base import Answer, Receipts
from headgate.stores.request import Request
from headgate.testing import FakeClock
from tests.unit.recorder import Recorder

LEASE = "3m"
LEASE_NS = 180 * 10**9


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'limits.db'}"


def limiter(url: str, *rules: str, lease: str | None = LEASE) -> Limiter:
    return Limiter(*(rules or ("1000/hour",)), name="api", store=url, lease=lease)


def hit(limiter: Limiter, times: int, key: str = "alice", tier: str | None = None) -> list[Decision]:
    return [limiter.hit(key, tier=tier) for _ in range(times)]


def remaining(url: str) -> int | None:
    with Limiter("1000/hour", name="api", store=url) as exact:
        return exact.check("alice", 0).remaining


def test_hot_key_is_leased_and_the_rest_is_returned(url: str) -> None:
    with limiter(url) as leasing:
        decisions = hit(leasing, 100)
        assert all(decisions)
        assert not any(decision.leased for decision in decisions[: HOT_UNITS - 1])
        assert sum(decision.leased for decision in decisions) > 50
        left = remaining(url)
        assert left is not None
        assert left < 900  # the open chunk is charged
    assert remaining(url) == 900


def test_cold_keys_other_calls_and_large_costs_are_decided_at_the_store(url: str) -> None:
    with limiter(url) as leasing:
        assert not any(leasing.hit(f"user {number}").leased for number in range(50))
        hit(leasing, 50)
        assert not leasing.check("alice").leased
        assert not leasing.hit("alice", 0).leased
        assert not leasing.hit("alice", 700).leased
        with leasing.hold("alice") as hold:
            assert not hold.decision.leased
        assert leasing.hit("alice").leased


def test_a_chunk_serves_one_tier(url: str) -> None:
    rule = sliding_window("1000/hour", tiers={"pro": "2000/hour"})
    with Limiter(rule, name="api", store=url, lease=LEASE) as leasing:
        hit(leasing, 50)
        assert not leasing.hit("alice", tier="pro").leased
        assert leasing.hit("alice").leased


def test_quota_of_a_call_has_its_own_chunk(url: str) -> None:
    with limiter(url) as leasing:
        decisions = [leasing.hit("alice", quota="500/hour") for _ in range(50)]
        assert decisions[-1].leased
        assert decisions[-1].limit == 500
        assert not leasing.hit("alice").leased


def test_all_rules_are_charged_for_a_chunk(url: str) -> None:
    rules = sliding_window("1000/hour", scope="user"), fixed_window("2000/hour", scope="*")
    with Limiter(*rules, name="api", store=url, lease=LEASE) as leasing:
        decisions = [leasing.hit({"user": "42"}) for _ in range(100)]
        assert decisions[-1].leased
        assert [result.name for result in decisions[-1].results] == ["per-hour-user", "per-hour-shared"]
    with Limiter(*rules, name="api", store=url) as exact:
        assert [result.remaining for result in exact.check({"user": "42"}, 0).results] == [900, 1900]


def test_reset_returns_the_chunks_of_this_process_first(url: str) -> None:
    with limiter(url) as leasing:
        hit(leasing, 100)
        leasing.reset("alice")
        assert remaining(url) == 1_000
    assert remaining(url) == 1_000


def test_guarantees_name_the_effects_of_a_lease(url: str) -> None:
    with limiter(url) as leasing, limiter(url, lease=None) as exact:
        assert "with a lease" in leasing.guarantees.may_lose
        assert exact.guarantees == exact.store.guarantees


@pytest.mark.parametrize(
    ("rule", "lease", "message"),
    [
        (
            "1000/minute",
            "4s",
            r"lease='4s' is more than 1/20 of the period of rule 'per-minute': use at most '3s'",
        ),
        (
            token_bucket("1000/minute", burst=50),
            "3s",
            "holds back the 50 units .* use a shorter lease or a larger burst",
        ),
        (concurrent(5, lease="60s"), "1s", "cannot be leased"),
        ("1000/minute", "soon", "lease"),
    ],
)
def test_lease_that_does_not_fit_the_rules(url: str, rule: str, lease: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Limiter(rule, name="api", store=url, lease=lease)


def test_lease_needs_a_shared_store_and_real_time(url: str) -> None:
    with pytest.raises(ConfigError, match="several processes share, like Redis, and MemoryStore is not one"):
        Limiter("1000/hour", lease="1s")
    store = SQLiteStore(url.removeprefix("sqlite:///"))
    with pytest.raises(ConfigError, match="use either lease= or clock="):
        Limiter("1000/hour", name="api", store=store, clock=store.clock, lease="1s")
    store.close()


def test_lease_needs_a_store_with_the_time_of_the_machine(tmp_path: Path) -> None:
    with (
        SQLiteStore(tmp_path / "limits.db", clock=FakeClock()) as store,
        pytest.raises(ConfigError, match="measured by the machine's clock, and this store has a FakeClock"),
    ):
        Limiter("1000/hour", name="api", store=store, lease="1s")


def test_cost_above_the_burst_between_leases_is_too_high(url: str) -> None:
    with Limiter(token_bucket("1000/hour", burst=100), name="api", store=url, lease=LEASE) as leasing:
        assert leasing.hit("alice", 50)
        with pytest.raises(CostTooHigh):  # no wait would help
            leasing.hit("alice", 51)


def test_hooks_are_called_once_for_each_leased_decision(url: str) -> None:
    hook = Recorder()
    with Limiter("1000/hour", name="api", store=url, lease=LEASE, hooks=[hook]) as leasing:
        decisions = hit(leasing, 50)
    assert [decision for _, decision in hook.arguments("decided")] == decisions


def test_leased_rules_keep_their_states() -> None:
    for rule in rules_from(["5/minute", "5/hour burst 3"]):
        assert leased((rule,), 1_000_000)[0].identity == rule.identity


class Ticks:
    """A clock that a test sets, in nanoseconds."""

    def __init__(self) -> None:
        self.now = 5 * 10**9

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


def book_of(ticks: Ticks, *rules: str) -> ChunkBook:
    return ChunkBook(leased(rules_from(rules or ["1000/hour"]), LEASE_NS // 1_000), ticks)


IDENTITY = ("alice", None, None)
GRANTED = Decision.make(("per-hour",), [(True, 1000, 800, None, 60_000_000)])


def open_chunk(book: ChunkBook, units: int = 100, sent: int | None = None) -> object:
    """Let the store grant a chunk for a call with a cost of 1; the receipt is the number of units."""
    book.request_units(IDENTITY, 1)
    return book.granted(
        IDENTITY, 1, units, book.now() if sent is None else sent, GRANTED, ((units, (units,)),)
    )


def test_a_chunk_that_is_granted_late_is_returned_unused(ticks: Ticks) -> None:
    book = book_of(ticks)
    assert open_chunk(book, sent=ticks.now - LEASE_NS) is None
    assert book.take(IDENTITY, 1) is None
    assert book.collect() == [(((100, (100,)),), 100)]


def test_a_forked_child_has_no_chunks(ticks: Ticks) -> None:
    book = book_of(ticks)
    assert open_chunk(book)
    book.after_fork_in_child()
    assert book.take(IDENTITY, 1) is None
    book.stop()
    assert book.collect() == []


def test_one_chunk_is_requested_at_a_time(ticks: Ticks) -> None:
    book = book_of(ticks)
    for _ in range(HOT_UNITS - 1):
        assert book.request_units(IDENTITY, 1) == 0
        book.decided(IDENTITY, 1, GRANTED)
    assert book.request_units(IDENTITY, 1) == HOT_UNITS
    assert book.request_units(IDENTITY, 1) == 0
    book.answered(IDENTITY)
    assert book.request_units(IDENTITY, 1) == HOT_UNITS


def test_an_interrupted_request_is_forgotten_after_one_lease(ticks: Ticks) -> None:
    book = book_of(ticks)
    open_chunk(book)
    for _ in range(99):
        book.take(IDENTITY, 1)
    assert book.request_units(IDENTITY, 1)
    assert book.request_units(IDENTITY, 1) == 0
    ticks.now += LEASE_NS
    assert book.request_units(IDENTITY, 1)


def test_a_cost_that_no_chunk_can_have_leaves_the_chunk_open(ticks: Ticks) -> None:
    book = book_of(ticks)
    open_chunk(book)
    assert book.take(IDENTITY, 500) is None
    assert book.request_units(IDENTITY, 500) == 0
    assert book.take(IDENTITY, 1)


def test_chunks_follow_the_demand(ticks: Ticks) -> None:
    book = book_of(ticks)
    assert open_chunk(book)
    for _ in range(99):
        assert book.take(IDENTITY, 1)
    ticks.now += LEASE_NS // 2
    assert book.request_units(IDENTITY, 1) == 101  # as many again, in the same lease
    book.answered(IDENTITY)
    ticks.now += 100 * LEASE_NS
    assert book.request_units(IDENTITY, 1) == 0  # no longer hot


def test_units_of_a_chunk_count_once_as_demand(ticks: Ticks) -> None:
    book = book_of(ticks)
    open_chunk(book)
    for _ in range(49):
        book.take(IDENTITY, 1)
    ticks.now += LEASE_NS
    assert book.request_units(IDENTITY, 1) == 50
    book.answered(IDENTITY)
    assert book.request_units(IDENTITY, 1) == 50


def test_chunks_shrink_near_the_limit() -> None:
    assert chunk_size(500, 10_000) == 500
    assert chunk_size(500, 100) == 50
    assert chunk_size(500, 1) == 0


def test_the_number_of_measured_keys_is_bounded(ticks: Ticks) -> None:
    book = book_of(ticks)
    for number in range(MAX_HOT_KEYS + 50):
        book.request_units((f"user {number}", None, None), 1)
    assert len(book._demand) == MAX_HOT_KEYS
    ticks.now += 3 * LEASE_NS
    book.request_units(IDENTITY, 1)
    assert len(book._demand) == 1


def test_one_timer_returns_the_rests_of_all_chunks(ticks: Ticks) -> None:
    book = book_of(ticks)
    open_chunk(book)
    timer = book.timer()
    assert timer is not None
    pause, time = timer
    assert pause == pytest.approx(180, rel=0.01)
    assert book.timer() is None
    ticks.now = time
    assert len(book.collect()) == 1
    assert book.timer(time) is None
    open_chunk(book)
    after = book.timer()
    assert after is not None
    assert book.timer(time) is None  # an earlier timer that fires late starts no second chain
    book.after_fork_in_child()
    open_chunk(book)
    assert book.timer() == after


class ScriptedGate:
    """A gate whose grants a test controls.

    Attributes:
        during_grant: Called before each grant.
        returned: The units that were given back.
        degraded: Whether the failure policy answers.
    """

    def __init__(self) -> None:
        self.during_grant: Callable[[], Awaitable[None]] | None = None
        self.returned: list[Costs] = []
        self.degraded = False

    async def decide(self, request: Request) -> Answer:
        if request.operation == "hold" and self.during_grant is not None:
            await self.during_grant()
        receipts = ((1, (2,)),) if request.operation == "hold" else None
        return GRANTED.as_degraded() if self.degraded else GRANTED, receipts

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        self.returned.append(cost)

    async def reset(self, key: Key | None) -> None:
        return


@pytest.fixture
def scripted() -> ScriptedGate:
    return ScriptedGate()


async def decide(gate: AsyncLeasedGate, times: int = 1) -> list[bool]:
    return [(await gate.decide(Request("hit", "alice")))[0].leased for _ in range(times)]


async def test_a_chunk_granted_after_the_close_is_returned_and_not_used(
    ticks: Ticks, scripted: ScriptedGate
) -> None:
    gate = AsyncLeasedGate(scripted, book_of(ticks))
    scripted.during_grant = gate.close
    assert not any(await decide(gate, 50))
    assert scripted.returned == [HOT_UNITS]


async def test_a_chunk_granted_during_a_reset_is_returned_and_not_used(
    ticks: Ticks, scripted: ScriptedGate
) -> None:
    gate = AsyncLeasedGate(scripted, book_of(ticks))
    scripted.during_grant = lambda: gate.reset("alice")
    assert not any(await decide(gate, HOT_UNITS))
    assert scripted.returned == [HOT_UNITS]
    scripted.during_grant = None
    ticks.now += 1
    assert any(await decide(gate, 20))


async def test_units_granted_by_a_failure_policy_are_given_back(ticks: Ticks, scripted: ScriptedGate) -> None:
    gate = AsyncLeasedGate(scripted, book_of(ticks))
    await decide(gate, HOT_UNITS - 1)
    scripted.degraded = True
    assert not any(await decide(gate, 50))
    assert scripted.returned == [HOT_UNITS]  # asked once, and then call by call until the store is back
    scripted.degraded = False
    assert await decide(gate, 2) == [False, True]


async def test_a_cancelled_request_for_a_chunk_is_repeated(ticks: Ticks, scripted: ScriptedGate) -> None:
    gate = AsyncLeasedGate(scripted, book_of(ticks))
    await decide(gate, HOT_UNITS - 1)
    started = asyncio.Event()

    async def block() -> None:
        started.set()
        await asyncio.Event().wait()

    scripted.during_grant = block
    task = asyncio.create_task(decide(gate))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    scripted.during_grant = None
    assert await decide(gate) == [True]


def test_only_hits_by_the_clock_of_the_store_are_leased(ticks: Ticks) -> None:
    book = book_of(ticks)
    assert book.identity_of(Request("hit", "alice")) == IDENTITY
    assert book.identity_of(Request("peek", "alice")) is None
    assert book.identity_of(Request("hit", "alice", now=5)) is None
