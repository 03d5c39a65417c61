"""Many at once: parallel messages (TL-3), several front ends (TL-2), and redeliveries (TL-4)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headgate.stores.kv import SQLiteKV
from headgate.stores.kv.cloudflare import CloudflareKV
from headgate.stores.kv.redis import RedisKV
from headgate.testing import FakeClock
from headgate_services.telegram.seen import SeenUpdates
from tests.apps.telegram.conftest import Handler, RecordingKV, Service
from tests.apps.telegram.updates import text_update
from tests.unit.kv.cloudflare_server import ACCOUNT, NAMESPACE, TOKEN, CloudflareServer
from tests.unit.kv.redis_server import with_own_prefix

Start = Callable[..., Awaitable[Service]]
ALGORITHMS = ["fixed_window", "sliding_window"]


async def flood(services: list[Service], messages: int = 50) -> None:
    responses = await asyncio.gather(
        *(services[i % len(services)].post(text_update()) for i in range(messages))
    )
    assert {response.status_code for response in responses} == {200}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestOneFrontEnd:
    """50 parallel messages, a maximum of 20: exactly 20 are dispatched."""

    async def test_memory(self, algorithm: str, start: Start) -> None:
        await self.check(await start(RATE_LIMIT_ALGORITHM=algorithm))

    async def test_sqlite(self, algorithm: str, start: Start, tmp_path: Path, clock: FakeClock) -> None:
        kv = SQLiteKV(tmp_path / "kv.db", clock=clock)
        await self.check(await start(kv=kv, RATE_LIMIT_ALGORITHM=algorithm))
        await kv.aclose()

    async def test_redis(self, algorithm: str, start: Start, redis_server: str) -> None:
        kv = RedisKV.from_url(with_own_prefix(redis_server))
        await self.check(await start(kv=kv, RATE_LIMIT_ALGORITHM=algorithm))
        await kv.aclose()

    async def test_cloudflare(
        self, algorithm: str, start: Start, cloudflare_at: tuple[CloudflareServer, str], clock: FakeClock
    ) -> None:
        """Reads a minute old and a write per second and key, as its documentation says."""
        server, base = cloudflare_at
        server.start_over(clock)
        server.lag = 60
        server.writes_per_second_are_limited = True
        kv = CloudflareKV(ACCOUNT, NAMESPACE, TOKEN, api_base=base, clock=clock)
        await self.check(await start(kv=kv, RATE_LIMIT_ALGORITHM=algorithm))
        await kv.aclose()

    async def check(self, service: Service) -> None:
        await flood([service])
        assert len(service.handler.events) == 20
        assert len(service.bot.sent()) == 30


@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestTwoFrontEnds:
    """Two processes that share only the store are exact if it supports swap."""

    async def test_sqlite(self, algorithm: str, start: Start, tmp_path: Path, clock: FakeClock) -> None:
        stores = [SQLiteKV(tmp_path / "kv.db", clock=clock) for _ in range(2)]
        await self.check(start, stores, algorithm)

    async def test_redis(self, algorithm: str, start: Start, redis_server: str) -> None:
        url = with_own_prefix(redis_server)
        stores = [RedisKV.from_url(url) for _ in range(2)]
        await self.check(start, stores, algorithm)

    async def check(self, start: Start, stores: list[SQLiteKV] | list[RedisKV], algorithm: str) -> None:
        handler = Handler()
        await flood(
            [await start(kv=kv, handler=handler, RATE_LIMIT_ALGORITHM=algorithm) for kv in stores], 60
        )
        for kv in stores:
            await kv.aclose()
        assert len(handler.events) == 20


class TestRedelivery:
    async def test_an_update_counts_and_is_dispatched_once(self, service: Service, kv: RecordingKV) -> None:
        sent = text_update()
        await service.send(sent, sent, sent)
        assert len(service.handler.events) == 1
        assert list((await kv.content()).values()) == ["1"]

    async def test_a_redelivery_that_overtakes_the_first_waits_for_it(
        self, service: Service, kv: RecordingKV
    ) -> None:
        go_on = asyncio.Event()
        service.handler.before = go_on.wait
        sent = text_update()
        both = [asyncio.create_task(service.post(sent)) for _ in range(2)]
        await service.handler.entered.wait()
        go_on.set()
        assert [response.status_code for response in await asyncio.gather(*both)] == [200, 200]
        assert len(service.handler.events) == 1
        assert kv.calls == ["get", "put"]

    async def test_a_redelivery_that_waited_takes_over_if_the_first_fails(
        self, service: Service, kv: RecordingKV
    ) -> None:
        attempts = iter([RuntimeError("down"), None])

        async def next_attempt() -> None:
            await asyncio.sleep(0)
            service.handler.error = next(attempts)

        service.handler.before = next_attempt
        sent = text_update()
        responses = await asyncio.gather(service.post(sent), service.post(sent))
        assert sorted(response.status_code for response in responses) == [200, 500]
        assert len(service.handler.events) == 1
        assert list((await kv.content()).values()) == ["1"]

    async def test_a_slow_dispatch_does_not_keep_the_users_other_messages_waiting(
        self, service: Service
    ) -> None:
        go_on = asyncio.Event()
        service.handler.before = go_on.wait
        slow = asyncio.create_task(service.post(text_update(text="slow")))
        await service.handler.entered.wait()
        service.handler.before = None
        await service.send(text_update(text="quick"))
        go_on.set()
        await slow
        assert service.handler.texts == ["quick", "slow"]

    async def test_a_refused_update_that_comes_again_is_ignored(self, start: Start, clock: FakeClock) -> None:
        """The user was told so once; the same update gets no second reply, and is not dispatched in the next window."""
        service = await start(RATE_LIMIT_MAX="1")
        refused = text_update(text="b")
        await service.send(text_update(text="a"), refused, refused)
        assert len(service.bot.sent()) == 1
        clock.advance(3600)
        await service.send(refused)
        assert service.handler.texts == ["a"]

    async def test_a_stopping_server_gives_the_unit_back(self, service: Service, kv: RecordingKV) -> None:
        service.handler.before = asyncio.Event().wait
        request = asyncio.create_task(service.post(text_update()))
        await service.handler.entered.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert list((await kv.content()).values()) == ["0"]

    async def test_the_memory_of_updates_is_bounded(self) -> None:
        seen = SeenUpdates(capacity=3)
        for update_id in range(5):
            await seen.add(update_id)
        is_new = []
        for update_id in range(6):
            async with seen.turn(update_id) as new:
                is_new.append(new)
        assert is_new == [True, True, False, False, False, True]
