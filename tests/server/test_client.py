"""The client against a real server: in a thread, and as a process that is stopped, killed and restarted."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    CostTooHigh,
    Limiter,
    StoreUnavailable,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.client import ServerStore
from headgate.decision import UNLIMITED
from headgate.outage import local
from headgate.policy import AsyncLivePolicy
from headgate.policy.model import TokenPolicy
from headgate.testing import FakeClock
from headgate.testing.contract.races import in_threads
from headgate_server import make_app
from tests.integration.deadlines import Deadlines
from tests.server.loopback import (
    LONGEST_WAIT,
    ServerProcess,
    ThreadedServer,
    limiter_policy,
    no_room_for_files,
    policy_of,
)
from tests.unit.flavours import AnyLimiter, close, done
from tests.unit.processes import forking, in_child

LIMIT = 100
DEADLINE = 0.25

Flavour = type[Limiter] | type[AsyncLimiter]

LIMITERS = (
    limiter_policy(
        "login", (sliding_window("5/minute", tiers={"pro": "50/minute"}),), on_store_error="closed"
    ),
    limiter_policy(
        "api",
        (
            token_bucket("10/s", burst=20, scope="user"),
            sliding_window("100/hour", scope="realm", buckets=7, strict=False, name="hourly"),
            fixed_window("1000/day", scope="*"),
        ),
        shadow=(sliding_log("50/hour", scope="user", name="candidate"),),
        default_tier="free",
        on_store_error=local(0.25),
    ),
    limiter_policy("race", (sliding_window(f"{LIMIT}/hour"),)),
    limiter_policy("a/b: c%", (sliding_window("5/minute"),)),
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(clock: FakeClock) -> Iterator[ThreadedServer]:
    with ThreadedServer(policy_of(*LIMITERS), clock=clock) as server:
        yield server


@pytest.fixture
async def store(server: ThreadedServer) -> AsyncIterator[ServerStore]:
    async with ServerStore(server.url, deadline=LONGEST_WAIT) as store:
        yield store


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["sync", "async"])
def flavour(request: pytest.FixtureRequest) -> Flavour:
    kind: Flavour = request.param
    return kind


@pytest.fixture
def limiter_of(flavour: Flavour, store: ServerStore) -> Callable[..., Any]:
    """Returns a limiter of the server by its name, waiting for it if it must be."""

    async def limiter_of(name: str, **options: Any) -> AnyLimiter:
        if flavour is AsyncLimiter:
            return await store.async_limiter(name, **options)
        return store.limiter(name, **options)

    return limiter_of


# --- The same answers ---------------------------------------------------------------------------------------------------


async def test_a_limiter_behaves_like_one_of_its_own(
    limiter_of: Callable[..., Any], clock: FakeClock
) -> None:
    """Make every call on both; the results must equal those of a memory store in this process."""
    remote = await limiter_of("api")
    twin = AsyncLimiter(*remote.rules, clock=clock)
    keys = [{"user": user, "realm": realm} for user in ("ann", b"bob") for realm in ("north", "süd")]
    for number in range(120):
        key, cost = keys[number % 4], number % 7
        for name in ("hit", "check"):
            answer = await done(getattr(remote, name)(key, cost))
            assert answer == await getattr(twin, name)(key, cost)
        if number % 5 == 0:
            holds = await done(remote.hold(key, 3)), await twin.hold(key, 3)
            assert holds[0].decision == holds[1].decision
            for hold in holds:
                assert await done(hold.settle(number % 6)) == number % 6 or not hold
        if number % 11 == 0:
            for limiter in (remote, twin):
                await done(limiter.record(key, 2))
        if number % 31 == 0:
            for limiter in (remote, twin):
                await done(limiter.reset(key))
        clock.advance_us(number * 7_919)
    assert not remote.health.degraded


async def test_rules_come_over_unchanged(store: ServerStore) -> None:
    for limiters in (store.limiters(), await store.async_limiters()):
        for shown, policy in zip(limiters, LIMITERS, strict=True):
            assert (shown.name, shown.rules, shown.shadow) == (policy.name, policy.rules, policy.shadow)
            assert (shown.store, shown.default_tier, shown.headers) == (
                "memory://",
                policy.default_tier,
                "both",
            )


async def test_costs_that_can_never_be_admitted_raise_as_everywhere(limiter_of: Callable[..., Any]) -> None:
    remote = await limiter_of("login")
    for call in (remote.hit, remote.check, remote.hold):
        with pytest.raises(CostTooHigh) as raised:
            await done(call("alice", 6))
        assert (raised.value.cost, raised.value.capacity, raised.value.rule) == (6, 5, "per-minute")
        with pytest.raises(CostTooHigh) as raised:
            await done(call("alice", 51, tier="pro"))
        assert raised.value.capacity == 50


async def test_any_name_of_a_limiter_can_be_asked_for(limiter_of: Callable[..., Any]) -> None:
    remote = await limiter_of("a/b: c%")
    assert (await done(remote.hit("alice"))).remaining == 4
    assert (await done(remote.hold("alice", 2))).decision.remaining == 2


async def test_hints_tell_how_long_to_wait(store: ServerStore, clock: FakeClock) -> None:
    assert store.wait_hint("login", "alice", 5) == (True, 0.0)
    limiter = store.limiter("login")
    limiter.hit("alice", 3)
    clock.advance(1.5)
    limiter.hit("alice", 2)
    refused = limiter.check("alice")
    for hint in (store.wait_hint("login", "alice"), await store.async_wait_hint("login", "alice")):
        assert hint == (False, refused.retry_after)
    assert store.wait_hint("login", "alice", 5, tier="pro") == (True, 0.0)


async def test_a_key_is_seen_in_every_limiter(store: ServerStore) -> None:
    store.limiter("login").record("alice", 7)
    for states in (store.inspect("alice"), await store.async_inspect("alice")):
        by_name = {state.limiter: state for state in states}
        assert set(by_name) == {limiter.name for limiter in LIMITERS}
        [login] = by_name["login"].results
        assert (login.limit, login.used, login.remaining) == (5, 7, 0)
        assert login.frees_after == store.wait_hint("login", "alice").wait
        assert [result.scope for result in by_name["api"].results] == ["user", "realm", "*"]
        assert by_name["race"].results[0].used == 0


# --- Many at once -------------------------------------------------------------------------------------------------------


async def test_64_tasks_on_one_key_admit_exactly_the_limit(
    store: ServerStore, server: ThreadedServer
) -> None:
    limiter = await store.async_limiter("race")

    async def caller() -> int:
        return sum([bool(await limiter.hit("alice")) for _ in range(5)])

    assert sum(await asyncio.gather(*(caller() for _ in range(64)))) == LIMIT
    assert server.connections == 1
    assert not limiter.health.degraded


def test_8_threads_on_one_key_admit_exactly_the_limit(server: ThreadedServer) -> None:
    with ServerStore(server.url, deadline=LONGEST_WAIT) as store:
        limiter = store.limiter("race")
        won = in_threads(8, lambda number: sum(bool(limiter.hit("alice")) for _ in range(40)))
        assert sum(won) == LIMIT
        assert server.connections <= 9
        assert not limiter.health.degraded


async def test_tasks_and_threads_may_share_a_store(store: ServerStore) -> None:
    limiter, async_limiter = store.limiter("race"), await store.async_limiter("race")

    async def task() -> int:
        return sum([bool(await async_limiter.hit("alice")) for _ in range(10)])

    def thread(number: int) -> int:
        return sum(bool(limiter.hit("alice")) for _ in range(20))

    threads = asyncio.create_task(asyncio.to_thread(in_threads, 4, thread))
    tasks = await asyncio.gather(*(task() for _ in range(8)))
    assert sum(tasks) + sum(await threads) == LIMIT


def test_one_call_after_another_shares_a_connection(server: ThreadedServer) -> None:
    with ServerStore(server.url, deadline=LONGEST_WAIT) as store:
        limiter = store.limiter("race")
        for _ in range(20):
            limiter.hit("alice")
        assert server.connections == 1
    server.until_no_connections()


@forking
def test_after_a_fork_each_process_has_connections_of_its_own(server: ThreadedServer) -> None:
    with ServerStore(server.url, deadline=LONGEST_WAIT) as store:
        limiter, async_limiter = store.limiter("race"), asyncio.run(store.async_limiter("race"))
        limiter.hit("alice")

        def in_the_child() -> bool:
            ours = [limiter.hit("alice") for _ in range(10)]
            return all(ours) and bool(asyncio.run(_hit(async_limiter)))

        assert in_child(in_the_child)
        assert limiter.hit("alice").remaining == LIMIT - 13
        assert not limiter.health.degraded


async def _hit(limiter: AsyncLimiter) -> object:
    return await limiter.hit("alice")


def test_one_event_loop_after_another(server: ThreadedServer) -> None:
    """Connections end with their loop; an open one would be a warning, which is an error here."""
    with ServerStore(server.url, deadline=LONGEST_WAIT) as store:
        limiter = asyncio.run(store.async_limiter("race"))
        for _ in range(3):
            assert asyncio.run(_hit(limiter))
        assert store.limiter("race").check("alice", 0).remaining == LIMIT - 3
    server.until_no_connections()


async def test_an_application_in_this_process_needs_no_port(clock: FakeClock) -> None:
    live = AsyncLivePolicy(policy_of(*LIMITERS), clock=clock)
    transport = httpx.ASGITransport(make_app(live))
    async with ServerStore("http://localhost", transport=transport, deadline=LONGEST_WAIT) as store, live:
        limiter = await store.async_limiter("login")
        answers = await asyncio.gather(*(limiter.hit("alice") for _ in range(7)))
        assert [answer.allowed for answer in answers] == [True] * 5 + [False] * 2


async def test_large_calls_are_sent_separately(server: ThreadedServer, store: ServerStore) -> None:
    limiter = await store.async_limiter("race")
    server.use(policy_of(*LIMITERS, largest_body=1024))
    assert all(await asyncio.gather(*(limiter.hit("x" * 200) for _ in range(20))))
    with pytest.raises(ConfigError, match="413"):
        await limiter.hit("x" * 2000)


# --- Access ------------------------------------------------------------------------------------------------------------


def tokens(**tokens: Any) -> dict[str, TokenPolicy]:
    return {
        name: TokenPolicy(hashlib.sha256(f"{name}-secret".encode()).hexdigest(), frozenset(may))
        for name, may in tokens.items()
    }


async def test_a_token_opens_what_it_may(server: ThreadedServer, flavour: Flavour) -> None:
    server.use(policy_of(*LIMITERS, tokens=tokens(gateway=["decide"], admin=["decide", "administer"])))
    for token, may_reset in (("gateway-secret", False), ("admin-secret", True)):
        async with ServerStore(server.url, token=token, deadline=LONGEST_WAIT) as store:
            limiter = flavour("5/minute", name="login", store=store)
            assert await done(limiter.hit(token))
            if may_reset:
                await done(limiter.reset(token))
                assert (await done(limiter.check(token, 0))).remaining == 5
            else:
                with pytest.raises(ConfigError, match="may not administer") as raised:
                    await done(limiter.reset(token))
                assert token not in str(raised.value)
            assert limiter.health.available


@pytest.mark.parametrize("token", ["wrong-secret", None])
async def test_without_its_token_there_are_no_answers(
    server: ThreadedServer, flavour: Flavour, token: str | None
) -> None:
    """Also with a policy that admits in outages, because this is not an outage."""
    server.use(policy_of(*LIMITERS, tokens=tokens(gateway=["decide"])))
    async with ServerStore(server.url, token=token, deadline=LONGEST_WAIT) as store:
        limiter = flavour("5/minute", name="login", store=store, on_store_error="open")
        for call in (limiter.hit, limiter.check, limiter.hold, limiter.record):
            with pytest.raises(ConfigError, match=r"401.*the argument token") as raised:
                await done(call("alice"))
            assert "secret" not in str(raised.value)
        with pytest.raises(ConfigError, match="401"):
            store.limiters()
        assert limiter.health.failures == 0


# --- Mistakes -----------------------------------------------------------------------------------------------------------


async def test_a_limiter_that_is_not_there_is_a_mistake(flavour: Flavour, store: ServerStore) -> None:
    with pytest.raises(ConfigError, match="no limiter 'logon'; it has 'login', 'api'"):
        store.limiter("logon")
    limiter = flavour("5/minute", name="logon", store=store)
    with pytest.raises(ConfigError, match="no limiter 'logon'; did you mean 'login'"):
        await done(limiter.hit("alice"))


async def test_rules_of_other_names_are_a_mistake(flavour: Flavour, store: ServerStore) -> None:
    limiter = flavour("5/hour", name="login", store=store)
    with pytest.raises(ConfigError, match=r"'per-minute' on http.*'per-hour' here"):
        await done(limiter.hit("alice"))


async def test_a_key_of_other_scopes_is_a_mistake_there_too(flavour: Flavour, store: ServerStore) -> None:
    rules = [sliding_window("5/minute", name=rule.name) for rule in LIMITERS[1].rules]
    limiter = flavour(*rules, name="api", store=store)
    with pytest.raises(ConfigError, match=r"422.*count by 'realm', 'user'"):
        await done(limiter.hit("alice"))


async def test_a_changed_limit_applies_at_once(
    server: ThreadedServer, limiter_of: Callable[..., Any]
) -> None:
    limiter = await limiter_of("login")
    await done(limiter.hit("alice", 3))
    server.use(policy_of(limiter_policy("login", (sliding_window("4/minute"),))))
    assert (await done(limiter.hit("alice"))).limit == 4
    assert not await done(limiter.hit("alice"))


# --- Outages ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    config = tmp_path / "headgate.toml"
    config.write_text(
        f"""
        [store]
        url = "sqlite:///{tmp_path}/limits.db"
        [limiters.login]
        rules = ["5/hour"]
        [limiters.llm]
        rules = ["1000/hour"]
        """,
        encoding="utf-8",
    )
    with ServerProcess(config) as process:
        yield process


async def until_back(limiter: AnyLimiter) -> None:
    """Wait until the server answers again."""
    async with asyncio.timeout(LONGEST_WAIT):
        while True:
            try:
                if not (await done(limiter.hit("probe", 0))).degraded:
                    return
            except StoreUnavailable:
                pass
            await asyncio.sleep(0)


async def test_what_was_counted_goes_on_after_a_restart(process: ServerProcess, flavour: Flavour) -> None:
    limiter = flavour("5/hour", name="login", store=process.url, deadline=LONGEST_WAIT)
    llm = flavour("1000/hour", name="llm", store=limiter.store, deadline=LONGEST_WAIT)  # type: ignore[arg-type]
    await done(limiter.hit("alice", 3))
    hold = await done(llm.hold("alice", 800))
    process.kill()
    assert (await done(limiter.hit("alice"))).degraded
    process.start()
    await until_back(limiter)
    assert (await done(limiter.hit("alice"))).remaining == 1
    assert await done(hold.settle(300)) == 300
    assert (await done(llm.check("alice", 0))).remaining == 700
    assert limiter.health.outages == 1
    await close(limiter)


async def test_an_idle_connection_that_a_restart_has_closed_costs_nothing(
    process: ServerProcess, flavour: Flavour
) -> None:
    """It is noticed before anything is sent, so nothing has to be sent twice."""
    limiter = flavour(
        "5/hour", name="login", store=process.url, on_store_error="raise", deadline=LONGEST_WAIT
    )
    await done(limiter.hit("alice"))
    process.stop()
    process.start()
    assert (await done(limiter.hit("alice"))).remaining == 3
    await close(limiter)


async def test_a_server_killed_during_a_call_fails_it_at_once(
    process: ServerProcess, flavour: Flavour
) -> None:
    """Not when its time is up."""
    limiter = flavour("5/hour", name="login", store=process.url, on_store_error="raise", deadline=600)
    await done(limiter.hit("alice"))
    process.signal(signal.SIGSTOP)
    killer = threading.Thread(target=process.kill_during_a_call)
    killer.start()
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1"):
        await done(limiter.hit("alice"))
    killer.join()
    process.start()
    await until_back(limiter)
    # It may have been counted, but not twice.
    assert (await done(limiter.check("alice", 0))).remaining in (
        3,
        4,
    )
    await close(limiter)


async def test_a_server_that_hangs_is_given_up_after_the_deadline(
    process: ServerProcess, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    store = ServerStore(process.url, deadline=DEADLINE)
    limiter = flavour("5/hour", name="login", store=store, on_store_error="raise")
    await done(limiter.hit("alice"))
    process.signal(signal.SIGSTOP)
    deadlines.count = True
    with pytest.raises(StoreUnavailable, match="in time"):
        await done(limiter.hit("alice"))
    for _ in range(1000):  # nobody waits for it any more
        with pytest.raises(StoreUnavailable, match="not asked"):
            await done(limiter.hit("alice"))
    assert limiter.health.failures == 1
    deadlines.count = False
    process.signal(signal.SIGCONT)
    await until_back(limiter)
    await store.aclose()


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [("open", [True] * 6), ("closed", [False] * 6), (local(0.4), [True] * 2 + [False] * 4)],
)
async def test_while_the_server_is_gone_the_policy_answers(
    process: ServerProcess, flavour: Flavour, policy: Any, allowed: list[bool]
) -> None:
    limiter = flavour("5/hour", name="login", store=process.url, on_store_error=policy, deadline=LONGEST_WAIT)
    await done(limiter.hit("alice"))
    process.kill()
    decisions = [await done(limiter.hit("alice")) for _ in range(6)]
    assert [decision.allowed for decision in decisions] == allowed
    assert all(decision.degraded for decision in decisions)
    process.start()
    await until_back(limiter)
    assert (await done(limiter.hit("alice"))).remaining == 3
    assert (limiter.health.outages, limiter.health.failures) == (1, 1)
    await close(limiter)


async def test_what_the_servers_own_store_could_not_record_is_marked(
    process: ServerProcess, flavour: Flavour
) -> None:
    """The server answers by its policy, `"open"`, and only it knows that nothing was counted."""
    limiter = flavour(
        "5/hour", name="login", store=process.url, on_store_error="raise", deadline=LONGEST_WAIT
    )
    assert await done(limiter.record("alice")) == UNLIMITED
    hold = await done(limiter.hold("alice", 2))
    with no_room_for_files(process.pid):
        assert await done(limiter.record("alice", 2)) == UNLIMITED.as_degraded()
        await done(hold.settle(3))
    assert hold.degraded
    await until_back(limiter)
    assert (await done(limiter.check("alice", 0))).remaining == 2
    await close(limiter)


async def test_a_server_that_was_never_there_is_an_outage_too(flavour: Flavour) -> None:
    async with ServerStore("http://127.0.0.1:1") as store:
        limiter = flavour("5/hour", name="login", store=store)
        assert (await done(limiter.hit("alice"))).degraded
        with pytest.raises(StoreUnavailable):
            await done(limiter.reset("alice"))
        with pytest.raises(StoreUnavailable):
            store.limiter("login")
