"""`ServerStore` against a scripted server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    CostTooHigh,
    Decision,
    Limiter,
    RateLimited,
    StoreUnavailable,
    concurrent,
    sliding_window,
)
from headgate.client import KeyState, ServerLimiter, ServerStore, WaitHint
from headgate.decision import UNLIMITED, Verdict
from headgate.errors import StoreMisconfigured
from headgate.outage import local
from headgate.stores import open_async_store, open_store
from headgate.stores.base import Gate, Operation
from headgate.stores.request import Request
from headgate.testing import FakeClock
from tests.unit.client.scripted import (
    ADMITTED,
    LIMITER,
    RULE,
    Asked,
    ScriptedServer,
    decision_document,
    problem,
    usual_reply,
)
from tests.unit.flavours import AnyLimiter, done
from tests.unit.recorder import Recorder

URL = "http://127.0.0.1:8080"
TOKEN = "s3cret-token"

Flavour = type[Limiter] | type[AsyncLimiter]


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def store(server: ScriptedServer) -> ServerStore:
    return ServerStore(URL, token=TOKEN, transport=server.transport)


@pytest.fixture
def limiter(flavour: Flavour, store: ServerStore) -> AnyLimiter:
    return flavour("5/minute", name="login", store=store)


def lost(asked: Asked) -> Any:
    raise httpx.RemoteProtocolError("Server disconnected without sending a response.")


def refuse(status: int, detail: str = "because", **members: object) -> Callable[[Asked], Any]:
    return lambda asked: problem(status, detail, **members)


# --- Requests and responses ---------------------------------------------------------------------------------------------


async def test_hit_returns_the_decision_of_the_server(server: ScriptedServer, limiter: AnyLimiter) -> None:
    decision = await done(limiter.hit("alice", 2, tier="pro"))
    assert decision == ADMITTED
    [asked] = server.asked
    assert (asked.method, asked.path) == ("POST", "/v1/limiters/login/hit")
    assert asked.body == {"key": "alice", "cost": 2, "tier": "pro"}
    assert asked.headers["authorization"] == f"Bearer {TOKEN}"


async def test_degraded_refusal_is_passed_on(server: ScriptedServer, limiter: AnyLimiter) -> None:
    refusal = Decision.make((RULE,), [Verdict(False, 5, 0, 12_345_678, 60_000_001)], degraded=True)
    server.reply = lambda asked: (200, decision_document(refusal))
    assert await done(limiter.hit("alice")) == refusal
    with pytest.raises(RateLimited):
        (await done(limiter.check("alice"))).raise_if_denied()


async def test_every_operation_has_its_path(server: ScriptedServer, limiter: AnyLimiter) -> None:
    await done(limiter.check("alice"))
    assert await done(limiter.record("alice", 3)) == UNLIMITED
    await done(limiter.reset("alice"))
    assert server.paths == [f"/v1/limiters/login/{operation}" for operation in ("check", "record", "reset")]
    assert [asked.body for asked in server.asked] == [
        {"key": "alice", "cost": 1},
        {"key": "alice", "cost": 3},
        {"key": "alice"},
    ]


# --- Invalid calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, 5, {"user": "a"}])
async def test_invalid_key_is_never_sent(server: ScriptedServer, limiter: AnyLimiter, key: Any) -> None:
    for call in (limiter.hit, limiter.check, limiter.hold, limiter.record, limiter.reset):
        with pytest.raises(ConfigError):
            await done(call(key))
    assert server.asked == []


@pytest.mark.parametrize("cost", [-1, 1.0, True, None, 2**53])
async def test_invalid_cost_is_never_sent(server: ScriptedServer, limiter: AnyLimiter, cost: Any) -> None:
    for call in (limiter.hit, limiter.check, limiter.hold, limiter.record):
        with pytest.raises(ConfigError):
            await done(call("alice", cost))
    assert server.asked == []


async def test_caller_cannot_set_the_time(
    flavour: Flavour, server: ScriptedServer, store: ServerStore, limiter: AnyLimiter
) -> None:
    clocked = flavour("5/minute", name="login", store=store, clock=FakeClock())
    for call in (limiter.hit, limiter.check, limiter.hold, limiter.record):
        with pytest.raises(ConfigError, match="its own clock"):
            await done(call("alice", now=1.0))
    with pytest.raises(ConfigError, match="its own clock"):
        await done(clocked.hit("alice"))
    hold = await done(limiter.hold("alice", 5))
    with pytest.raises(ConfigError, match="its own clock"):
        await done(hold.settle(1, now=1.0))
    assert server.paths == ["/v1/limiters/login/hold"]


async def test_rule_name_mismatch_is_an_error_with_both_names(
    flavour: Flavour, server: ScriptedServer, store: ServerStore
) -> None:
    limiter = flavour("5/hour", name="login", store=store)
    with pytest.raises(ConfigError) as raised:
        await done(limiter.hit("alice"))
    assert f"'{RULE}'" in str(raised.value)
    assert "'per-hour'" in str(raised.value)
    for call in (limiter.hit, limiter.check, limiter.hold, limiter.record):
        with pytest.raises(ConfigError) as again:
            await done(call("alice"))
        assert str(again.value) == str(raised.value)
    assert len(server.asked) == 1  # the later calls were not sent


async def test_limiter_without_rules_still_calls_the_server(
    flavour: Flavour, server: ScriptedServer, store: ServerStore
) -> None:
    """The server may have shadow rules, which need every call."""
    limiter = flavour(name="login", store=store)
    server.reply = lambda asked: (200, decision_document(UNLIMITED))
    assert await done(limiter.hit("alice")) == UNLIMITED
    assert server.paths == ["/v1/limiters/login/hit"]
    server.reply = lost
    assert await done(limiter.hit("alice")) == UNLIMITED.as_degraded()


async def test_later_policy_change_is_accepted_and_logged_once(
    server: ScriptedServer, limiter: AnyLimiter, caplog: pytest.LogCaptureFixture
) -> None:
    await done(limiter.hit("alice"))
    changed = Decision.make(("hourly",), [Verdict(True, 50, 49, None, 1)])
    server.reply = lambda asked: (200, decision_document(changed))
    with caplog.at_level(logging.WARNING, "headgate"):
        assert [await done(limiter.hit("alice")) for _ in range(3)] == [changed] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{URL}: limiter 'login' now has the rules 'hourly'"
    ]


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (401, "token"),
        (403, "policy file"),
        (404, "because"),
        (413, "because"),
        (421, "because"),
        (501, "because"),
    ],
)
async def test_permanent_server_error_is_a_config_error(
    server: ScriptedServer, limiter: AnyLimiter, status: int, hint: str
) -> None:
    """It is not an outage: the policy does not answer, and the call is not repeated."""
    server.reply = refuse(status)
    for call in (limiter.hit, limiter.check, limiter.hold, limiter.record, limiter.reset):
        with pytest.raises(ConfigError, match=hint) as raised:
            await done(call("alice"))
        assert TOKEN not in str(raised.value)
    assert len(server.asked) == 5
    assert limiter.health.available


async def test_cost_above_capacity_raises_cost_too_high(server: ScriptedServer, limiter: AnyLimiter) -> None:
    server.reply = refuse(422, "a cost of 6 …", cost=6, capacity=5, rule=RULE)
    for call in (limiter.hit, limiter.check, limiter.hold):
        with pytest.raises(CostTooHigh) as raised:
            await done(call("alice", 6))
        assert (raised.value.cost, raised.value.capacity, raised.value.rule) == (6, 5, RULE)


# --- Outages ------------------------------------------------------------------------------------------------------------

each_outage = pytest.mark.parametrize(
    "reply",
    [lost, refuse(503), refuse(500), lambda asked: httpx.Response(502, text="<html>bad gateway</html>")],
    ids=["lost", "503", "500", "502"],
)


@each_outage
async def test_policy_answers_in_an_outage(
    flavour: Flavour, server: ScriptedServer, store: ServerStore, reply: Callable[[Asked], Any]
) -> None:
    server.reply = reply
    answers: dict[str, list[bool]] = {}
    for name, policy in {"open": "open", "closed": "closed", "local": local(share=0.4)}.items():
        limiter = flavour("5/minute", name="login", store=store, on_store_error=policy)  # type: ignore[arg-type]
        decisions = [await done(limiter.hit("alice")) for _ in range(4)]
        assert all(decision.degraded for decision in decisions)
        answers[name] = [decision.allowed for decision in decisions]
    assert answers == {"open": [True] * 4, "closed": [False] * 4, "local": [True, True, False, False]}
    raising = flavour("5/minute", name="login", store=store, on_store_error="raise")
    with pytest.raises(StoreUnavailable):
        await done(raising.hit("alice"))
    assert raising.health.failures == 1  # all limiters share one store, which was called once


async def test_a_charging_call_is_sent_once(
    server: ScriptedServer, store: ServerStore, flavour: Flavour
) -> None:
    server.reply = lost
    bind = store.bind if flavour is Limiter else store.bind_async
    gate = bind("login", (sliding_window("5/minute"),))
    operations: tuple[Operation, ...] = ("hit", "peek", "hold", "record")
    for operation in operations:
        with pytest.raises(StoreUnavailable, match="disconnected"):
            await done(gate.decide(Request(operation, "alice")))
    assert len(server.asked) == 4


async def test_response_of_another_server_is_not_an_outage(
    server: ScriptedServer, limiter: AnyLimiter
) -> None:
    answers = server.reply
    server.reply = lambda asked: httpx.Response(200, text="<html>welcome</html>")
    with pytest.raises(StoreMisconfigured, match="as a Headgate server does"):
        await done(limiter.hit("alice"))
    server.reply = answers
    await done(limiter.hit("alice"))
    server.reply = lambda asked: httpx.Response(200, text="<html>welcome</html>")
    assert (await done(limiter.hit("alice"))).degraded
    assert limiter.health.state == "misconfigured"
    assert (limiter.health.outages, limiter.health.failures) == (0, 0)


async def test_invalid_hold_id_degrades_the_hold(server: ScriptedServer, limiter: AnyLimiter) -> None:
    await done(limiter.hit("alice"))
    server.reply = lambda asked: (200, {"decision": decision_document(ADMITTED), "hold": 5})
    assert (await done(limiter.hold("alice"))).decision.degraded


# --- Holds --------------------------------------------------------------------------------------------------------------


async def test_a_hold_is_settled_under_its_id(server: ScriptedServer, limiter: AnyLimiter) -> None:
    hold = await done(limiter.hold("alice", 9))
    assert hold
    assert await done(hold.settle(4)) == 4
    assert await done(hold.release()) == 4
    assert server.paths == ["/v1/limiters/login/hold", "/v1/holds/id-alice/settle"]
    assert server.asked[1].body == {"cost": 4}


async def test_hold_unknown_to_the_server_can_be_settled(server: ScriptedServer, limiter: AnyLimiter) -> None:
    hold = await done(limiter.hold("alice", 9))
    server.reply = refuse(404, "no such hold")
    assert await done(hold.settle(4)) == 4
    assert limiter.health.available


async def test_settle_is_repeated_once_after_a_lost_connection(
    server: ScriptedServer, store: ServerStore, flavour: Flavour
) -> None:
    limiter = flavour("5/minute", name="login", store=store, on_store_error="raise")
    holds = [await done(limiter.hold(name, 5)) for name in ("alice", "bob")]
    server.asked.clear()
    server.reply = lambda asked: lost(asked) if len(server.asked) == 1 else usual_reply(asked)
    await done(holds[0].settle(1))
    assert server.paths == ["/v1/holds/id-alice/settle"] * 2
    server.reply = lost
    with pytest.raises(StoreUnavailable):
        await done(holds[1].settle(1))
    assert server.paths[2:] == ["/v1/holds/id-bob/settle"] * 2


async def test_renew_is_repeated_once_and_refused_for_an_unknown_hold(
    server: ScriptedServer, store: ServerStore, flavour: Flavour
) -> None:
    places = concurrent(5, lease="60s", name=ADMITTED.names[0])
    limiter = flavour(places, name="login", store=store, on_store_error="raise")
    hold = await done(limiter.hold("alice"))
    server.asked.clear()
    renewed = 200, {"decision": decision_document(ADMITTED), "hold": "id-alice", "expires_after": 60.0}
    server.reply = lambda asked: lost(asked) if len(server.asked) == 1 else renewed
    assert await done(hold.renew())
    assert server.paths == ["/v1/holds/id-alice/renew"] * 2
    server.reply = refuse(404, "no such hold")
    refused = await done(hold.renew())
    assert (refused.allowed, refused.retry_after, refused.degraded) == (False, None, False)


async def test_read_is_repeated_once_after_a_lost_connection(
    server: ScriptedServer, store: ServerStore
) -> None:
    server.reply = lambda asked: lost(asked) if len(server.asked) == 1 else usual_reply(asked)
    assert store.limiters()
    assert server.paths == ["/v1/limiters"] * 2


@pytest.mark.parametrize("reply", [refuse(503), lambda asked: _time_out()], ids=["503", "slow"])
async def test_settle_is_not_repeated_for_an_overloaded_server(
    server: ScriptedServer, limiter: AnyLimiter, reply: Callable[[Asked], Any]
) -> None:
    hold = await done(limiter.hold("alice", 5))
    server.reply = reply
    await done(hold.settle(1))
    assert len(server.asked) == 2
    assert not limiter.health.available


def _time_out() -> Any:
    raise httpx.ReadTimeout("slow")


def test_refund_above_the_held_cost_is_not_sent(server: ScriptedServer, store: ServerStore) -> None:
    gate = store.bind("login", (sliding_window("5/minute"),))
    _, receipts = gate.decide(Request("hold", "alice", 3))
    assert receipts is not None
    gate.refund(receipts, 4, None)
    gate.refund((("elsewhere", (1, 2)),), 1, None)
    assert server.paths == ["/v1/limiters/login/hold"]


# --- Queries ------------------------------------------------------------------------------------------------------------


async def test_limiter_has_the_rules_and_policy_of_the_server(
    server: ScriptedServer, store: ServerStore
) -> None:
    limiters: list[AnyLimiter] = [store.limiter("login"), await store.async_limiter("login")]
    for limiter in limiters:
        assert limiter.name == "login"
        assert limiter.rules == (sliding_window("5/minute", tiers={"pro": "50/minute"}),)
        assert await done(limiter.hit("alice")) == ADMITTED
    server.reply = lost
    refused = await done(limiter.hit("alice"))
    assert not refused  # as its policy file says: closed
    assert refused.degraded


@pytest.mark.parametrize(
    ("told", "admitted"),
    [("open", 5), ("closed", 0), ({"local": 0.4}, 2), ({"local": 1e-7}, 0)],
)
async def test_client_follows_on_store_error_of_the_policy_file(
    server: ScriptedServer, store: ServerStore, told: object, admitted: int
) -> None:
    server.reply = lambda asked: (200, {"limiters": [{**LIMITER, "on_store_error": told}]})
    limiters: list[AnyLimiter] = [store.limiter("login"), await store.async_limiter("login")]
    server.reply = lost
    # Local counts belong to the store, so each limiter uses another key.
    for key, limiter in zip(("alice", "bob"), limiters, strict=True):
        assert sum([bool(await done(limiter.hit(key))) for _ in range(5)]) == admitted


async def test_limiter_accepts_a_policy_and_hooks(server: ScriptedServer, store: ServerStore) -> None:
    hook = Recorder()
    limiters: list[AnyLimiter] = [
        store.limiter("login", on_store_error="open", deadline=0.5, hooks=[hook]),
        await store.async_limiter("login", on_store_error="open", deadline=0.5, hooks=[hook]),
    ]
    server.reply = lost
    for limiter in limiters:
        assert await done(limiter.hit("alice"))
    assert len(hook.arguments("decided")) == 2


async def test_unknown_limiter_is_a_config_error(server: ScriptedServer, store: ServerStore) -> None:
    for limiter in (store.limiter, store.async_limiter):
        with pytest.raises(ConfigError, match="no limiter 'logon'; it has 'login'"):
            await done(limiter("logon"))


async def test_limiters_hints_and_states_are_typed(server: ScriptedServer, store: ServerStore) -> None:
    for limiters in (store.limiters(), await store.async_limiters()):
        [limiter] = limiters
        assert isinstance(limiter, ServerLimiter)
        assert limiter.name == "login"
    server.reply = lambda asked: (200, {"allowed": False, "wait": 1.5})
    for hint in (store.wait_hint("login", "a", 2), await store.async_wait_hint("login", "a", 2)):
        assert hint == WaitHint(False, 1.5)
        assert server.asked[-1].path == "/v1/limiters/login/wait-hint"
        assert server.asked[-1].body == {"key": "a", "cost": 2}
    server.reply = lambda asked: (200, {"limiters": [{"name": "login", "results": [], "error": "x"}]})
    for states in (store.inspect("alice", tier="pro"), await store.async_inspect("alice", tier="pro")):
        assert states == (KeyState("login", (), "x"),)
        assert server.asked[-1].path == "/v1/inspect"
        assert server.asked[-1].body == {"key": "alice", "tier": "pro"}


async def test_queries_raise_while_the_server_is_down(server: ScriptedServer, store: ServerStore) -> None:
    server.reply = lost
    for call in (store.limiters, store.async_limiters):
        with pytest.raises(StoreUnavailable):
            await done(call())
    server.reply = lambda asked: (200, ["welcome"])
    for call in (store.limiters, store.async_limiters):
        with pytest.raises(StoreMisconfigured):
            await done(call())


# --- The store itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "https://:token@example.org/limits", "HTTP://x"])
def test_store_can_be_opened_by_its_url(url: str) -> None:
    for opened in (open_store(url), open_async_store(url)):
        assert isinstance(opened, ServerStore)


def test_repr_has_no_credentials() -> None:
    assert repr(ServerStore("http://:secret@x:1")) == "<ServerStore http://x:1>"


async def test_a_closed_store_is_unavailable(server: ScriptedServer) -> None:
    for asynchronously in (False, True):
        store = ServerStore(URL, transport=server.transport)
        gate: Gate = store.bind("login", (sliding_window("5/minute"),))
        async_gate = store.bind_async("login", (sliding_window("5/minute"),))
        gate.decide(Request("hit", "alice"))
        await async_gate.decide(Request("hit", "alice"))
        if asynchronously:
            await store.aclose()
        else:
            store.close()
            await _run_pending_callbacks()
        with pytest.raises(StoreUnavailable, match="closed"):
            gate.decide(Request("hit", "alice"))
        with pytest.raises(StoreUnavailable, match="closed"):
            await async_gate.decide(Request("hit", "alice"))


async def _run_pending_callbacks() -> None:
    """Run the pending callbacks of the event loop."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_store_is_a_sync_and_async_context_manager(server: ScriptedServer) -> None:
    with ServerStore(URL, transport=server.transport) as store:
        store.limiters()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.limiters()
    async with ServerStore(URL, transport=server.transport) as store:
        await store.async_limiters()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.async_limiters()


async def test_sync_and_async_transports_cannot_be_mixed() -> None:
    for_tasks, for_threads = httpx.ASGITransport(app=None), httpx.HTTPTransport()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an async transport"):
        Limiter("5/minute", name="login", store=ServerStore(URL, transport=for_tasks))
    with pytest.raises(ConfigError, match="a sync transport"):
        AsyncLimiter("5/minute", name="login", store=ServerStore(URL, transport=for_threads))
