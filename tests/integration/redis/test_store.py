"""The store on real servers: keys, expiry, conflicts, scripts, clients and forks."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import struct
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from headgate import (
    AsyncLimiter,
    ConfigError,
    Limiter,
    StoreConflict,
    StoreMisconfigured,
    StoreUnavailable,
    calendar,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.stores.redis import RedisStore, codec
from headgate.stores.redis.codec import Operation, ScriptCall
from headgate.testing.servers import RedisServer
from tests.faults.proxy import FaultProxy
from tests.integration.waiting import until
from tests.unit.flavours import Flavour, done

RULES = {
    "fixed_window": fixed_window("5/day"),  # by the server's clock: a minute could end during a test
    "sliding_window": sliding_window("5/minute"),
    "sliding_log": sliding_log("5/minute"),
    "token_bucket": token_bucket("5/minute"),
}
HOUR_MS = 3_600_000
PATIENCE = 30


@pytest.fixture
def store(url: str) -> Iterator[RedisStore]:
    with RedisStore(url) as store:
        yield store


def keys_of(client: redis.Redis, name: str) -> list[bytes]:
    found: Any = client.keys(f"*{name}*")
    return sorted(found)


async def test_threads_and_tasks_count_together(store: RedisStore, name: str) -> None:
    sync, tasks = (
        Limiter("5/minute", name=name, store=store),
        AsyncLimiter("5/minute", name=name, store=store),
    )
    assert await tasks.hit("alice", 3)
    assert await asyncio.to_thread(sync.hit, "alice", 2)
    assert not await tasks.hit("alice")
    await store.aclose()


def test_url_may_be_a_unix_socket(server: RedisServer, name: str) -> None:
    with Limiter("1/minute", name=name, store=server.unix_url) as limiter:
        assert limiter.hit("alice")
        assert not limiter.hit("alice")


def test_url_scheme_may_be_valkey(server: RedisServer, name: str) -> None:
    with Limiter("1/minute", name=name, store=server.url.replace("redis://", "valkey://")) as limiter:
        assert not limiter.hit("alice").degraded
        assert not limiter.hit("alice")


def test_time_comes_from_the_server(store: RedisStore, client: redis.Redis, name: str) -> None:
    limiter = Limiter(token_bucket("1/minute"), name=name, store=store)
    seconds, rest = client.time()
    limiter.hit("alice")
    later, more = client.time()
    [key] = keys_of(client, name)
    value: Any = client.get(key)
    assert seconds * 1_000_000 + rest <= struct.unpack("<7d", value)[2] <= later * 1_000_000 + more


def test_a_refusal_writes_nothing(store: RedisStore, client: redis.Redis, name: str) -> None:
    limiter = Limiter("1/minute", "5/hour", name=name, store=store)
    assert limiter.hit("alice")
    before = changes(client)
    assert not limiter.hit("alice")
    assert not limiter.check("alice")
    assert limiter.hit("alice", 0)
    assert changes(client) == before


def changes(client: redis.Redis) -> int:
    """Return how many changes of data the server has counted."""
    persistence: Any = client.info("persistence")
    count: int = persistence["rdb_changes_since_last_save"]
    return count


@pytest.mark.parametrize("kind", RULES)
def test_state_expires_at_its_reset_time(
    store: RedisStore, client: redis.Redis, name: str, kind: str
) -> None:
    limiter = Limiter(RULES[kind], name=name, store=store)
    for _ in range(2):  # the first makes a state, the second finds one
        decision = limiter.hit("alice")
        [key] = keys_of(client, name)
        assert decision.reset_after is not None
        milliseconds: Any = client.pttl(key)
        # Some time has passed between the two; a busy machine may have taken seconds.
        assert decision.reset_after * 1000 - 30_000 < milliseconds < decision.reset_after * 1000 + 3


@pytest.mark.parametrize("kind", ["sliding_log", "token_bucket"])
def test_longer_lasting_hit_extends_the_expiry_of_the_state(
    store: RedisStore, client: redis.Redis, name: str, kind: str
) -> None:
    limiter = Limiter(RULES[kind], name=name, store=store)
    limiter.hit("alice")
    [key] = keys_of(client, name)
    client.pexpire(key, 10_000)
    limiter.hit("alice")
    milliseconds: Any = client.pttl(key)
    assert milliseconds > 10_000


@pytest.mark.parametrize("kind", RULES)
def test_state_with_a_given_time_is_kept_an_hour_longer(
    store: RedisStore, client: redis.Redis, name: str, kind: str
) -> None:
    limiter = Limiter(RULES[kind], name=name, store=store)
    for _ in range(2):
        decision = limiter.hit("alice", now=1_000.0)
        [key] = keys_of(client, name)
        assert decision.reset_after is not None
        milliseconds: Any = client.pttl(key)
        assert HOUR_MS < milliseconds < HOUR_MS + decision.reset_after * 1000 + 3
        client.pexpire(key, 60_000)  # as if nearly an hour had passed: the next hit keeps it for another one


def test_reset_deletes_the_state(store: RedisStore, client: redis.Redis, name: str) -> None:
    limiter = Limiter(*RULES.values(), name=name, store=store)
    limiter.hit("alice")
    limiter.reset("alice")
    assert keys_of(client, name) == []


# --- Names -----------------------------------------------------------------------------------------------------------


def test_applications_are_separated_by_namespace(url: str, name: str) -> None:
    with RedisStore(url, namespace="one") as one, RedisStore(url, namespace="two") as two:
        assert Limiter("1/minute", name=name, store=one).hit("alice")
        assert Limiter("1/minute", name=name, store=two).hit("alice")


# --- Conflicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("in_the_way", ["list", "text"])
def test_other_data_under_our_key_is_a_conflict(
    store: RedisStore, client: redis.Redis, name: str, kind: str, in_the_way: str
) -> None:
    limiter = Limiter(RULES[kind], name=name, store=store, on_store_error="raise")
    hold = limiter.hold("alice")
    [key] = keys_of(client, name)
    client.delete(key)
    client.lpush(key, "1") if in_the_way == "list" else client.set(key, "1")
    for call in (limiter.hit, limiter.check, limiter.record, limiter.hold):
        with pytest.raises(StoreConflict, match="under a key of Headgate"):
            call("alice")
    with pytest.raises(StoreConflict):
        hold.release()
    assert limiter.hit("bob")
    limiter.reset("alice")
    assert limiter.hit("alice")


@pytest.mark.parametrize("kind", RULES)
def test_invalid_numbers_in_a_state_are_not_an_outage(
    store: RedisStore, client: redis.Redis, name: str, kind: str
) -> None:
    limiter = Limiter(RULES[kind], name=name, store=store, on_store_error="raise")
    hold = limiter.hold("alice")
    [key] = keys_of(client, name)
    for call in (limiter.check, limiter.hit, limiter.hold, lambda _: hold.release()):
        client.set(key, struct.pack("<4d", -(2**63), 2**53 - 1, 2**53 - 1, -(2**63)))
        with contextlib.suppress(StoreConflict):
            call("alice")
    assert limiter.hit("bob")


def test_a_rule_in_conflict_charges_none_of_the_others(
    store: RedisStore, client: redis.Redis, name: str
) -> None:
    limiter = Limiter(*RULES.values(), name=name, store=store, on_store_error="raise")
    limiter.hit("alice")
    keys = keys_of(client, name)
    client.delete(*keys)
    client.lpush(keys[-1], "1")
    with pytest.raises(StoreConflict):
        limiter.hit("alice")
    assert keys_of(client, name) == [keys[-1]]


def test_lost_scripts_are_loaded_again(store: RedisStore, client: redis.Redis, name: str) -> None:
    limiter = Limiter("5/minute", name=name, store=store, on_store_error="raise")
    for expected in (4, 3, 2):
        client.script_flush()
        assert limiter.hit("alice").remaining == expected
    calls = client.info("commandstats")["cmdstat_eval"]["calls"]
    assert limiter.hit("alice").remaining == 1
    assert client.info("commandstats")["cmdstat_eval"]["calls"] == calls


def test_a_server_without_memory_refuses_and_counts_nothing(name: str) -> None:
    with (
        RedisServer("redis", ("--maxmemory", "1", "--maxmemory-policy", "noeviction")) as server,
        Limiter("5/minute", name=name, store=server.url, on_store_error="raise") as limiter,
        pytest.raises(StoreUnavailable, match="used memory"),
    ):
        limiter.hit("alice")


def test_read_only_replica_is_a_misconfiguration(server: RedisServer, name: str) -> None:
    server.command("REPLICAOF", "127.0.0.1", "1")
    with (
        Limiter("5/minute", name=name, store=server.url, on_store_error="raise") as limiter,
        pytest.raises(StoreMisconfigured, match="read only replica"),
    ):
        limiter.hit("alice")


RIGHTS = ("evalsha", "eval", "get", "getrange", "set", "setrange", "pexpireat", "del", "time")
"""The commands that a user of the server must be allowed, as docs/how-to/redis.md lists them."""

QUEUE_RIGHTS = (
    *("zadd", "zrem", "zrangebylex", "zrevrangebylex", "hget", "hset", "hdel"),
    *("pexpire", "pttl", "exists", "publish", "subscribe"),
)
"""The additional commands for waiting calls."""


def test_documented_rights_are_sufficient_for_waiting(server: RedisServer, name: str) -> None:
    commands = (f"+{word}" for word in (*RIGHTS, *QUEUE_RIGHTS))
    keys = ("~8:headgate*", "~order:8:headgate*", "~tickets:8:headgate*")
    server.command(
        "ACL", "SETUSER", "limited", "on", ">secret", *keys, "resetchannels", "&headgate:*", *commands
    )
    url = server.url.replace("//", "//limited:secret@")
    with Limiter(concurrent(1, lease=60), name=name, store=url, on_store_error="raise") as limiter:
        first = limiter.hold("alice", timeout=5)
        waiting = Thread(target=lambda: limiter.hold("alice", timeout=PATIENCE).release())
        waiting.start()
        first.release()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()


def test_without_rights_for_queues_calls_are_admitted_in_any_order(
    server: RedisServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.command(
        "ACL", "SETUSER", "limited", "on", ">secret", "~8:headgate*", *(f"+{word}" for word in RIGHTS)
    )
    url = server.url.replace("//", "//limited:secret@")
    with Limiter(concurrent(1, lease=60), name=name, store=url, on_store_error="raise") as limiter:
        for _ in range(2):
            limiter.hold("alice", timeout=5).release()
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "in any order" in caplog.text


async def test_missing_rights_for_queues_do_not_affect_other_calls(
    server: RedisServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls of tasks that run at the same time are sent together."""
    server.command(
        "ACL", "SETUSER", "limited", "on", ">secret", "~8:headgate*", *(f"+{word}" for word in RIGHTS)
    )
    url = server.url.replace("//", "//limited:secret@")
    async with AsyncLimiter(concurrent(9, lease=60), name=name, store=url, on_store_error="raise") as limiter:
        await limiter.hold("alice")
        assert all(await asyncio.gather(limiter.hold("bob", timeout=5), limiter.hold("carol")))
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_documented_rights_are_sufficient(server: RedisServer, name: str) -> None:
    server.command(
        "ACL", "SETUSER", "limited", "on", ">secret", "~8:headgate*", *(f"+{word}" for word in RIGHTS)
    )
    url = server.url.replace("//", "//limited:secret@")
    with Limiter(*RULES.values(), name=name, store=url, on_store_error="raise") as limiter:
        limiter.hold("alice").release()
        limiter.record("alice")
        limiter.check("alice")
        limiter.reset("alice")
    with Limiter(sliding_log("1000/minute"), name=name, store=url, on_store_error="raise") as limiter:
        for _ in range(400):
            limiter.hit("alice")
        limiter.hold("alice").release()


# --- Given clients ---------------------------------------------------------------------------------------------------


def test_given_client_works_in_threads(url: str, name: str) -> None:
    with redis.Redis.from_url(url, decode_responses=True) as client, RedisStore(client) as store:
        limiter = Limiter("1/minute", name=name, store=store, on_store_error="raise")
        assert limiter.hit("alice")
        assert not limiter.hit("alice")


async def test_given_client_works_in_tasks(url: str, name: str) -> None:
    async with (
        redis.asyncio.Redis.from_url(url, decode_responses=True) as client,
        RedisStore(client) as store,
    ):
        limiter = AsyncLimiter("1/minute", name=name, store=store, on_store_error="raise")
        assert await limiter.hit("alice")
        assert not await limiter.hit("alice")


def test_retries_of_a_given_client_are_disabled(server: RedisServer) -> None:
    with (
        FaultProxy(server.port) as proxy,
        redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 10)) as eager,
        RedisStore(eager) as store,
    ):
        limiter = Limiter("5/hour", name="x", store=store)
        limiter.hit("warm")
        proxy.mode = "lose replies"
        assert limiter.hit("alice").degraded
        with Limiter("5/hour", name="x", store=server.url, on_store_error="raise") as direct:
            assert direct.check("alice", 0).remaining == 4


def test_async_client_is_refused_in_threads() -> None:
    client = redis.asyncio.Redis()
    with pytest.raises(ConfigError, match=r"redis\.asyncio"):
        Limiter("1/minute", name="x", store=RedisStore(client))


async def test_sync_client_is_refused_in_tasks() -> None:
    with pytest.raises(ConfigError, match=r"redis\.asyncio"):
        AsyncLimiter("1/minute", name="x", store=RedisStore(redis.Redis()))


def test_invalid_client_is_refused() -> None:
    with pytest.raises(ConfigError, match="a URL or a client"):
        RedisStore(42)  # type: ignore[arg-type]


# --- Event loops, forks, closing -------------------------------------------------------------------------------------


def test_connection_is_closed_when_its_event_loop_ends(url: str, client: redis.Redis, name: str) -> None:
    store = RedisStore(f"{url}?client_name={name}")
    limiter = AsyncLimiter("3/minute", name=name, store=store, on_store_error="raise")

    async def hit() -> None:
        await limiter.hit("alice")

    asyncio.run(hit())
    until(lambda: name not in {entry["name"] for entry in client.client_list()})


def _hit_in_child(limiter: Limiter, outcome: Any, may_end: Any) -> None:
    outcome.put([bool(limiter.hit("alice")) for _ in range(3)])
    may_end.wait(30)


def test_forked_process_opens_a_connection(url: str, client: redis.Redis, name: str) -> None:
    with Limiter("5/minute", name=name, store=f"{url}?client_name={name}", on_store_error="raise") as limiter:
        assert limiter.hit("alice")
        context = multiprocessing.get_context("fork")
        outcome, may_end = context.Queue(), context.Event()
        child = context.Process(target=_hit_in_child, args=(limiter, outcome, may_end))
        child.start()
        assert outcome.get(timeout=30) == [True, True, True]
        assert [entry["name"] for entry in client.client_list()].count(name) == 2
        may_end.set()
        child.join()
        assert limiter.hit("alice")
        assert not limiter.hit("alice")


async def test_a_closed_store_raises(url: str, name: str, flavour: Flavour) -> None:
    async with RedisStore(url) as store:
        limiter = flavour("5/minute", name=name, store=store, on_store_error="raise")
        await done(limiter.hit("alice"))
    with pytest.raises(StoreUnavailable, match="closed"):
        await done(limiter.hit("alice"))


def test_a_server_whose_clock_keeps_jumping_is_unavailable(server: RedisServer, name: str) -> None:
    """A call is retried once: nothing was charged, and its caller waits."""
    plan = codec.plans((calendar("5/day"),)).own
    call = plan.decide(Operation.HIT, (b"key",), 1, 0)
    wrong = call.body[:3] + plan.decide(Operation.HIT, (b"key",), 1, None).body[3:27] + call.body[27:]
    with RedisStore(server.url) as store:
        engine = store._threads.at(store.endpoint)
        with pytest.raises(StoreUnavailable, match="EDGES"):
            engine.call(ScriptCall((b"key",), wrong, lambda _: wrong), time.monotonic() + 30)
