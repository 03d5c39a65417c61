"""A real cluster: slots that differ, slots that move, nodes that die."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.crc import key_slot

from headgate import (
    AsyncLimiter,
    ConfigError,
    Decision,
    Limiter,
    Rule,
    StoreMisconfigured,
    StoreUnavailable,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.stores.redis import RedisStore
from headgate.stores.redis.slots import tagged_keys
from headgate.stores.request import Request
from headgate.testing.servers import find_free_port
from tests.integration.redis.cluster import Cluster, running_cluster
from tests.integration.waiting import until

SCOPED = (
    sliding_window("3/minute", scope="user", name="user"),
    token_bucket("5/minute", scope="team", name="team"),
    sliding_log("7/minute", scope="place", name="place"),
    fixed_window("100/hour", scope="*", name="all"),
)
WHO = {"user": "alice", "team": "north", "place": "here"}


@pytest.fixture(scope="module", params=["redis", "valkey"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running_cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
def store(cluster: Cluster) -> Iterator[RedisStore]:
    with RedisStore(cluster.url, cluster=True) as store:
        yield store


@pytest.fixture
async def async_store(cluster: Cluster) -> AsyncIterator[RedisStore]:
    async with RedisStore(cluster.url, cluster=True) as store:
        yield store


def slots_of(name: str, rules: tuple[Rule, ...], who: Any, tag: Any = "key") -> list[int]:
    return [int(key_slot(key)) for key in tagged_keys("headgate", name, rules, tag)(who)]


def limiter_on(store: RedisStore, *rules: Any, name: str) -> Limiter:
    return Limiter(*rules, name=name, store=store, on_store_error="raise")


def test_keys_are_spread_over_all_nodes(store: RedisStore, cluster: Cluster, name: str) -> None:
    limiter = limiter_on(store, "1/minute", name=name)
    before = cluster.keys()
    assert all(limiter.hit(f"user {i}") for i in range(60))
    assert not any(limiter.hit(f"user {i}") for i in range(60))
    assert all(after > count for after, count in zip(cluster.keys(), before, strict=True))


async def test_tasks_reach_all_nodes_in_few_round_trips(
    async_store: RedisStore, cluster: Cluster, name: str
) -> None:
    limiter = AsyncLimiter("10/minute", name=name, store=async_store, on_store_error="raise")
    await asyncio.gather(*(limiter.hit(f"warm {i}") for i in range(30)))
    before = cluster.round_trips()
    assert all(await asyncio.gather(*(limiter.hit(f"user {i % 3}") for i in range(30))))
    assert cluster.round_trips() - before == len(
        {slots_of(name, limiter.rules, f"user {i}")[0] for i in range(3)}
    )
    assert not any(await asyncio.gather(*(limiter.hit(f"user {i}") for i in range(3))))


def test_rules_with_the_same_key_share_a_slot(store: RedisStore, cluster: Cluster, name: str) -> None:
    limiter = limiter_on(store, "5/minute", "50/hour", token_bucket("500/day"), name=name)
    limiter.hit("alice")
    before = cluster.round_trips()
    assert limiter.hit("alice")
    assert cluster.round_trips() - before == 1


def test_all_keys_of_a_limiter_can_share_one_slot(cluster: Cluster, name: str) -> None:
    with RedisStore(cluster.url, cluster=True, hash_tag="limiter") as store:
        limiter = limiter_on(store, *SCOPED, name=name)
        limiter.hit(WHO)
        before = cluster.round_trips()
        assert limiter.hit(WHO)
        assert cluster.round_trips() - before == 1
        assert limiter.hold(WHO).confirm()


def test_braces_in_a_key_do_not_select_the_slot(name: str) -> None:
    rules = (sliding_window("1/minute"),)
    hostile = [f"{{a}}{i}" for i in range(100)]
    assert len({slots_of(name, rules, key)[0] for key in hostile}) > 50
    assert len({slots_of(name, rules, key, "limiter")[0] for key in hostile}) == 1


def test_rules_with_different_scopes_need_all_keys_in_one_slot(store: RedisStore, name: str) -> None:
    with pytest.raises(ConfigError, match=r"""'\*', 'place', 'team', 'user'.*hash_tag="limiter"""):
        limiter_on(store, *SCOPED, name=name)
    with pytest.raises(ConfigError, match='hash_tag="limiter"'):
        limiter_on(store, "5/minute", sliding_window("9/minute", scope="*"), name=name)
    assert limiter_on(store, *SCOPED[:1], token_bucket("9/minute", scope="user"), name=name).hit(
        {"user": "a"}
    )


async def test_a_cancelled_hold_is_released(cluster: Cluster, name: str) -> None:
    async with RedisStore(cluster.url, cluster=True, hash_tag="limiter") as store:
        limiter = AsyncLimiter(*SCOPED, name=name, store=store, on_store_error="raise")
        await limiter.check(WHO)
        hold = asyncio.ensure_future(asyncio.wait_for(limiter.hold(WHO, 2), None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        hold.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hold

        async def left() -> list[int]:
            return [result.remaining for result in (await limiter.check(WHO, 0)).results]

        for _ in range(10_000):
            if await left() == [3, 5, 7, 100]:
                break
        assert await left() == [3, 5, 7, 100]


async def test_a_cancelled_record_is_completed_before_the_slots_are_known(
    async_store: RedisStore, name: str
) -> None:
    limiter = AsyncLimiter("5/minute", name=name, store=async_store, on_store_error="raise")
    record = asyncio.ensure_future(limiter.record("alice", 2))
    await asyncio.sleep(0)
    record.cancel()
    with pytest.raises(asyncio.CancelledError):
        await record
    for _ in range(10_000):
        if (await limiter.check("alice", 0)).remaining == 3:
            break
    assert (await limiter.check("alice", 0)).remaining == 3


@pytest.mark.parametrize("turns", [1, 2, 5, 10, 20])
async def test_holds_cancelled_before_close_are_released(cluster: Cluster, name: str, turns: int) -> None:
    rules = (fixed_window("100/day"),)
    async with RedisStore(cluster.url, cluster=True) as store:
        gate = store.bind_async(name, rules)
        await gate.decide(Request("peek", "warm"))
        holds = [asyncio.ensure_future(gate.decide(Request("hold", f"{n}"))) for n in range(9)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for hold in holds:
            hold.cancel()
    await asyncio.wait(holds)
    kept = [not hold.cancelled() for hold in holds]
    with RedisStore(cluster.url, cluster=True) as store:
        left = [store.bind(name, rules).decide(Request("peek", f"{n}", 0))[0].remaining for n in range(9)]
    assert left == [100 - is_kept for is_kept in kept]


# --- Clients and invalid options -------------------------------------------------------------------------------------


def test_given_cluster_client_works_in_threads(cluster: Cluster, name: str) -> None:
    client = redis.RedisCluster.from_url(cluster.url)
    with RedisStore(client) as store:
        limiter = limiter_on(store, "3/minute", name=name)
        assert [bool(limiter.hit("alice")) for _ in range(4)] == [True, True, True, False]
    client.close()


async def test_given_cluster_client_works_in_tasks(cluster: Cluster, name: str) -> None:
    async with redis.asyncio.RedisCluster.from_url(cluster.url) as client, RedisStore(client) as store:
        limiter = AsyncLimiter("3/minute", name=name, store=store, on_store_error="raise")
        assert [bool(await limiter.hit("alice")) for _ in range(4)] == [True, True, True, False]


def test_missing_cluster_option_is_named_in_the_error(cluster: Cluster, name: str) -> None:
    with RedisStore(cluster.url) as store:
        limiter = limiter_on(store, "5/minute", name=name)
        with pytest.raises(StoreMisconfigured, match="cluster=True"):
            [limiter.hit(f"user {i}") for i in range(20)]


def test_unknown_hash_tag_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="hash_tag"):
        RedisStore(cluster.url, cluster=True, hash_tag="user")  # type: ignore[arg-type]


def test_failed_node_affects_only_its_slots_until_it_recovers(name: str) -> None:
    with running_cluster("redis") as cluster, RedisStore(cluster.url, cluster=True, deadline=5) as store:
        gate = store.bind(name, limiter_on(store, "5/minute", name=name).rules)
        users = [f"user {i}" for i in range(30)]
        owners = [cluster.owner(slots_of(name, (sliding_window("5/minute"),), user)[0]) for user in users]
        cluster.nodes[2].kill()
        for user, owner in zip(users, owners, strict=True):
            if owner == 2:
                with pytest.raises(StoreUnavailable):
                    gate.decide(Request("hit", user))
            else:
                assert gate.decide(Request("hit", user))[0]
        cluster.nodes[2].start()
        cluster._await_agreement()
        assert all(gate.decide(Request("hit", user))[0] for user in users)


# --- By URL, under load -------------------------------------------------------------------------------------------------

KEYS, LIMIT = 40, 25


def seeds(cluster: Cluster) -> str:
    """Return the URL of a cluster; its first node is unreachable."""
    nodes = ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
    return f"redis+cluster://127.0.0.1:{find_free_port()},{nodes}"


async def test_url_can_select_a_cluster(cluster: Cluster, name: str) -> None:
    store = RedisStore(seeds(cluster), deadline=10)
    threads = Limiter("60/minute", name=name, store=store, on_store_error="raise")
    tasks = AsyncLimiter("60/minute", name=name, store=store, on_store_error="raise")
    threads.ping()
    await tasks.ping()
    assert all(threads.hit(f"user {i}") for i in range(20))
    assert {(await tasks.hit(f"user {i}")).remaining for i in range(20)} == {58}
    await store.aclose()


def moving_keys(cluster: Cluster, name: str) -> list[tuple[str, int]]:
    """Return keys that the first node has, and their slots."""
    found = []
    for number in range(10_000):
        [slot] = slots_of(name, (sliding_log(f"{LIMIT}/hour"),), str(number))
        if cluster.owner(slot) == 0 and slot not in [other for _, other in found]:
            found.append((str(number), slot))
        if len(found) == KEYS:
            return found
    raise AssertionError("the first node has too few slots")


def move_all(cluster: Cluster, slots: list[int], source: int, target: int) -> None:
    for slot in slots:
        cluster.move(slot, source, target)


def test_threads_count_exactly_while_slots_move(cluster: Cluster, name: str) -> None:
    keys = moving_keys(cluster, name)
    slots = [slot for _, slot in keys]
    with RedisStore(seeds(cluster), deadline=30) as store:
        limiter = Limiter(sliding_log(f"{LIMIT}/hour"), name=name, store=store, on_store_error="raise")
        is_moved = threading.Event()

        def call(which: list[tuple[str, int]]) -> int:
            admitted = 0
            for attempt in itertools.count():
                admitted += sum(bool(limiter.hit(key)) for key, _ in which)
                if is_moved.is_set() and attempt > 2 * LIMIT:
                    return admitted
            raise AssertionError

        with ThreadPoolExecutor(4) as threads:
            callers = [threads.submit(call, keys[part::2]) for part in (0, 1, 0, 1)]
            try:
                move_all(cluster, slots, 0, 1)
            finally:
                is_moved.set()
                admitted = sum(caller.result() for caller in callers)
                move_all(cluster, slots, 1, 0)
    assert admitted == KEYS * LIMIT


async def test_calls_follow_a_promoted_replica(cluster: Cluster, name: str) -> None:
    with cluster.replica_of(0) as replica:
        async with RedisStore(seeds(cluster), deadline=10) as store:
            limiter = AsyncLimiter("1000000/hour", name=name, store=store)
            await limiter.ping()
            is_over = asyncio.Event()

            async def call(number: int) -> None:
                while not is_over.is_set():
                    assert isinstance(await limiter.hit(str(number)), Decision)

            callers = [asyncio.ensure_future(call(number)) for number in range(32)]
            try:
                await asyncio.to_thread(cluster.hand_over, replica)
                await asyncio.to_thread(
                    until, lambda: b"cmdstat_evalsha" in replica.command("INFO", "commandstats")
                )
            finally:
                is_over.set()
                await asyncio.gather(*callers)
            assert not any([(await limiter.hit(str(number))).degraded for number in range(32)])
