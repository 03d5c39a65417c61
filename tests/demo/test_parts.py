"""The parts of the demo by themselves."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from headgate import ConfigError
from headgate.testing.postgres_server import PostgresServer
from headgate_server.hosting import listen, url_of
from headgate_services.demo import DemoError
from headgate_services.demo.bot_api import BotApiStandIn
from headgate_services.demo.data import running_servers
from headgate_services.demo.hosting import Hosted, listen_near
from headgate_services.demo.running import check_loopback
from headgate_services.demo.services import environment
from headgate_services.demo.traffic import Caller, DemoTraffic


class TestPorts:
    def test_a_free_port_is_used(self) -> None:
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        with listen_near("127.0.0.1", port) as listener:
            assert listener.getsockname()[1] == port

    def test_a_taken_one_gives_way_to_one_that_nobody_else_wants(self) -> None:
        with listen("127.0.0.1", 0) as taken:
            port = taken.getsockname()[1]
            reserved = range(port, port + 50)
            with listen_near("127.0.0.1", port, reserved) as listener:
                assert listener.getsockname()[1] not in reserved

    def test_the_url_of_an_ipv6_socket_has_brackets(self) -> None:
        try:
            listener = listen("::1", 0)
        except ConfigError:
            listener = None
        if listener is None:
            pytest.skip("this machine has no IPv6")
        with listener:
            assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
    def test_the_loopback_interface_is_fine(self, host: str) -> None:
        check_loopback(host)


def test_an_environment_is_replaced_and_restored() -> None:
    before = dict(os.environ)

    def fail() -> None:
        with environment({"A": "1"}):
            assert dict(os.environ) == {"A": "1"}
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert dict(os.environ) == before


def test_only_kept_data_waits_for_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Ctrl-C takes seconds on a busy machine, for files that are then removed."""
    started: list[Mapping[str, str]] = []
    monkeypatch.setattr(PostgresServer, "start", lambda server: started.append(server.settings) or server)
    for keep in (None, folder):
        with running_servers(keep, lambda name: None):
            pass
    assert started == [{"fsync": "off", "full_page_writes": "off"}, {}]


async def test_the_bot_api_counts_refusals() -> None:
    bot_api = BotApiStandIn("too many")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(bot_api.app), base_url="http://bot") as client:
        for text in ("hello", "too many", "too many"):
            answer = await client.post("/bot1:x/sendMessage", json={"chat_id": 1, "text": text})
            assert answer.json()["ok"] is True
    assert bot_api.refusals == 2


class TestTraffic:
    async def test_callers_call_only_while_it_is_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        called = asyncio.Event()

        async def call() -> None:
            called.set()

        traffic = DemoTraffic([Caller("eager", 10_000, call)], on=False)
        wait, is_waiting = traffic._switch.wait, asyncio.Event()

        async def watched() -> bool:
            is_waiting.set()
            return await wait()

        monkeypatch.setattr(traffic._switch, "wait", watched)
        task = asyncio.create_task(traffic.run())
        await asyncio.wait_for(is_waiting.wait(), 30)
        assert not called.is_set()
        traffic.on = True
        await asyncio.wait_for(called.wait(), 30)
        task.cancel()
        await asyncio.wait([task])

    async def test_no_answer_stops_nobody_else(self) -> None:
        calls = asyncio.Semaphore(0)

        async def fail() -> None:
            raise httpx.ConnectError("nobody there")

        async def call() -> None:
            calls.release()

        traffic = DemoTraffic([Caller("unlucky", 10_000, fail), Caller("lucky", 1_000, call)], on=True)
        task = asyncio.create_task(traffic.run())
        for _ in range(5):
            await asyncio.wait_for(calls.acquire(), 30)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])


class TestHosting:
    async def test_an_application_that_cannot_start_is_told_and_harms_nobody(self) -> None:
        async def broken(scope: object, receive: object, send: object) -> None:
            raise RuntimeError("no luck")

        good = Hosted("good", BotApiStandIn("x").app, listen("127.0.0.1", 0))
        bad = Hosted("bad", broken, listen("127.0.0.1", 0))
        await good.start()
        with pytest.raises(DemoError, match="bad did not start"):
            await bad.start()
        await bad.stop()
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.post(f"{good.url}/bot1:x/getMe", json={})).status_code == 200
        await good.stop()

    async def test_an_end_is_told_unless_it_was_wanted(self) -> None:
        ended: list[str] = []
        stopped, dying = (
            Hosted(name, BotApiStandIn("x").app, listen("127.0.0.1", 0)) for name in ("stopped", "dying")
        )
        for hosted in (stopped, dying):
            await hosted.start()
            hosted.on_end(lambda gone: ended.append(gone.name))
        await stopped.stop()
        assert dying._task is not None
        dying._task.cancel()
        await asyncio.wait([dying._task])
        await asyncio.sleep(0)
        assert ended == ["dying"]
        await dying.stop()

    async def test_a_stopped_one_does_not_listen(self) -> None:
        hosted = Hosted("it", BotApiStandIn("x").app, listen("127.0.0.1", 0))
        await hosted.start()
        await hosted.stop()
        port = int(hosted.url.rpartition(":")[2])
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
