"""Notes on a real server: keys, expiry, and lost replies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from headgate import AsyncLimiter, StoreConflict
from headgate.keys import note_key
from headgate.stores.redis import RedisStore
from tests.integration.redis.cluster import running_cluster


async def test_note_expires_on_the_server(url: str, name: str, client: redis.Redis) -> None:
    async with RedisStore(url) as store:
        await store.note(name, "text", 90.0004)
        left: Any = client.pttl(note_key("headgate", name))
        assert 80_000 < left <= 90_001
        client.pexpire(note_key("headgate", name), 0)
        assert await store.get_note(name) is None
        assert await store.note(name, "another", 3_000_000_000) == "another"
        left = client.pttl(note_key("headgate", name))
        assert 2_999_999_000_000 < left <= 3_000_000_000_000


async def test_noting_the_same_text_again_extends_its_lifetime(
    url: str, name: str, client: redis.Redis
) -> None:
    async with RedisStore(url) as store:
        for seconds in (60, 6_000, 60):
            assert await store.note(name, "text", seconds) == "text"
        left: Any = client.pttl(note_key("headgate", name))
        assert 60_000 < left <= 6_000_000


async def test_notes_are_separated_by_namespace(url: str, name: str) -> None:
    async with RedisStore(url, namespace="one") as one, RedisStore(url, namespace="two") as two:
        assert await one.note(name, "first", 60) == "first"
        assert await two.note(name, "second", 60) == "second"


async def test_notes_and_decisions_share_round_trips(url: str, name: str) -> None:
    async with RedisStore(url, deadline=30) as store:
        limiter = AsyncLimiter("50/minute", name=name, store=store)
        work = [
            limiter.hit("a") if number % 2 else store.note(f"{name}{number}", "text", 60)
            for number in range(200)
        ]
        answers = await asyncio.gather(*work)
        assert answers[::2] == ["text"] * 100
        assert sum(bool(answer) for answer in answers[1::2]) == 50


async def test_other_data_under_a_note_key_is_a_conflict(url: str, name: str, client: redis.Redis) -> None:
    client.rpush(note_key("headgate", name), "not a note")
    async with RedisStore(url) as store:
        with pytest.raises(StoreConflict):
            await store.note(name, "text", 60)
        with pytest.raises(StoreConflict):
            await store.get_note(name)
        client.delete(note_key("headgate", name))
        client.set(note_key("headgate", name), b"\xff")
        with pytest.raises(StoreConflict):
            await store.get_note(name)


async def test_notes_with_braces_in_their_names_work_in_a_cluster() -> None:
    with running_cluster("redis") as cluster:
        async with RedisStore(cluster.url, cluster=True, deadline=30) as store:
            names = ["{a}", "{}", "}{", "a{b}c", *map(str, range(50))]
            kept = await asyncio.gather(*(store.note(name, f"text of {name}", 60) for name in names))
            assert kept == [f"text of {name}" for name in names]
            assert await asyncio.gather(*map(store.get_note, names)) == kept
