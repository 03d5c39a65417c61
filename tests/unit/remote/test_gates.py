"""Tests of gates of remote stores: requests, replies, and cancelled or interrupted callers."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from headgate.decision import UNLIMITED
from headgate.errors import CostTooHigh, StoreConflict
from headgate.keys import Key
from headgate.stores.base import Answer, Receipts
from headgate.stores.remote._async.gate import AsyncRemoteGate
from headgate.stores.remote._sync.gate import RemoteGate
from headgate.stores.remote.encoding import EncodedRequest
from headgate.stores.remote.tasks import AsyncEngine
from headgate.stores.remote.threads import ThreadEngine
from headgate.stores.request import Request
from tests.unit.remote.scripted import PATIENCE, ScriptedPeer

RECEIPTS: Receipts = (("place", (1, 2)),)


class PlainEncoder:
    """Encodes a request as text, for example `hold a`; a reply that begins with `hold` has receipts."""

    def __init__(self) -> None:
        self.trouble: Exception | None = None

    def decide(self, request: Request) -> EncodedRequest[Answer]:
        return f"{request.operation} {request.key!s}", self._read

    def refund(self, receipts: Receipts, cost: int, now: int | None) -> EncodedRequest[None]:
        return f"refund {cost}" if receipts else None, lambda _: None

    def reset(self, key: Key | None) -> EncodedRequest[None]:
        return f"reset {key!s}", lambda _: None

    def _read(self, reply: str) -> Answer:
        if self.trouble is not None:
            raise self.trouble
        return UNLIMITED, RECEIPTS if reply.startswith("hold") else None


@pytest.fixture
def peer() -> ScriptedPeer:
    return ScriptedPeer()


@pytest.fixture
def encoder() -> PlainEncoder:
    return PlainEncoder()


@pytest.fixture
def gate(peer: ScriptedPeer, encoder: PlainEncoder) -> RemoteGate:
    return RemoteGate("scripted", encoder, ThreadEngine(peer, PATIENCE), PATIENCE)


@pytest.fixture
def async_gate(peer: ScriptedPeer, encoder: PlainEncoder) -> AsyncRemoteGate:
    return AsyncRemoteGate("scripted", encoder, AsyncEngine(peer, PATIENCE), PATIENCE)


def sent(peer: ScriptedPeer) -> list[Any]:
    return [request for batch in peer.batches for request in batch]


async def test_every_operation_is_sent_once(
    gate: RemoteGate, async_gate: AsyncRemoteGate, peer: ScriptedPeer
) -> None:
    gate.decide(Request("hit", "a"))
    assert gate.decide(Request("hold", "a"))[1] == RECEIPTS
    gate.refund((), 1, None)  # sends no request
    gate.refund(RECEIPTS, 1, None)
    gate.reset("a")
    expected = ["hit a", "hold a", "refund 1", "reset a"]
    assert sent(peer) == expected
    peer.batches.clear()
    await async_gate.decide(Request("hit", "a"))
    assert (await async_gate.decide(Request("hold", "a")))[1] == RECEIPTS
    await async_gate.refund((), 1, None)
    await async_gate.refund(RECEIPTS, 1, None)
    await async_gate.reset("a")
    assert sent(peer) == expected


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        (struct.error("too short"), StoreConflict),
        (IndexError("none"), StoreConflict),
        (TypeError("not a number"), StoreConflict),
        (CostTooHigh(2, 1, "x"), CostTooHigh),
    ],
)
async def test_an_unreadable_reply_becomes_a_store_error(
    gate: RemoteGate,
    async_gate: AsyncRemoteGate,
    encoder: PlainEncoder,
    trouble: Exception,
    expected: type[Exception],
) -> None:
    encoder.trouble = trouble
    with pytest.raises(expected):
        gate.decide(Request("hit", "a"))
    with pytest.raises(expected):
        await async_gate.decide(Request("hit", "a"))


async def test_a_hold_of_a_cancelled_task_is_released(
    async_gate: AsyncRemoteGate, peer: ScriptedPeer
) -> None:
    peer.is_open = False
    hold = asyncio.ensure_future(async_gate.decide(Request("hold", "a", 3)))
    await peer.until_sent_async(1)
    hold.cancel()
    await asyncio.wait([hold])
    peer.open()
    await peer.until_sent_async(2)
    assert sent(peer) == ["hold a", "refund 3"]


@pytest.mark.parametrize("trouble", [CostTooHigh(3, 1, "x"), IndexError("tuple index out of range")])
async def test_a_cancelled_hold_that_took_nothing_returns_nothing(
    async_gate: AsyncRemoteGate, peer: ScriptedPeer, encoder: PlainEncoder, trouble: Exception
) -> None:
    peer.is_open = False
    hold = asyncio.ensure_future(async_gate.decide(Request("hold", "a", 3)))
    await peer.until_sent_async(1)
    hold.cancel()
    await asyncio.wait([hold])
    encoder.trouble = trouble
    peer.open()
    await async_gate.refund(RECEIPTS, 1, None)
    assert sent(peer) == ["hold a", "refund 1"]


async def test_a_cancelled_hold_with_an_unreadable_reply_stays_cancelled(
    async_gate: AsyncRemoteGate, peer: ScriptedPeer, encoder: PlainEncoder
) -> None:
    encoder.trouble = IndexError("tuple index out of range")
    hold = asyncio.ensure_future(async_gate.decide(Request("hold", "a", 3)))
    peer.answer = lambda requests: asyncio.get_running_loop().call_soon(hold.cancel) and list(requests)
    await asyncio.wait([hold])
    assert hold.cancelled()


async def test_an_invalid_reply_to_a_cancelled_hold_affects_no_other_call(
    peer: ScriptedPeer, encoder: PlainEncoder
) -> None:
    engine = AsyncEngine(peer, PATIENCE)
    gate = AsyncRemoteGate("scripted", encoder, engine, PATIENCE)
    peer.is_open = False
    hold = asyncio.ensure_future(gate.decide(Request("hold", "a")))
    other = asyncio.ensure_future(gate.reset("b"))
    await peer.until_sent_async(1)
    hold.cancel()
    encoder.trouble = TypeError("no such reply")
    peer.open()
    await other
    with pytest.raises(asyncio.CancelledError):
        await hold
    assert len(peer.batches[0]) == 2
    assert len(peer.wires) == 1
    await engine.aclose()
