"""The client against a real server: in a thread, and as a process that is stopped, killed and restarted."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from headgate import (
    AsyncLimiter,
    Limiter,
    RateLimited,
    StoreUnavailable,
    fixed_window,
    penalty,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.client import ServerStore
from headgate.decision import UNLIMITED
from headgate.outage import local
from headgate.policy import AsyncLivePolicy
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


# --- The same answers ---------------------------------------------------------------------------------------------------


async def test_rules_come_over_unchanged(store: ServerStore) -> None:
    for limiters in (store.limiters(), await store.async_limiters()):
        for shown, policy in zip(limiters, LIMITERS, strict=True):
            assert (shown.name, shown.rules, shown.shadow) == (policy.name, policy.rules, policy.shadow)
            assert (shown.store, shown.default_tier, shown.headers) == (
                "memory://",
                policy.default_tier,
                "both",
            )


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


async def test_tasks_and_threads_may_share_a_store(store: ServerStore) -> None:
    limiter, async_limiter = store.limiter("race"), await store.async_limiter("race")

    async def task() -> int:
        return sum([bool(await async_limiter.hit("alice")) for _ in range(10)])

    def thread(number: int) -> int:
        return sum(bool(limiter.hit("alice")) for _ in range(20))

    threads = asyncio.create_task(asyncio.to_thread(in_threads, 4, thread))
    tasks = await asyncio.gather(*(task() for _ in range(8)))
    assert sum(tasks) + sum(await threads) == LIMIT


@pytest.mark.parametrize("flavour", [Limiter, AsyncLimiter])
async def test_holds_with_a_penalty_settle_and_confirm(flavour: Flavour) -> None:
    rules = (sliding_log("3/h"), penalty("1d", after=1))
    with ThreadedServer(policy_of(limiter_policy("logins", rules))) as server:
        limiter = flavour(*rules, name="logins", store=ServerStore(server.url, deadline=LONGEST_WAIT))
        try:
            settled, empty = await done(limiter.hold("a")), await done(limiter.hold("a", 0))
            await done(settled.settle(3))
            for _ in range(2):
                assert (await done(empty.confirm(1))).denied_by == "per-hour"
            with pytest.raises(RateLimited) as refused:
                await done(limiter.wait("a", timeout=0))
            assert refused.value.decision.denied_by == "penalty"
        finally:
            await close(limiter)


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


async def test_an_application_in_this_process_needs_no_port(clock: FakeClock) -> None:
    live = AsyncLivePolicy(policy_of(*LIMITERS), clock=clock)
    transport = httpx.ASGITransport(make_app(live))
    async with ServerStore("http://localhost", transport=transport, deadline=LONGEST_WAIT) as store, live:
        limiter = await store.async_limiter("login")
        answers = await asyncio.gather(*(limiter.hit("alice") for _ in range(7)))
        assert [answer.allowed for answer in answers] == [True] * 5 + [False] * 2


# --- Outages ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for all tests, which use different keys; each leaves it running."""
    folder = tmp_path_factory.mktemp("server")
    config = folder / "headgate.toml"
    config.write_text(
        f"""
        [store]
        url = "sqlite:///{folder}/limits.db"
        [limiters.login]
        rules = ["5/hour"]
        [limiters.llm]
        rules = ["1000/hour"]
        """,
        encoding="utf-8",
    )
    with ServerProcess(config, folder / "log.txt") as process:
        yield process


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    name: str = request.node.name
    return name


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


async def test_what_was_counted_goes_on_after_a_restart(
    process: ServerProcess, flavour: Flavour, key: str
) -> None:
    limiter = flavour("5/hour", name="login", store=process.url, deadline=LONGEST_WAIT)
    llm = flavour("1000/hour", name="llm", store=limiter.store, deadline=LONGEST_WAIT)  # type: ignore[arg-type]
    await done(limiter.hit(key, 3))
    hold = await done(llm.hold(key, 800))
    process.kill()
    assert (await done(limiter.hit(key))).degraded
    process.start()
    await until_back(limiter)
    assert (await done(limiter.hit(key))).remaining == 1
    assert await done(hold.settle(300)) == 300
    assert (await done(llm.check(key, 0))).remaining == 700
    assert limiter.health.outages == 1
    await close(limiter)


async def test_an_idle_connection_that_a_restart_has_closed_costs_nothing(
    process: ServerProcess, flavour: Flavour, key: str
) -> None:
    """It is noticed before anything is sent, so nothing has to be sent twice."""
    limiter = flavour(
        "5/hour", name="login", store=process.url, on_store_error="raise", deadline=LONGEST_WAIT
    )
    await done(limiter.hit(key))
    process.stop()
    process.start()
    assert (await done(limiter.hit(key))).remaining == 3
    await close(limiter)


async def test_a_server_killed_during_a_call_fails_it_at_once(
    process: ServerProcess, flavour: Flavour, key: str
) -> None:
    """Not when its time is up."""
    limiter = flavour("5/hour", name="login", store=process.url, on_store_error="raise", deadline=600)
    await done(limiter.hit(key))
    process.signal(signal.SIGSTOP)
    killer = threading.Thread(target=process.kill_during_a_call)
    killer.start()
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1"):
        await done(limiter.hit(key))
    killer.join()
    process.start()
    await until_back(limiter)
    # It may have been counted, but not twice.
    assert (await done(limiter.check(key, 0))).remaining in (
        3,
        4,
    )
    await close(limiter)


async def test_a_server_that_hangs_is_given_up_after_the_deadline(
    process: ServerProcess, flavour: Flavour, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    store = ServerStore(process.url, deadline=DEADLINE)
    limiter = flavour("5/hour", name="login", store=store, on_store_error="raise")
    await done(limiter.hit(key))
    process.signal(signal.SIGSTOP)
    deadlines.count = True
    with pytest.raises(StoreUnavailable, match="in time"):
        await done(limiter.hit(key))
    for _ in range(1000):  # nobody waits for it any more
        with pytest.raises(StoreUnavailable, match="not called"):
            await done(limiter.hit(key))
    assert limiter.health.failures == 1
    deadlines.count = False
    process.signal(signal.SIGCONT)
    await until_back(limiter)
    await store.aclose()


async def test_what_the_servers_own_store_could_not_record_is_marked(
    process: ServerProcess, flavour: Flavour, key: str
) -> None:
    """The server answers by its policy, `"open"`, and only it knows that nothing was counted."""
    limiter = flavour(
        "5/hour", name="login", store=process.url, on_store_error="raise", deadline=LONGEST_WAIT
    )
    assert await done(limiter.record(key)) == UNLIMITED
    hold = await done(limiter.hold(key, 2))
    with no_room_for_files(process.pid):
        assert await done(limiter.record(key, 2)) == UNLIMITED.as_degraded()
        await done(hold.settle(3))
    assert hold.degraded
    await until_back(limiter)
    assert (await done(limiter.check(key, 0))).remaining == 2
    await close(limiter)
