"""`confirm` and `renew` of holds, in threads and tasks."""

from __future__ import annotations

from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    CostTooHigh,
    Limiter,
    RateLimited,
    SQLiteStore,
    concurrent,
    sliding_log,
    token_bucket,
)
from headgate.errors import StoreUnavailable
from headgate.stores.base import Answer, Receipts
from headgate.stores.request import Request
from headgate.testing import FakeClock, ReferenceStore
from tests.unit.flavours import AnyLimiter, done
from tests.unit.recorder import Recorder

Flavour = type[Limiter] | type[AsyncLimiter]


@pytest.fixture
def store(tmp_path: Any, clock: FakeClock) -> Any:
    with SQLiteStore(tmp_path / "limits.db", clock=clock) as store:
        yield store


def made(flavour: Flavour, store: SQLiteStore, *rules: Any, **options: Any) -> AnyLimiter:
    return flavour(*rules, name="moves", store=store, **options)


async def test_ended_hold_cannot_be_confirmed(flavour: Flavour, store: SQLiteStore) -> None:
    limiter = made(flavour, store, sliding_log("5/minute"))
    released, settled = await done(limiter.hold("a", 2)), await done(limiter.hold("a", 2))
    await done(released.release())
    await done(settled.settle(1))
    refused = await done(limiter.hold("a", 5))
    assert not await done(released.confirm())
    assert await done(settled.confirm())
    assert await done(refused.confirm()) == refused.decision
    assert (await done(limiter.check("a", 0))).remaining == 4


async def test_confirm_above_the_capacity_leaves_the_hold_open(flavour: Flavour, store: SQLiteStore) -> None:
    limiter = made(flavour, store, sliding_log("5/minute"))
    hold = await done(limiter.hold("a", 2))
    with pytest.raises(CostTooHigh):
        await done(hold.confirm(6))
    with pytest.raises(ConfigError):
        await done(hold.confirm({"typo": 1}))
    assert hold.final is None
    assert await done(hold.release()) == 0


class FailingMoves:
    """A gate that raises for every move of a hold."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate
        self.asked: list[Request] = []

    def decide(self, request: Request) -> Answer:
        self.asked.append(request)
        if request.replaces is not None:
            raise StoreUnavailable("no answer")
        answer: Answer = self.gate.decide(request)
        return answer

    def refund(self, receipts: Receipts, cost: Any, now: int | None) -> None:
        self.gate.refund(receipts, cost, now)


def test_confirm_with_an_unknown_outcome_is_not_retried() -> None:
    limiter = Limiter(sliding_log("5/minute"), name="moves", store=ReferenceStore(clock=FakeClock()))
    gate = FailingMoves(limiter.gate)
    limiter.gate = gate  # type: ignore[assignment]
    hold = limiter.hold("a", 2)
    with pytest.raises(StoreUnavailable):
        hold.confirm()
    hold.confirm()
    hold.release()
    assert [request.operation for request in gate.asked] == ["hold", "hold"]


async def test_a_lease_is_renewed(flavour: Flavour, store: SQLiteStore, clock: FakeClock) -> None:
    limiter = made(flavour, store, concurrent(1, lease="1m"), sliding_log("9/minute"))
    hold = await done(limiter.hold("a"))
    clock.advance(59)
    assert await done(hold.renew())
    clock.advance(59)
    assert not await done(limiter.hold("a"))
    await done(hold.release())
    assert not await done(hold.renew())
    assert await done(limiter.hold("a"))
    plain = flavour("5/minute", clock=clock)
    with pytest.raises(ConfigError, match="nothing to renew"):
        await done((await done(plain.hold("a"))).renew())


async def test_a_guarded_call_holds_its_place_while_it_runs(flavour: Flavour, store: SQLiteStore) -> None:
    limiter = made(flavour, store, concurrent(1, lease="1m"), sliding_log("9/minute"))
    seen = []

    async def work(fails: bool) -> None:
        seen.append((await done(limiter.check("a"))).allowed)
        if fails:
            raise ValueError("work failed")

    if isinstance(limiter, AsyncLimiter):
        guarded: Any = limiter.guard("a")(work)
    else:
        own = limiter

        def sync_work(fails: bool) -> None:
            seen.append(own.check("a").allowed)
            if fails:
                raise ValueError("work failed")

        guarded = own.guard("a")(sync_work)
    await done(guarded(False))
    with pytest.raises(ValueError, match="work failed"):
        await done(guarded(True))
    assert seen == [False, False]
    assert [r.remaining for r in (await done(limiter.check("a", 0))).results] == [1, 7]
    await done(limiter.hold("a"))
    with pytest.raises(RateLimited):
        await done(guarded(False))


async def test_hooks_receive_moves_and_the_settlement(
    flavour: Flavour, store: SQLiteStore, clock: FakeClock
) -> None:
    hook = Recorder()
    rules = concurrent(2, lease="1m"), token_bucket("90/minute", unit="tokens")
    limiter = made(flavour, store, *rules, hooks=[hook])
    hold = await done(limiter.hold("a", {"tokens": 50}))
    await done(hold.renew())
    await done(hold.confirm({"tokens": 20}))
    assert [(call.operation, call.cost) for call, _ in hook.arguments("decided")] == [
        ("hold", {"requests": 1, "tokens": 50}),
        ("move", {"requests": 1, "tokens": 0}),
        ("move", {"requests": 0, "tokens": 20}),
    ]
    assert [cost for _, cost in hook.arguments("settled")] == [{"requests": 1, "tokens": 20}]
