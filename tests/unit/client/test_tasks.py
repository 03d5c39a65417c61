"""Batches of calls from tasks: cancellation, failures and repeated calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from headgate import ConfigError, Decision
from headgate.client import ServerStore
from headgate.client.peer import MOST_BYTES
from headgate.errors import StoreConflict
from headgate.rules import sliding_window
from headgate.stores.base import AsyncGate
from headgate.stores.remote.batching import MOST_PER_BATCH
from headgate.stores.request import Request
from tests.unit.client.scripted import Asked, Reply, ScriptedServer, problem, usual_reply

RULES = (sliding_window("5/minute"),)


class GatedServer(ScriptedServer):
    """Answers no request before the test opens it."""

    def __init__(self) -> None:
        super().__init__(self._answer_when_open)
        self.is_open = asyncio.Event()
        self.answer = usual_reply

    async def _answer_when_open(self, asked: Asked) -> Any:
        await self.is_open.wait()
        return self.answer(asked)

    async def until_asked(self, times: int) -> None:
        """Wait for this number of requests."""
        async with asyncio.timeout(30):
            while len(self.asked) < times:  # noqa: ASYNC110  # there are only a few requests
                await asyncio.sleep(0)


@pytest.fixture
async def server() -> GatedServer:
    return GatedServer()


@pytest.fixture
async def gate(server: GatedServer) -> AsyncIterator[AsyncGate]:
    async with ServerStore("http://x", transport=server.transport, deadline=30) as store:
        yield store.bind_async("login", RULES)
        server.is_open.set()


def hit(gate: AsyncGate, key: str, cost: int = 1) -> asyncio.Future[Any]:
    return asyncio.ensure_future(decision_of(gate, Request("hit", key, cost)))


async def decision_of(gate: AsyncGate, request: Request) -> Decision:
    return (await gate.decide(request))[0]


async def busy(gate: AsyncGate, server: GatedServer) -> asyncio.Future[Any]:
    """Start a round trip, so that later calls have to wait."""
    call = hit(gate, "busy")
    await server.until_asked(1)
    return call


def calls_of(asked: Asked) -> list[str]:
    return [call["key"] for call in asked.body["calls"]]


async def test_concurrent_calls_are_sent_as_one_batch(gate: AsyncGate, server: GatedServer) -> None:
    server.is_open.set()
    decisions = await asyncio.gather(*(hit(gate, f"{number}") for number in range(30)))
    assert all(decisions)
    assert [calls_of(asked) for asked in server.asked] == [[f"{number}" for number in range(30)]]


async def test_batch_is_limited_in_calls_and_bytes(gate: AsyncGate, server: GatedServer) -> None:
    first = await busy(gate, server)
    many = [hit(gate, "x") for _ in range(3 * MOST_PER_BATCH)]
    await asyncio.sleep(0)
    server.is_open.set()
    await asyncio.gather(first, *many)
    assert [len(asked.body.get("calls", [0])) for asked in server.asked] == [1, *[MOST_PER_BATCH] * 3]
    server.asked.clear()
    await asyncio.gather(
        *(hit(gate, "x" * (MOST_BYTES // 2 - 100)) for _ in range(3)), hit(gate, "y" * MOST_BYTES)
    )
    assert sorted(len(asked.body.get("calls", [0])) for asked in server.asked) == [1, 1, 2]


async def test_all_operations_but_a_reset_may_share_a_batch(gate: AsyncGate, server: GatedServer) -> None:
    first = await busy(gate, server)
    waiting = [
        asyncio.ensure_future(operation)
        for operation in (
            gate.decide(Request("hit", "a")),
            gate.decide(Request("peek", "b")),
            gate.decide(Request("record", "c")),
            gate.decide(Request("hold", "d")),
            gate.reset("e"),
            gate.decide(Request("hit", "f")),
        )
    ]
    await asyncio.sleep(0)
    server.is_open.set()
    await asyncio.gather(first, *waiting)
    assert sorted(server.paths[1:]) == ["/v1/batch", "/v1/limiters/login/hit", "/v1/limiters/login/reset"]
    [batch] = [asked for asked in server.asked if asked.path == "/v1/batch"]
    assert [call["operation"] for call in batch.body["calls"]] == ["hit", "check", "record", "hold"]


async def test_failed_call_does_not_fail_others_in_its_batch(gate: AsyncGate, server: GatedServer) -> None:
    def answer(asked: Asked) -> Reply:
        status, body = usual_reply(asked)
        if asked.path == "/v1/batch":
            body["answers"][1] = {"status": 404, "body": problem(404, "no such limiter")[1]}
            body["answers"][2] = {"status": 503, "body": problem(503, "down")[1]}
        return status, body

    server.answer = answer
    server.is_open.set()
    outcomes = await asyncio.gather(*(hit(gate, f"{number}") for number in range(4)), return_exceptions=True)
    assert [type(outcome).__name__ for outcome in outcomes] == [
        "Decision",
        "ConfigError",
        "StoreUnavailable",
        "Decision",
    ]


async def test_refused_batch_fails_every_call(gate: AsyncGate, server: GatedServer) -> None:
    server.answer = lambda asked: problem(401, "who are you?")
    server.is_open.set()
    outcomes = await asyncio.gather(*(hit(gate, "x") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(outcome, ConfigError) for outcome in outcomes)
    assert len(server.asked) == 1


async def test_a_batch_that_is_too_large_for_the_server_is_sent_one_by_one(
    gate: AsyncGate, server: GatedServer
) -> None:
    server.answer = lambda asked: (
        problem(413, "too large") if asked.path == "/v1/batch" else usual_reply(asked)
    )
    server.is_open.set()
    assert all(await asyncio.gather(*(hit(gate, "x") for _ in range(3))))
    assert server.paths == ["/v1/batch", *["/v1/limiters/login/hit"] * 3]


async def test_invalid_batch_response_is_a_conflict(gate: AsyncGate, server: GatedServer) -> None:
    server.answer = lambda asked: (200, {"answers": []})
    server.is_open.set()
    outcomes = await asyncio.gather(*(hit(gate, "x") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(outcome, StoreConflict) for outcome in outcomes)


# --- Failures -----------------------------------------------------------------------------------------------------------


async def test_only_repeatable_calls_of_a_lost_batch_are_repeated(
    gate: AsyncGate, server: GatedServer
) -> None:
    server.is_open.set()
    _, receipts = await gate.decide(Request("hold", "alice", 3))
    assert receipts is not None
    server.asked.clear()

    def fail_first_request(asked: Asked) -> Reply:
        if len(server.asked) == 1:
            raise httpx.ReadError("reset by peer")
        return usual_reply(asked)

    server.answer = fail_first_request
    outcomes = await asyncio.gather(
        hit(gate, "a"), gate.refund(receipts, 1, None), hit(gate, "b"), return_exceptions=True
    )
    assert [type(outcome).__name__ for outcome in outcomes] == [
        "StoreUnavailable",
        "NoneType",
        "StoreUnavailable",
    ]
    assert server.paths == ["/v1/batch", "/v1/holds/id-alice/settle"]
