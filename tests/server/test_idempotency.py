"""Calls with an Idempotency-Key charge once, however often they are sent, on every store that keeps notes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from headgate import MemoryStore
from headgate.errors import StoreUnavailable
from headgate.stores.base import AsyncNotes
from headgate.testing import FakeClock
from headgate_server import idempotency
from headgate_server.idempotency import KEPT_SECONDS, IdempotentCalls
from headgate_server.operations import problem_from
from headgate_server.problems import ApiProblem
from tests.server.hold_places import OpenStore
from tests.server.support import Server, problem

KEY = {"Idempotency-Key": "order-66"}


async def hit(server: Server, cost: int = 1, **more: Any) -> httpx.Response:
    return await server.post("/v1/limiters/login/hit", {"key": "alice", "cost": cost}, headers=KEY, **more)


async def used(server: Server) -> int:
    answer = await server.answer("/v1/inspect", {"key": "alice"})
    return next(int(one["results"][0]["used"]) for one in answer["limiters"] if one["name"] == "login")


async def test_a_call_sent_again_counts_once_and_gets_the_same_answer() -> None:
    server = Server()
    first, second = await hit(server), await hit(server)
    assert first.content == second.content
    assert ("idempotency-replayed" in first.headers, second.headers["idempotency-replayed"]) == (
        False,
        "true",
    )
    assert first.headers["content-type"] == second.headers["content-type"]
    assert await used(server) == 1


async def test_a_hold_sent_again_is_the_same_hold() -> None:
    server = Server()
    body = {"key": "alice", "cost": 4}
    answers = [(await server.post("/v1/limiters/login/hold", body, headers=KEY)).json() for _ in range(2)]
    assert answers[0]["hold"] == answers[1]["hold"]
    assert await used(server) == 4


async def test_refusals_and_errors_are_replayed() -> None:
    server = Server()
    for _ in range(2):
        assert problem(await hit(server, 6), 422).startswith("a cost of 6")
    assert (
        problem(await hit(server, 1), 422) == "this Idempotency-Key was used for another call; use a new one"
    )
    assert await used(server) == 0


@pytest.mark.parametrize("key", ["", "two words", "x" * 256])
async def test_invalid_idempotency_key_is_refused(key: str) -> None:
    server = Server()
    answer = await server.post("/v1/limiters/login/hit", {"key": "alice"}, headers={"Idempotency-Key": key})
    assert "1 to 255 visible" in problem(answer, 400)
    assert await used(server) == 0


async def test_an_unknown_limiter_is_unknown_with_a_key_too() -> None:
    answer = await Server().post("/v1/limiters/nowhere/hit", {"key": "alice"}, headers=KEY)
    assert "there is no limiter 'nowhere'" in problem(answer, 404)


class Work:
    """A call that charges, and may fail or wait."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made = 0
        self._error = error

    async def __call__(self) -> dict[str, int]:
        self.made += 1
        await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        return {"made": self.made}


async def made(
    calls: IdempotentCalls, notes: AsyncNotes | None, work: Work, caller: str = "", key: bytes = b"key"
) -> bytes:
    return (await calls.answer(notes, key, caller, "/path", b"{}", work)).body


async def test_workers_that_share_a_store_make_the_call_once(open_store: OpenStore) -> None:
    stores, work = [open_store(), open_store()], Work()
    answers = await asyncio.gather(
        *(made(IdempotentCalls(problem_from), stores[i % 2], work) for i in range(6))
    )
    assert set(answers) == {b'{"made":1}'}
    assert await made(IdempotentCalls(problem_from), stores[0], work, "another caller") == b'{"made":2}'


async def test_a_call_whose_outcome_is_unknown_is_not_made_again(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "PAUSES", ())
    calls = IdempotentCalls(problem_from)
    work = Work(StoreUnavailable("gone"))
    with pytest.raises(ApiProblem) as first:
        await made(calls, store, work)
    with pytest.raises(ApiProblem) as second:
        await made(calls, store, work)
    assert (first.value.status, second.value.status, work.made) == (503, 409, 1)


async def test_idempotency_key_expires() -> None:
    clock, work = FakeClock(), Work()
    store, calls = MemoryStore(clock=clock), IdempotentCalls(problem_from)
    for seconds, made_before in ((0, 1), (KEPT_SECONDS - 1, 1), (1, 2)):
        clock.advance(seconds)
        assert await made(calls, store, work) == b'{"made":%d}' % made_before


async def test_idempotency_keys_are_limited_per_caller(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEYS", 2)
    now = [0.0]
    calls, work = IdempotentCalls(problem_from, lambda: now[0]), Work()
    for key in (b"1", b"1", b"2"):  # to repeat a call takes no key more
        now[0] += 1
        await made(calls, store, work, "shop", key)
    with pytest.raises(ApiProblem, match="2 Idempotency-Keys") as refused:
        await made(calls, store, work, "shop", b"3")
    assert refused.value.fields == ((b"retry-after", b"%d" % (KEPT_SECONDS - 2)),)
    assert await made(calls, store, work, "shop", b"1") == b'{"made":1}'  # its answer may have got lost
    await made(calls, store, work, "another", b"3")
    now[0] = KEPT_SECONDS + 1
    assert await made(calls, store, work, "shop", b"3") == b'{"made":4}'


async def test_store_without_notes_is_refused() -> None:
    with pytest.raises(ApiProblem, match="does not support"):
        await made(IdempotentCalls(problem_from), None, Work())
