"""Many at once: parallel messages (TL-3), several front ends (TL-2), and redeliveries (TL-4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from headgate.stores.kv import KV, SQLiteKV
from headgate.stores.kv.cloudflare import CloudflareKV
from headgate.stores.kv.redis import RedisKV
from headgate.testing import FakeClock
from headgate_services.telegram.seen import SeenUpdates
from tests.apps.telegram.conftest import Handler, RecordingKV, Service, Start
from tests.apps.telegram.updates import text_update
from tests.unit.kv.cloudflare_server import ACCOUNT, NAMESPACE, TOKEN
from tests.unit.kv.redis_server import with_own_prefix

ALGORITHMS = ["fixed_window", "sliding_window"]


async def flood(services: list[Service], messages: int = 50) -> None:
    responses = await asyncio.gather(
        *(services[i % len(services)].post(text_update()) for i in range(messages))
    )
    assert {response.status_code for response in responses} == {200}


@pytest.fixture
async def open_kv(
    request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock
) -> AsyncIterator[Callable[[], KV]]:
    """A function that opens the store of the parameter; each call is a separate process's view of it."""
    if request.param == "redis":
        url = with_own_prefix(request.getfixturevalue("redis_server"))
    if request.param == "cloudflare":  # reads are up to a minute old, and a key takes one write per second
        server, base = request.getfixturevalue("cloudflare_at")
        server.start_over(clock)
        server.lag = 60
        server.writes_per_second_are_limited = True
    make: dict[str, Callable[[], Any]] = {
        "memory": lambda: RecordingKV(clock),
        "sqlite": lambda: SQLiteKV(tmp_path / "kv.db", clock=clock),
        "redis": lambda: RedisKV.from_url(url),
        "cloudflare": lambda: CloudflareKV(ACCOUNT, NAMESPACE, TOKEN, api_base=base, clock=clock),
    }
    async with AsyncExitStack() as stack:

        def open_one() -> KV:
            kv = make[request.param]()
            stack.push_async_callback(kv.aclose)
            return cast(KV, kv)

        yield open_one


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("open_kv", ["memory", "sqlite", "redis", "cloudflare"], indirect=True)
async def test_50_parallel_messages_with_a_maximum_of_20_dispatch_exactly_20(
    algorithm: str, start: Start, open_kv: Callable[[], KV]
) -> None:
    service = await start(kv=open_kv(), RATE_LIMIT_ALGORITHM=algorithm)
    await flood([service])
    assert len(service.handler.events) == 20
    assert len(service.bot.sent()) == 30


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("open_kv", ["sqlite", "redis"], indirect=True)
async def test_two_processes_on_a_store_with_swap_are_exact(
    algorithm: str, start: Start, open_kv: Callable[[], KV]
) -> None:
    handler = Handler()
    services = [await start(kv=open_kv(), handler=handler, RATE_LIMIT_ALGORITHM=algorithm) for _ in range(2)]
    await flood(services, 60)
    assert len(handler.events) == 20


class TestRedelivery:
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
