"""A server as a store, against one that answers as it is told."""

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
from headgate.hooks import Hook
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
from tests.unit.flavours import AnyLimiter, done, entered

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


# --- What is asked, and what is answered --------------------------------------------------------------------------------


async def test_a_hit_is_the_servers_decision(server: ScriptedServer, limiter: AnyLimiter) -> None:
    decision = await done(limiter.hit("alice", 2, tier="pro"))
    assert decision == ADMITTED
    [asked] = server.asked
    assert (asked.method, asked.path) == ("POST", "/v1/limiters/login/hit")
    assert asked.body == {"key": "alice", "cost": 2, "tier": "pro"}
    assert asked.headers["authorization"] == f"Bearer {TOKEN}"


async def test_a_refusal_and_its_mark_are_passed_on(server: ScriptedServer, limiter: AnyLimiter) -> None:
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


async def test_bytes_and_scopes_reach_the_server(
    flavour: Flavour, server: ScriptedServer, store: ServerStore
) -> None:
    limiter = flavour(sliding_window("5/minute", scope="user", name=RULE), name="x", store=store)
    await done(limiter.hit({"user": b"\xff"}))
    assert server.asked[0].body["key"] == {"user": {"$base64": "/w=="}}


async def test_waiting_goes_by_the_servers_refusals(
    flavour: Flavour, server: ScriptedServer, store: ServerStore
) -> None:
    never = Decision.make((RULE,), [Verdict(False, 0, 0, None, None)])
    server.reply = lambda asked: (200, decision_document(never))
    with pytest.raises(RateLimited):
        await done(flavour("5/minute", name="login", store=store).wait("alice"))


# --- Mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, 5, {"user": "a"}])
async def test_a_key_that_does_not_fit_is_never_sent(
    server: ScriptedServer, limiter: AnyLimiter, key: Any
) -> None:
    for call in (limiter.hit, limiter.check, limiter.hold, limiter.record, limiter.reset):
        with pytest.raises(ConfigError):
            await done(call(key))
    assert server.asked == []


@pytest.mark.parametrize("cost", [-1, 1.0, True, None, 2**53])
async def test_a_cost_that_is_no_number_of_units_is_never_sent(
    server: ScriptedServer, limiter: AnyLimiter, cost: Any
) -> None:
    for call in (limiter.hit, limiter.check, limiter.hold, limiter.record):
        with pytest.raises(ConfigError):
            await done(call("alice", cost))
    assert server.asked == []


async def test_the_caller_has_no_say_in_the_time(
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


async def test_rules_of_other_names_are_a_mistake_that_says_both(
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
    assert len(server.asked) == 1  # and nothing more was charged


async def test_a_limiter_without_rules_asks_the_server_all_the_same(
    flavour: Flavour, server: ScriptedServer, store: ServerStore
) -> None:
    """The server's may be shadow rules, which have to see what comes."""
    limiter = flavour(name="login", store=store)
    server.reply = lambda asked: (200, decision_document(UNLIMITED))
    assert await done(limiter.hit("alice")) == UNLIMITED
    assert server.paths == ["/v1/limiters/login/hit"]
    server.reply = lost
    assert await done(limiter.hit("alice")) == UNLIMITED.as_degraded()


async def test_a_policy_that_changes_later_breaks_nobody(
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
async def test_what_the_server_refuses_for_good_is_a_mistake(
    server: ScriptedServer, limiter: AnyLimiter, status: int, hint: str
) -> None:
    """Never an outage: no policy may answer for it, and it is not asked again."""
    server.reply = refuse(status)
    for call in (limiter.hit, limiter.check, limiter.hold, limiter.record, limiter.reset):
        with pytest.raises(ConfigError, match=hint) as raised:
            await done(call("alice"))
        assert TOKEN not in str(raised.value)
    assert len(server.asked) == 5
    assert limiter.health.available


async def test_a_cost_above_the_capacity_raises_as_everywhere(
    server: ScriptedServer, limiter: AnyLimiter
) -> None:
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
async def test_an_outage_is_answered_by_the_policy(
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
    assert raising.health.failures == 1  # all of them are on one store, which was asked once


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


async def test_a_server_that_is_back_but_refuses_us_is_no_outage(
    server: ScriptedServer, limiter: AnyLimiter
) -> None:
    """Or else the policy would answer for ever, and nobody would learn that the token is no longer good."""
    server.reply = lost
    assert (await done(limiter.hit("alice"))).degraded
    server.reply = refuse(401)

    async def until_told() -> None:
        async with asyncio.timeout(30):
            while True:
                await done(limiter.hit("alice"))
                await asyncio.sleep(0)

    for _ in range(2):
        with pytest.raises(ConfigError, match="401"):
            await until_told()


async def test_what_is_no_answer_of_ours_is_no_outage(server: ScriptedServer, limiter: AnyLimiter) -> None:
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


async def test_a_hold_under_an_id_that_is_none_is_no_answer_of_ours(
    server: ScriptedServer, limiter: AnyLimiter
) -> None:
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


async def test_a_block_that_raises_releases_its_hold(server: ScriptedServer, limiter: AnyLimiter) -> None:
    with pytest.raises(KeyError):
        async with entered(limiter.hold("alice", 9)):
            raise KeyError
    assert server.asked[1].body == {"cost": 0}


async def test_using_more_than_was_held_is_recorded(server: ScriptedServer, limiter: AnyLimiter) -> None:
    hold = await done(limiter.hold("alice", 9, tier="pro"))
    await done(hold.settle(12))
    assert server.paths == ["/v1/limiters/login/hold", "/v1/limiters/login/record"]
    assert server.asked[1].body == {"key": "alice", "cost": 3, "tier": "pro"}


async def test_a_refused_hold_has_nothing_to_give_back(server: ScriptedServer, limiter: AnyLimiter) -> None:
    refusal = Decision.make((RULE,), [Verdict(False, 5, 0, 1, 1)])
    server.reply = lambda asked: (
        200,
        {"decision": decision_document(refusal), "hold": None, "expires_after": None},
    )
    hold = await done(limiter.hold("alice", 3))
    assert not hold
    await done(hold.release())
    assert len(server.asked) == 1


async def test_a_hold_that_the_server_forgot_gives_nothing_back(
    server: ScriptedServer, limiter: AnyLimiter
) -> None:
    hold = await done(limiter.hold("alice", 9))
    server.reply = refuse(404, "no such hold")
    assert await done(hold.settle(4)) == 4
    assert limiter.health.available


async def test_settling_is_repeated_once_when_the_connection_broke(
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


async def test_renewing_is_repeated_once_and_refused_if_the_server_forgot_the_hold(
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


async def test_looking_is_repeated_once_when_the_connection_broke(
    server: ScriptedServer, store: ServerStore
) -> None:
    server.reply = lambda asked: lost(asked) if len(server.asked) == 1 else usual_reply(asked)
    assert store.limiters()
    assert server.paths == ["/v1/limiters"] * 2


@pytest.mark.parametrize("reply", [refuse(503), lambda asked: _time_out()], ids=["503", "slow"])
async def test_settling_is_not_repeated_for_a_server_that_is_overwhelmed(
    server: ScriptedServer, limiter: AnyLimiter, reply: Callable[[Asked], Any]
) -> None:
    hold = await done(limiter.hold("alice", 5))
    server.reply = reply
    await done(hold.settle(1))
    assert len(server.asked) == 2
    assert not limiter.health.available


def _time_out() -> Any:
    raise httpx.ReadTimeout("slow")


def test_a_refund_above_what_was_held_gives_nothing_back(server: ScriptedServer, store: ServerStore) -> None:
    gate = store.bind("login", (sliding_window("5/minute"),))
    _, receipts = gate.decide(Request("hold", "alice", 3))
    assert receipts is not None
    gate.refund(receipts, 4, None)
    gate.refund((("elsewhere", (1, 2)),), 1, None)
    assert server.paths == ["/v1/limiters/login/hold"]


# --- Asking for more ----------------------------------------------------------------------------------------------------


async def test_a_limiter_comes_with_the_servers_rules_and_policy(
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
async def test_what_the_policy_file_says_of_outages_holds_here_too(
    server: ScriptedServer, store: ServerStore, told: object, admitted: int
) -> None:
    server.reply = lambda asked: (200, {"limiters": [{**LIMITER, "on_store_error": told}]})
    limiters: list[AnyLimiter] = [store.limiter("login"), await store.async_limiter("login")]
    server.reply = lost
    # What is counted here belongs to the store.
    for key, limiter in zip(("alice", "bob"), limiters, strict=True):
        assert sum([bool(await done(limiter.hit(key))) for _ in range(5)]) == admitted


async def test_a_policy_and_hooks_may_be_given(server: ScriptedServer, store: ServerStore) -> None:
    class Seen(Hook):
        def __init__(self) -> None:
            self.decisions: list[Decision] = []

        def decided(self, call: Any, decision: Decision, seconds: float) -> None:
            self.decisions.append(decision)

    hook = Seen()
    limiters: list[AnyLimiter] = [
        store.limiter("login", on_store_error="open", deadline=0.5, hooks=[hook]),
        await store.async_limiter("login", on_store_error="open", deadline=0.5, hooks=[hook]),
    ]
    server.reply = lost
    for limiter in limiters:
        assert await done(limiter.hit("alice"))
    assert len(hook.decisions) == 2


async def test_an_unknown_limiter_is_a_mistake(server: ScriptedServer, store: ServerStore) -> None:
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


async def test_nobody_answers_questions_for_a_server_that_is_down(
    server: ScriptedServer, store: ServerStore
) -> None:
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
def test_a_store_can_be_had_by_its_url(url: str) -> None:
    for opened in (open_store(url), open_async_store(url)):
        assert isinstance(opened, ServerStore)


def test_its_name_has_no_credentials() -> None:
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
            await _soon()
        with pytest.raises(StoreUnavailable, match="closed"):
            gate.decide(Request("hit", "alice"))
        with pytest.raises(StoreUnavailable, match="closed"):
            await async_gate.decide(Request("hit", "alice"))


async def _soon() -> None:
    """Let the event loop do what it was told to do soon."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_store_is_a_context_manager_of_both_kinds(server: ScriptedServer) -> None:
    with ServerStore(URL, transport=server.transport) as store:
        store.limiters()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.limiters()
    async with ServerStore(URL, transport=server.transport) as store:
        await store.async_limiters()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.async_limiters()


async def test_a_transport_of_the_other_kind_is_a_mistake() -> None:
    for_tasks, for_threads = httpx.ASGITransport(app=None), httpx.HTTPTransport()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an async transport"):
        Limiter("5/minute", name="login", store=ServerStore(URL, transport=for_tasks))
    with pytest.raises(ConfigError, match="a sync transport"):
        AsyncLimiter("5/minute", name="login", store=ServerStore(URL, transport=for_threads))
