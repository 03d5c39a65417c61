"""Behaviour of all key-value adapters, and of each adapter."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis.asyncio import Redis

from headgate import AsyncLimiter, ConfigError, StoreUnavailable, sliding_window
from headgate.stores.kv import KVStore, ListingKV, MemoryKV, SQLiteKV, SwappingKV, open_kv, purge
from headgate.stores.kv.cloudflare import CloudflareKV
from headgate.stores.kv.loops import PerLoop
from headgate.stores.kv.redis import RedisKV
from headgate.testing import FakeClock
from tests.unit.kv.cloudflare_server import ACCOUNT, NAMESPACE, TOKEN
from tests.unit.kv.redis_server import with_own_prefix


@pytest.fixture
async def client(redis_server: str) -> AsyncIterator[Redis]:
    """A client of the server, beside the adapter."""
    async with Redis.from_url(redis_server) as client:
        yield client


AWKWARD_KEY = "ratelimit:42:a/b%2F ?*[é]\\"


class TestEveryAdapter:
    async def test_values_are_stored_replaced_and_deleted(self, kv: ListingKV) -> None:
        assert await kv.get(AWKWARD_KEY) is None
        for value in ("7", "n\u00e9 \n\x00 \N{SNOWMAN}"):
            await kv.put(AWKWARD_KEY, value, 60)
            assert await kv.get(AWKWARD_KEY) == value
        for _ in range(2):
            await kv.delete(AWKWARD_KEY)
            assert await kv.get(AWKWARD_KEY) is None

    async def test_keys_are_listed_by_prefix(self, kv: ListingKV) -> None:
        for key in ("a:1", "a:2", "b:1", "a*", AWKWARD_KEY):
            await kv.put(key, "x", 60)
        assert sorted([key async for key in kv.list_keys("a:")]) == ["a:1", "a:2"]
        assert [key async for key in kv.list_keys("a*")] == ["a*"]
        assert [key async for key in kv.list_keys(AWKWARD_KEY)] == [AWKWARD_KEY]
        assert len([key async for key in kv.list_keys()]) == 5

    async def test_purge_removes_keys_by_prefix(self, kv: ListingKV) -> None:
        for key in ("a:1", "a:2", "b:1"):
            await kv.put(key, "x", 60)
        assert await purge(kv, "a:") == 2
        assert [key async for key in kv.list_keys()] == ["b:1"]

    async def test_swapping_needs_the_expected_value(self, kv: ListingKV) -> None:
        if not isinstance(kv, SwappingKV):
            assert kv.guarantees.exact is False  # type: ignore[attr-defined]  # every adapter here has them
            return
        assert not await kv.swap("key", "0", "1", 60)
        assert await kv.get("key") is None
        assert await kv.swap("key", None, "1", 60)
        assert not await kv.swap("key", None, "2", 60)
        assert not await kv.swap("key", "", "2", 60)
        assert await kv.swap("key", "1", "2", 60)
        assert await kv.get("key") == "2"


class TestTimeToLive:
    @pytest.fixture(params=["memory", "sqlite"])
    def timed_kv(self, request: pytest.FixtureRequest, clock: FakeClock) -> ListingKV:
        if request.param == "memory":
            return MemoryKV(clock=clock)
        found: ListingKV = request.getfixturevalue("sqlite_kv")
        return found

    async def test_value_expires_after_its_time_to_live(self, timed_kv: ListingKV, clock: FakeClock) -> None:
        await timed_kv.put("key", "1", 60)
        clock.advance_us(60_000_000 - 1)
        assert await timed_kv.get("key") == "1"
        clock.advance_us(1)
        assert await timed_kv.get("key") is None
        assert [key async for key in timed_kv.list_keys()] == []

    async def test_new_put_restarts_the_time_to_live(self, timed_kv: ListingKV, clock: FakeClock) -> None:
        await timed_kv.put("key", "1", 60)
        clock.advance(59)
        await timed_kv.put("key", "2", 60)
        await timed_kv.put("other", "x", 600)
        clock.advance(59)
        await timed_kv.put("another", "x", 600)
        assert await timed_kv.get("key") == "2"

    async def test_swap_treats_an_expired_value_as_none(self, timed_kv: ListingKV, clock: FakeClock) -> None:
        assert isinstance(timed_kv, SwappingKV)
        await timed_kv.put("key", "1", 60)
        clock.advance(60)
        assert not await timed_kv.swap("key", "1", "2", 60)
        assert await timed_kv.swap("key", None, "2", 60)

    async def test_memory_removes_expired_values(self, clock: FakeClock) -> None:
        kv = MemoryKV(clock=clock)
        for number in range(1000):
            await kv.put(f"key{number}", "1", 60)
            clock.advance(1)
        assert len(kv._entries) <= 61

    async def test_memory_does_not_grow_with_repeated_puts_of_one_key(self, clock: FakeClock) -> None:
        kv = MemoryKV(clock=clock)
        for number in range(1000):
            await kv.put("key", str(number), 60)
            clock.advance(1)
        assert await kv.get("key") == "999"
        assert len(kv._looks) == 1
        clock.advance(120)
        await kv.put("other", "1", 60)
        assert set(kv._entries) == {"other"}

    async def test_sqlite_removes_expired_values(self, sqlite_kv: SQLiteKV, clock: FakeClock) -> None:
        for number in range(1000):
            await sqlite_kv.put(f"key{number}", "1", 60)
            clock.advance(1)
        with sqlite3.connect(sqlite_kv.path) as connection:
            ((rows,),) = connection.execute("SELECT count(*) FROM headgate_kv")
        connection.close()
        assert rows <= 60 + 64

    async def test_redis_keys_have_the_time_to_live(self, redis_kv: RedisKV, client: Redis) -> None:
        await redis_kv.put("put", "1", 3600)
        await redis_kv.swap("swapped", None, "1", 7200)
        assert 3590 < await client.ttl(f"{redis_kv.prefix}put") <= 3600
        assert 7190 < await client.ttl(f"{redis_kv.prefix}swapped") <= 7200


class TestSQLite:
    async def test_values_outlive_the_adapter(self, tmp_path: Path) -> None:
        first = SQLiteKV(tmp_path / "kv.db")
        await first.put("key", "1", 60)
        await first.aclose()
        second = SQLiteKV(tmp_path / "kv.db")
        assert await second.get("key") == "1"
        await second.aclose()

    async def test_exactly_one_concurrent_swap_wins(self, tmp_path: Path) -> None:
        adapters = [SQLiteKV(tmp_path / "kv.db") for _ in range(8)]
        won = await asyncio.gather(*(kv.swap("key", None, str(i), 60) for i, kv in enumerate(adapters)))
        assert sum(won) == 1
        assert await adapters[0].get("key") == str(won.index(True))
        for kv in adapters:
            await kv.aclose()

    async def test_closed_adapter_is_unavailable(self, tmp_path: Path) -> None:
        kv = SQLiteKV(tmp_path / "kv.db")
        await kv.aclose()
        await kv.aclose()
        with pytest.raises(StoreUnavailable, match="closed"):
            await kv.get("key")

    def test_error_names_the_file_that_cannot_be_opened(self, tmp_path: Path) -> None:
        with pytest.raises(StoreUnavailable, match="no-such-folder"):
            SQLiteKV(tmp_path / "no-such-folder" / "kv.db")

    async def test_a_broken_file_is_unavailable(self, tmp_path: Path) -> None:
        kv = SQLiteKV(tmp_path / "kv.db")
        with sqlite3.connect(tmp_path / "kv.db") as connection:
            connection.execute("DROP TABLE headgate_kv")
        connection.close()
        with pytest.raises(StoreUnavailable, match="no such table"):
            await kv.get("key")
        with pytest.raises(StoreUnavailable, match="no such table"):
            await kv.swap("key", None, "1", 60)
        await kv.aclose()

    async def test_child_process_opens_a_new_connection(self, tmp_path: Path) -> None:
        kv = SQLiteKV(tmp_path / "kv.db")
        await kv.put("key", "parent", 60)
        child = multiprocessing.get_context("fork").Process(target=_swap_in_child, args=(kv,))
        child.start()
        child.join(timeout=30)
        child.kill()  # a hanging child is a failure
        assert child.exitcode == 0
        assert await kv.get("key") == "child"
        await kv.aclose()


def _swap_in_child(kv: SQLiteKV) -> None:
    with asyncio.Runner() as runner:
        assert runner.run(kv.swap("key", "parent", "child", 60))
        runner.run(kv.aclose())


class TestRedis:
    async def test_prefixes_separate_keys_in_a_shared_database(
        self, redis_kv: RedisKV, client: Redis
    ) -> None:
        apart = RedisKV(client, prefix=f"{redis_kv.prefix}telegram[1]:")
        await redis_kv.put("key", "theirs", 60)
        await apart.put("key", "ours", 60)
        assert await redis_kv.get("key") == "theirs"
        assert await redis_kv.get("telegram[1]:key") == "ours"
        assert [key async for key in apart.list_keys()] == ["key"]
        assert await apart.swap("key", "ours", "still ours", 60)
        await apart.delete("key")
        assert [key async for key in redis_kv.list_keys()] == ["key"]

    async def test_url_can_contain_the_prefix(self, redis_kv: RedisKV, redis_server: str) -> None:
        kv = RedisKV.from_url(f"{redis_server}?prefix={redis_kv.prefix}bot%5B1%5D:")
        assert kv.prefix == f"{redis_kv.prefix}bot[1]:"
        await kv.put("key", "1", 60)
        await kv.aclose()
        assert await redis_kv.get("bot[1]:key") == "1"

    async def test_value_that_is_not_text_counts_as_none_and_can_be_purged(
        self, redis_kv: RedisKV, client: Redis
    ) -> None:
        store = KVStore(redis_kv, stem=lambda limiter, rule, key: "entry")
        limiter = AsyncLimiter(sliding_window("1/hour"), name="bot", store=store)
        await client.set(f"{redis_kv.prefix}entry", b"\xff")
        assert [bool(await limiter.hit("42")) for _ in range(2)] == [True, False]
        await client.set(redis_kv.prefix.encode() + b"\xfe", b"\xff")
        assert await purge(redis_kv) == 2

    async def test_error_of_an_unavailable_server_hides_the_password(self) -> None:
        kv = RedisKV.from_url("redis://:sesame@127.0.0.1:1/0")
        with pytest.raises(StoreUnavailable) as caught:
            await kv.swap("key", None, "1", 60)
        assert "sesame" not in str(caught.value)
        assert "sesame" not in str(caught.value.__cause__)
        await kv.aclose()

    async def test_a_command_is_never_sent_twice(self, redis_server: str) -> None:
        """If the response of a successful swap is lost, a repeated swap would fail because of the first one."""
        kv = RedisKV.from_url(redis_server)
        retry = kv._clients.own().get_retry()
        assert retry is not None
        assert retry.get_retries() == 0
        await kv.aclose()


class TestOpening:
    def test_url_scheme_selects_the_adapter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert isinstance(open_kv("memory://"), MemoryKV)
        kv = open_kv("sqlite:///limits.db")
        assert isinstance(kv, SQLiteKV)
        assert (tmp_path / "limits.db").exists()
        asyncio.run(kv.aclose())
        assert isinstance(open_kv("redis://localhost/3"), RedisKV)

    @pytest.mark.parametrize(
        "url", ["sqlite:limits.db", "sqlite:///", "postgres://x", "", "redis://host:port"]
    )
    def test_invalid_urls_are_refused(self, url: str) -> None:
        with pytest.raises(ConfigError):
            open_kv(url)


class TestEventLoops:
    @pytest.fixture(params=["sqlite", "redis", "cloudflare"])
    def kv_created_outside_loops(
        self, request: pytest.FixtureRequest, tmp_path: Path, redis_server: str, cloudflare_base: str
    ) -> ListingKV:
        if request.param == "sqlite":
            return SQLiteKV(tmp_path / "kv.db")
        if request.param == "redis":
            return RedisKV.from_url(with_own_prefix(redis_server))
        return CloudflareKV(ACCOUNT, NAMESPACE, TOKEN, api_base=cloudflare_base)

    def test_each_event_loop_has_its_own_connections(self, kv_created_outside_loops: ListingKV) -> None:
        with asyncio.Runner() as first, asyncio.Runner() as second:
            first.run(kv_created_outside_loops.put("key", "1", 60))
            assert second.run(kv_created_outside_loops.get("key")) == "1"
            assert first.run(kv_created_outside_loops.get("key")) == "1"
            for runner in (second, first):
                runner.run(kv_created_outside_loops.aclose())

    def test_objects_of_closed_event_loops_are_dropped(self) -> None:
        async def own() -> asyncio.AbstractEventLoop:
            return loops.own()

        loops = PerLoop(asyncio.get_running_loop)
        for _ in range(3):
            assert asyncio.run(own()).is_closed()
        assert len(loops._made) == 1

    def test_swaps_in_memory_are_atomic_across_threads(self) -> None:
        kv = MemoryKV()

        async def count(_: int) -> int:
            won = 0
            for _ in range(3000):
                seen = await kv.get("key")
                won += await kv.swap("key", seen, str(int(seen or 0) + 1), 60)
            return won

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(4) as pool:
                won = sum(pool.map(lambda number: asyncio.run(count(number)), range(4)))
        finally:
            sys.setswitchinterval(interval)
        assert asyncio.run(kv.get("key")) == str(won)
