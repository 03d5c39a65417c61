"""The store itself: number of calls, rows written, locks, and removal of expired states."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psycopg
import pytest

from headgate import (
    AsyncHold,
    AsyncLimiter,
    ConfigError,
    Limiter,
    MemoryStore,
    StoreConflict,
    StoreMisconfigured,
    calendar,
    concurrent,
    fixed_window,
    open_async_store,
    open_store,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.keys import storage_key, storage_prefix
from headgate.rules import Rule
from headgate.stores.postgres import PostgresStore, migrate
from headgate.stores.postgres.janitor import NEW_STATES_PER_CLEANING
from headgate.stores.postgres.peer import Message, PostgresPeer, PostgresWire
from headgate.stores.remote.batching import MOST_PER_BATCH
from headgate.testing import FakeClock
from tests.integration.postgres.conftest import execute

PATIENT = 60.0
"""Seconds; long, because these tests do not check deadlines."""

THREE_RULES = (
    sliding_window("1000/day", scope="user"),
    token_bucket("1000/minute", burst=200, scope="realm"),
    fixed_window("100000/day", scope="*"),
)
ALL_KINDS = (fixed_window, sliding_window, sliding_log, token_bucket)


def key_of(name: str, rule: Rule, key: str) -> bytes:
    """Return the key of a state."""
    return storage_key(storage_prefix("headgate", name, rule), key)


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    with PostgresStore(url, deadline=PATIENT) as store:
        yield store


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that are sent, by name."""
    names: list[str] = []
    send = PostgresWire.send

    def note(self: PostgresWire, message: Message) -> None:
        names.append(message[0].name.decode())
        send(self, message)

    monkeypatch.setattr(PostgresWire, "send", note)
    return names


# --- One call per request or batch --------------------------------------------------------------------------


def test_request_with_many_rules_is_one_call(store: PostgresStore, name: str, sent: list[str]) -> None:
    one = Limiter("5/minute", name=name, store=store)
    several = Limiter(*THREE_RULES, name=name, store=store)
    key = {"user": "u", "realm": "r"}
    one.hit("a")
    several.hit(key)
    several.check(key)
    several.record(key)
    several.hold(key).release()
    several.reset(key)
    assert sent == ["one", "many", "many", "many", "many", "many", "many"]


async def test_waiting_calls_are_sent_in_one_batch(url: str, name: str, sent: list[str]) -> None:
    async with PostgresStore(url, deadline=PATIENT) as store:
        limiter = AsyncLimiter("100/minute", name=name, store=store)
        decisions = await asyncio.gather(*(limiter.hit("a") for _ in range(300)))
        assert sum(decision.allowed for decision in decisions) == 100
        # Connecting took a while, so all calls were queued when the first batch was sent.
        assert sent == ["many"] * -(300 // -MOST_PER_BATCH)


@pytest.mark.parametrize("keys", [3, 40])
async def test_batch_decides_like_single_calls_in_order(url: str, name: str, keys: int) -> None:
    """Few keys are read and written one by one, many together; both must answer like memory does."""
    clock = FakeClock()
    rules = (
        fixed_window("5/minute", name="fixed"),
        sliding_window("7/minute", name="sliding"),
        sliding_log("6/minute", name="log"),
        token_bucket("8/minute", name="token"),
        calendar("9/day", name="calendar"),
    )
    async with PostgresStore(url, deadline=PATIENT) as store:
        memory = MemoryStore()
        limiters = [
            (
                AsyncLimiter(rule, name=name, store=store, clock=clock, on_store_error="raise"),
                AsyncLimiter(rule, name=name, store=memory, clock=clock),
            )
            for rule in rules
        ]
        chance = random.Random(keys)
        held: list[tuple[AsyncHold, AsyncHold]] = []
        for _ in range(12):
            clock.advance_us(chance.choice([0, 1, 5_000_000, 30_000_000]))
            trace = [
                (
                    chance.choice(limiters),
                    f"key {chance.randrange(keys)}",
                    chance.randint(0, 3),
                    chance.random(),
                )
                for _ in range(60)
            ]
            releases, held = held, []
            ours, theirs = [], []
            for pair in releases:
                used = chance.randint(-3, 3)
                for hold, calls in zip(pair, (ours, theirs), strict=True):
                    calls.append(hold.release() if used < 0 else hold.confirm(used))
            for (mine, other), key, cost, dice in trace:
                for limiter, calls in ((mine, ours), (other, theirs)):
                    calls.append(
                        limiter.hit(key, cost)  # type: ignore[arg-type]
                        if dice < 0.4
                        else limiter.hold(key, cost)
                        if dice < 0.6
                        else limiter.check(key, cost)
                        if dice < 0.8
                        else limiter.record(key, cost)
                        if dice < 0.95
                        else limiter.reset(key)
                    )
            batch = await asyncio.gather(*ours)
            one_by_one = [await call for call in theirs]
            for answer, expected in zip(batch, one_by_one, strict=True):
                if isinstance(answer, AsyncHold) and isinstance(expected, AsyncHold):
                    assert answer.decision == expected.decision
                    held.append((answer, expected))
                else:
                    assert answer == expected


# --- Writes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ALL_KINDS)
def test_refusals_and_checks_do_not_write_the_row(
    store: PostgresStore, name: str, connection: psycopg.Connection, make: Callable[[str], Rule]
) -> None:
    rule = make("2/day")
    limiter = Limiter(rule, name=name, store=store)
    limiter.hit("a", 2)

    def row() -> object:
        query = "SELECT xmin, xmax, ctid, state, expires FROM headgate_states WHERE key = %s"
        return connection.execute(query, (key_of(name, rule, "a"),)).fetchone()

    before = row()
    assert before is not None
    assert not limiter.hit("a")
    limiter.check("a")
    limiter.hit("a", 0)
    assert not limiter.hold("a")
    assert row() == before


@pytest.mark.parametrize(("durable", "commit"), [(False, "off"), (True, "on")])
@pytest.mark.parametrize(
    "call",
    [
        "SELECT headgate_one_v2('x', 1, 1, 5, 60000000, 0, 0, -1, 1, 1, %s)",
        "SELECT headgate_many_v3('{x}', 1, '{1,-1,1,1,1,1,5,60000000,0,0,1}', %s)",
    ],
)
def test_call_sets_synchronous_commit_for_its_transaction_only(
    connection: psycopg.Connection, call: str, durable: bool, commit: str
) -> None:
    with connection.transaction(force_rollback=True):
        connection.execute(call, (durable,))  # type: ignore[arg-type]
        assert connection.execute("SHOW synchronous_commit").fetchone() == (commit,)
    assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)


def test_time_comes_from_the_database(
    store: PostgresStore, name: str, connection: psycopg.Connection
) -> None:
    rule = fixed_window("5/day")
    Limiter(rule, name=name, store=store).hit("a")
    row = connection.execute(
        "SELECT state[2], extract(epoch FROM clock_timestamp())::bigint / 86400 FROM headgate_states WHERE key = %s",
        (key_of(name, rule, "a"),),
    ).fetchone()
    assert row is not None
    assert row[1] - row[0] in (0, 1)  # a day may have begun in between


# --- Expired rows -------------------------------------------------------------------------------------------


def test_expired_states_are_removed_by_later_calls(empty_url: str, name: str) -> None:
    with PostgresStore(empty_url, deadline=PATIENT) as store, psycopg.connect(empty_url) as connection:
        store.migrate()
        lasting = Limiter("5/day", name=name, store=store, on_store_error="raise")
        for number in range(40):
            lasting.hit(f"lasting {number}")
        brief = Limiter(fixed_window("1/1ms"), name=name, store=store, on_store_error="raise")
        for number in range(6 * NEW_STATES_PER_CLEANING):
            brief.hit(f"brief {number}")
        found = connection.execute("SELECT count(*) FROM headgate_states").fetchone()
        assert found is not None
        assert found[0] < 40 + 3 * NEW_STATES_PER_CLEANING
        assert all(lasting.check(f"lasting {number}", 0).remaining == 4 for number in range(40))


def test_removal_skips_locked_rows(empty_url: str, name: str) -> None:
    rule = fixed_window("5/1ms")
    with PostgresStore(empty_url, deadline=PATIENT) as store, psycopg.connect(empty_url) as holder:
        store.migrate()
        Limiter(rule, name=name, store=store, on_store_error="raise").hit("a")
        mark = "UPDATE headgate_states SET expires = 0 WHERE key = %s"
        holder.execute(mark, (key_of(name, rule, "a"),))
        with psycopg.connect(empty_url, autocommit=True) as cleaner:
            cleaner.execute("SET lock_timeout = '30s'")
            assert cleaner.execute("SELECT headgate_clean_v1('', 10)").fetchone() == (None,)
        assert holder.execute("SELECT count(*) FROM headgate_states").fetchone() == (1,)
        holder.commit()
        holder.execute("SELECT headgate_clean_v1('', 10)")
        assert holder.execute("SELECT count(*) FROM headgate_states").fetchone() == (0,)


@pytest.mark.parametrize("together", [1, 3, 20])
async def test_row_removed_between_read_and_write_is_inserted_again(
    empty_url: str, name: str, together: int
) -> None:
    async with PostgresStore(empty_url, deadline=PATIENT) as store:
        store.migrate()
        limiter = AsyncLimiter(fixed_window("9/day"), name=name, store=store, on_store_error="raise")
        keys = [f"{number}" for number in range(together)]
        await asyncio.gather(*map(limiter.hit, keys))
        async with (
            await psycopg.AsyncConnection.connect(empty_url) as cleaner,
            await psycopg.AsyncConnection.connect(empty_url, autocommit=True) as observer,
        ):
            await cleaner.execute(
                "DELETE FROM headgate_states WHERE key = (SELECT key FROM headgate_states ORDER BY key LIMIT 1)"
            )
            hits = asyncio.gather(*map(limiter.hit, keys))
            while not await (await observer.execute("SELECT FROM pg_locks WHERE NOT granted")).fetchall():
                assert not hits.done()
            await cleaner.commit()
        await hits
        assert [(await limiter.check(key, 0)).remaining for key in keys] == [7] * together


def test_state_with_a_given_time_is_kept_an_hour_longer(
    store: PostgresStore, name: str, connection: psycopg.Connection
) -> None:
    rule = fixed_window("5/1ms")
    Limiter(rule, name=name, store=store).hit("a", now=1_000.0)
    row = connection.execute(
        "SELECT expires - extract(epoch FROM clock_timestamp())::bigint * 1000000 FROM headgate_states WHERE key = %s",
        (key_of(name, rule, "a"),),
    ).fetchone()
    assert row is not None
    assert row[0] > 3_000_000_000


# --- Deadlocks and connections ------------------------------------------------------------------------------


def test_requests_with_the_same_keys_in_any_order_never_deadlock(empty_url: str, name: str) -> None:
    """Threads and batches of tasks, over a handful of keys in random orders; PostgreSQL counts the deadlocks itself."""
    scopes = ("a", "b", "c", "d")
    keys = [f"key {number}" for number in range(5)]

    def limiters(make: Callable[..., object], store: PostgresStore) -> list[object]:
        orders = [random.Random(number).sample(range(len(scopes)), len(scopes)) for number in range(6)]
        return [
            make(
                *(
                    sliding_window("1000000/day", scope=scopes[place], name=f"rule {place}")
                    for place in order
                ),
                name=name,
                store=store,
                on_store_error="raise",
            )
            for order in orders
        ]

    def pick(chance: random.Random) -> dict[str, str]:
        return dict(zip(scopes, chance.choices(keys, k=len(scopes)), strict=True))

    def work(number: int) -> int:
        chance = random.Random(number)
        with PostgresStore(empty_url, deadline=PATIENT) as store:
            made = limiters(Limiter, store)
            return sum(bool(chance.choice(made).hit(pick(chance))) for _ in range(120))  # type: ignore[attr-defined]

    async def work_in_batches(number: int) -> int:
        chance = random.Random(number)
        async with PostgresStore(empty_url, deadline=PATIENT) as store:
            made = limiters(AsyncLimiter, store)
            hits = (chance.choice(made).hit(pick(chance)) for _ in range(600))  # type: ignore[attr-defined]
            return sum(map(bool, await asyncio.gather(*hits)))

    migrate(empty_url)
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(work, number) for number in range(5)]
        jobs += [pool.submit(lambda n=number: asyncio.run(work_in_batches(n))) for number in range(3)]
        assert [job.result() for job in jobs] == [120] * 5 + [600] * 3
    with psycopg.connect(empty_url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
        assert row == (0,)


# --- One bad request in a batch -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoilt",
    [
        pytest.param([1], id="not a state of this kind"),
        pytest.param(
            [1, 5, 1, 0, 0, 1, 5], id="the database itself fails"
        ),  # drains 0 per tick: division by zero
    ],
)
async def test_bad_request_does_not_fail_its_batch(
    url: str, name: str, connection: psycopg.Connection, spoilt: list[int]
) -> None:
    rule = token_bucket("5/minute")
    async with PostgresStore(url, deadline=PATIENT) as store:
        limiter = AsyncLimiter(rule, name=name, store=store, on_store_error="raise")
        connection.execute(
            "INSERT INTO headgate_states VALUES (%s, %s, 0)", (key_of(name, rule, "bad"), spoilt)
        )
        names = ["a", "b", "bad", "c", "a", "bad", "d"]
        answers = await asyncio.gather(*(limiter.hit(key) for key in names), return_exceptions=True)
        for key, answer in zip(names, answers, strict=True):
            assert isinstance(answer, StoreConflict) if key == "bad" else answer
        left = [(await limiter.check(key, 0)).remaining for key in "abcd"]
        assert left == [3, 4, 4, 4]  # each was charged once, though the batch was sent again


@pytest.mark.parametrize("state", [[1], [1, 2], [1, 2, 3, 4, 5], [1] * 11])
@pytest.mark.parametrize(
    "rule",
    [*(make("5/day") for make in ALL_KINDS), calendar("5/day"), concurrent(5, lease="60s")],
    ids=lambda rule: rule.kind,
)
def test_state_of_another_kind_is_a_conflict(
    store: PostgresStore, name: str, connection: psycopg.Connection, rule: Rule, state: list[int]
) -> None:
    limiter = Limiter(rule, name=name, store=store, on_store_error="raise")
    connection.execute("INSERT INTO headgate_states VALUES (%s, %s, 0)", (key_of(name, rule, "a"), state))
    with pytest.raises(StoreConflict):
        limiter.hold("a")


# --- Event loops and closing --------------------------------------------------------------------------------


async def _remaining(limiter: AsyncLimiter) -> int | None:
    return (await limiter.check("a", 0)).remaining


# --- Addresses and settings ---------------------------------------------------------------------------------


async def test_url_selects_the_store(url: str, name: str) -> None:
    for scheme in ("postgresql", "postgres"):
        address = scheme + url[url.index(":") :]
        with open_store(address) as store:  # type: ignore[attr-defined]
            assert isinstance(store, PostgresStore)
            assert Limiter("5/day", name=name, store=store).hit(scheme)
        async with open_async_store(address) as store:  # type: ignore[attr-defined]
            assert await AsyncLimiter("5/day", name=name, store=store).hit(scheme)


def test_without_prepared_statements_no_session_state_is_needed(url: str, name: str) -> None:
    """This is the case behind a pooler in transaction mode, where each call may use another session."""
    with PostgresStore(url, prepare=False, deadline=PATIENT) as store:
        limiter = Limiter("5/day", "50/week", name=name, store=store, on_store_error="raise")
        for expected in (4, 3, 2):
            assert limiter.hit("a").remaining == expected
            wire = store._threads._dispatcher._wire
            execute(wire, b"DISCARD ALL")


def test_lost_prepared_statements_error_names_the_option(url: str, name: str) -> None:
    with PostgresStore(url, deadline=PATIENT) as store:
        limiter = Limiter("5/day", name=name, store=store, on_store_error="raise")
        limiter.hit("a")
        wire = store._threads._dispatcher._wire
        execute(wire, b"DEALLOCATE ALL")
        with pytest.raises(StoreMisconfigured, match="prepare=False"):
            limiter.hit("a")


def test_an_event_loop_that_ends_while_connecting_leaves_the_store_usable(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its tasks are cancelled, also the connecting one."""
    store = PostgresStore(url, deadline=PATIENT)
    limiter = AsyncLimiter("5/day", name=name, store=store, on_store_error="raise")
    reached, go_on = threading.Event(), threading.Event()
    connect = PostgresPeer.connect

    def hang(self: PostgresPeer, seconds: float) -> PostgresWire:
        reached.set()
        assert go_on.wait(PATIENT)
        return connect(self, seconds)

    async def give_up() -> None:
        hit = asyncio.ensure_future(limiter.hit("a"))
        assert await asyncio.to_thread(reached.wait, PATIENT)
        hit.cancel()
        asyncio.get_running_loop().call_soon(go_on.set)

    monkeypatch.setattr(PostgresPeer, "connect", hang)
    asyncio.run(give_up())
    monkeypatch.undo()
    assert asyncio.run(_remaining(limiter)) == 5
    store.close()


async def test_partially_sent_call_is_completed(url: str, name: str) -> None:
    """The call is larger than the send buffer: the rest is sent when there is room."""
    rules = [fixed_window("1000/day", name=f"{'x' * 2000}{number}") for number in range(40)]
    async with PostgresStore(url, deadline=PATIENT) as store:
        limiter = AsyncLimiter(*rules, name=name, store=store, on_store_error="raise")
        decisions = await asyncio.gather(*(limiter.hit(f"{number}") for number in range(100)))
        assert all(decisions)
    with PostgresStore(url, deadline=PATIENT) as store:
        again = Limiter(*rules, name=name, store=store, on_store_error="raise")
        assert [result.remaining for result in again.hit("7").results] == [998] * len(rules)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (partial(PostgresStore, "postgresql://user:sec/secret@host/x"), "cannot be read"),
        (partial(PostgresStore, "postgresql://user:secret%zz@host/x"), "cannot be read"),
        (partial(PostgresStore, "postgresql://localhost/x?unknown=1"), "cannot be read"),
        (partial(PostgresStore, None), "cannot be read"),
        (partial(PostgresStore, "postgresql://localhost/x", deadline=0), "deadline"),
        (partial(PostgresStore, "postgresql://localhost/x", deadline=float("nan")), "deadline"),
    ],
)
def test_invalid_options_are_refused(bad: Callable[[], PostgresStore], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        bad()
    assert "secret" not in str(caught.value)
