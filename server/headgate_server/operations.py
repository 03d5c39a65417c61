"""The operations of the API on limiters and holds, single and in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from difflib import get_close_matches
from time import perf_counter

from msgspec import Struct

from headgate import ConfigError, CostTooHigh, Decision, StoreError
from headgate.observe import redact
from headgate.policy import AsyncLivePolicy, AsyncPolicyLimiter
from headgate.quotas import quotas_of
from headgate.stores import Answer, Operation, Request
from headgate_server.describe import limiter_shown
from headgate_server.hold_record import HoldBusy, HoldsUnsupported
from headgate_server.holds import HoldBook, TooManyHolds, UnknownHold, UnknownLimiter
from headgate_server.inspect import state_of
from headgate_server.logs import AUDIT
from headgate_server.problems import ApiProblem
from headgate_server.readiness import StoreChecks
from headgate_server.routing import ApiRequest
from headgate_server.statistics import Statistics, shown_key
from headgate_server.wire import (
    BatchAnswer,
    BatchAnswers,
    BatchBody,
    BatchCall,
    ConfirmBody,
    DecisionAnswer,
    FinishAnswer,
    HealthAnswer,
    HitBody,
    HoldAnswer,
    InspectAnswer,
    InspectBody,
    LimiterShown,
    LimitersShown,
    Readiness,
    RecordAnswer,
    RecordBody,
    ReleaseBody,
    RenewBody,
    RenewRequest,
    ResetAnswer,
    ResetBody,
    SettleBody,
    WaitAnswer,
    decision_answer,
    key_from,
    wait_answer,
    wire_cost,
)

logger = logging.getLogger("headgate.server")
audit = logging.getLogger(AUDIT)
"""The log of resets and refused tokens."""

MAX_CONCURRENT = 100
"""Calls of a batch in progress at the same time."""

MAX_BLOCKING = 0.002
"""Seconds that a batch may block the event loop."""

_CONCURRENT = frozenset({"hit", "check", "record", "wait-hint"})
"""Operations that may be in progress at the same time, because stores process them in order."""

_OF_HOLDS = frozenset({"settle", "release", "confirm", "renew"})


class Operations:
    """The operations on the limiters of a policy.

    They raise `ApiProblem` or a `HeadgateError`, which `problem_from` turns into an `ApiProblem`.
    """

    def __init__(self, live: AsyncLivePolicy, book: HoldBook, statistics: Statistics) -> None:
        self._live = live
        self._book = book
        self._statistics = statistics
        self._checks = StoreChecks(live)

    async def hit(self, body: HitBody, name: str) -> DecisionAnswer:
        decision, _ = await _decide(self._limiter(name), "hit", body)
        return decision_answer(decision)

    async def check(self, body: HitBody, name: str) -> DecisionAnswer:
        decision, _ = await _decide(self._limiter(name), "peek", body)
        return decision_answer(decision)

    async def wait_hint(self, body: HitBody, name: str) -> WaitAnswer:
        decision, _ = await _decide(self._limiter(name), "peek", body)
        return wait_answer(decision)

    async def record(self, body: RecordBody, name: str) -> RecordAnswer:
        version, key, cost = self._limiter(name).current, key_from(body.key), body.cost
        if isinstance(cost, list):
            if len(cost) != len(version.rules):
                raise ApiProblem(422, f"{len(cost)} costs for {len(version.rules)} rules - at `$.cost`")
            request = Request("record", key, tuple(cost), body.tier)
            request = request.with_quotas(quotas_of(version.rules, body.quota))
        else:
            request = version.request("record", key, cost, body.tier, body.quota)
        decision, _ = await version.gate.decide(request)
        return RecordAnswer(cost, decision.degraded)

    async def hold(self, request: ApiRequest, body: HitBody, name: str) -> HoldAnswer:
        self._limiter(name)  # for the error that suggests similar names
        held = await self._book.take(
            name,
            key_from(body.key),
            body.cost,
            body.tier,
            body.quota,
            caller=request.caller,
            is_final=body.final,
        )
        return HoldAnswer(decision_answer(held.decision), held.hold, held.expires_after)

    async def reset(self, request: ApiRequest, body: ResetBody, name: str) -> ResetAnswer:
        key = key_from(body.key)
        await self._limiter(name).reset(key)
        audit.info(
            "%s reset %r in limiter %r", request.name or "a caller without a token", shown_key(key), name
        )
        return ResetAnswer()

    async def settle(self, body: SettleBody, hold: str) -> FinishAnswer:
        settled = await self._book.finish(hold, body.cost)
        held, cost = wire_cost(settled.held), wire_cost(settled.cost)
        return FinishAnswer(hold, settled.limiter, held, cost, settled.first, settled.degraded)

    async def release(self, body: ReleaseBody, hold: str) -> FinishAnswer:
        return await self.settle(SettleBody(0), hold)

    async def confirm(self, body: ConfirmBody, hold: str) -> DecisionAnswer:
        try:
            return decision_answer(await self._book.confirm(hold, body.cost))
        except UnknownHold:
            if body.anew is None:
                raise
        return decision_answer(await self._confirm_anew(body.anew, body.cost))

    async def renew(self, body: RenewBody, hold: str) -> HoldAnswer:
        held = await self._book.renew(hold)
        return HoldAnswer(decision_answer(held.decision), held.hold, held.expires_after)

    async def _confirm_anew(self, body: RenewRequest, cost: int | dict[str, int] | None) -> Decision:
        """Take the units of an expired hold again; its places in concurrent rules are free."""
        limiter = self._limiter(body.limiter).current
        held = limiter.units.costs(body.cost)
        costs = limiter.units.without_places(held if cost is None else limiter.units.settled(cost, held))
        request = Request("hit", key_from(body.key), costs, body.tier, is_final=False)
        decision, _ = await limiter.gate.decide(request.with_quotas(quotas_of(limiter.rules, body.quota)))
        return decision

    async def limiters(self) -> LimitersShown:
        return LimitersShown([limiter_shown(limiter) for limiter in self._live.policy.limiters.values()])

    async def limiter(self, name: str) -> LimiterShown:
        self._limiter(name)  # for the error that suggests similar names
        return limiter_shown(self._live.policy.limiters[name])

    async def inspect(self, body: InspectBody) -> InspectAnswer:
        key = key_from(body.key)
        limiters, clock = list(self._live.values()), self._live.clock
        states = await asyncio.gather(*(state_of(limiter, key, body.tier, clock) for limiter in limiters))
        return InspectAnswer(list(states))

    async def healthz(self) -> HealthAnswer:
        return HealthAnswer()

    async def readyz(self) -> Readiness:
        stores = await self._checks.stores()
        self._statistics.complete(stores)
        return Readiness("ready" if all(store.up for store in stores) else "not ready", stores)

    # Batches

    async def batch(self, request: ApiRequest, body: BatchBody) -> BatchAnswers:
        """Answer each call like a single request, in order.

        Adjacent calls that only use a limiter are sent to a remote store together. Other calls wait for earlier calls,
        which may make units available.
        """
        answers: list[BatchAnswer] = []
        together: list[asyncio.Task[BatchAnswer]] = []
        yielded = perf_counter()
        for call in body.calls:
            limiter = None if call.limiter is None else self._live.get(call.limiter)
            may_join = limiter is not None and limiter.store.remote and call.operation in _CONCURRENT
            if together and (not may_join or len(together) >= MAX_CONCURRENT):
                answers += await asyncio.gather(*together)
                together = []
            if may_join:
                together.append(asyncio.ensure_future(self._answer(call, limiter, request)))
                continue
            answers.append(await self._answer(call, limiter, request))
            if perf_counter() - yielded > MAX_BLOCKING:  # calls that never wait would block other requests
                await asyncio.sleep(0)
                yielded = perf_counter()
        return BatchAnswers(answers + await asyncio.gather(*together))

    async def _answer(
        self, call: BatchCall, limiter: AsyncPolicyLimiter | None, request: ApiRequest
    ) -> BatchAnswer:
        try:
            return BatchAnswer(200, await self._one(call, limiter, request))
        except Exception as error:  # noqa: BLE001  # an error must not affect the other calls
            problem = problem_from(error)
            return BatchAnswer(problem.status, problem.document)

    async def _one(self, call: BatchCall, limiter: AsyncPolicyLimiter | None, request: ApiRequest) -> Struct:
        operation = call.operation
        if operation in _OF_HOLDS:
            return await self._end(call)
        name = call.limiter
        if name is None or call.hold is not None:
            raise ApiProblem(400, f"{operation} needs the name of a limiter, not a hold")
        if limiter is None:  # without similar names: finding them for 1,000 calls takes seconds
            raise ApiProblem(404, f"there is no limiter {name[:80]!r}; GET /v1/limiters lists them all")
        cost = 1 if call.cost is None else call.cost
        if operation == "record":
            return await self.record(RecordBody(call.key, cost, call.tier, call.quota), name)
        if isinstance(cost, list):
            raise ApiProblem(400, "only record takes a cost for each rule; write an object by unit")
        body = HitBody(call.key, cost, call.tier, call.quota, call.final)
        match operation:
            case "hit":
                return await self.hit(body, name)
            case "check":
                return await self.check(body, name)
            case "wait-hint":
                return await self.wait_hint(body, name)
            case "hold":
                return await self.hold(request, body, name)
        return await self._reset_one(call, name, request)

    async def _end(self, call: BatchCall) -> Struct:
        hold, cost, operation = call.hold, call.cost, call.operation
        of_limiter = (call.limiter, call.key, call.tier, call.quota)
        if hold is None or isinstance(cost, list) or of_limiter != (None, None, None, None):
            raise ApiProblem(400, f"{operation} needs the id of a hold, not a limiter, key, tier or quota")
        if operation == "confirm":
            return await self.confirm(ConfirmBody(cost, call.anew), hold)
        if (cost is None) is (operation == "settle"):
            raise ApiProblem(400, "settle needs a cost; release and renew do not take one")
        if operation == "renew":
            return await self.renew(RenewBody(), hold)
        return await self.settle(SettleBody(0 if cost is None else cost), hold)

    async def _reset_one(self, call: BatchCall, name: str, request: ApiRequest) -> ResetAnswer:
        if "administer" not in request.may:
            problem = ApiProblem(403, f"the token {request.name!r} may not administer")
            audit.warning("refused a reset in a batch: %s", problem.detail)
            raise problem
        if call.cost is not None or call.tier is not None or call.quota is not None:
            raise ApiProblem(400, "reset takes a key, not a cost, tier or quota")
        return await self.reset(request, ResetBody(call.key), name)

    def _limiter(self, name: str) -> AsyncPolicyLimiter:
        try:
            return self._live[name]
        except KeyError:
            raise _no_limiter(name, list(self._live)) from None


def _decide(limiter: AsyncPolicyLimiter, operation: Operation, body: HitBody) -> Awaitable[Answer]:
    """Return the awaitable answer of a limiter."""
    version = limiter.current  # rules, units and gate of one version
    key = key_from(body.key)
    request = version.request(operation, key, body.cost, body.tier, body.quota, is_final=body.final)
    return version.gate.decide(request)


def problem_from(error: Exception) -> ApiProblem:
    """Return the problem for an exception; an unexpected exception is logged, and its text is not shown.

    422: the request can never be admitted (a cost above the capacity, a key that does not fit the rules).
    503: the store failed and the failure policy is `raise`; or it is misconfigured and has never worked.
    """
    match error:
        case ApiProblem():
            return error
        case UnknownHold() | UnknownLimiter():
            return ApiProblem(404, str(error))
        case HoldsUnsupported():
            return ApiProblem(501, str(error))
        case HoldBusy():
            return ApiProblem(409, str(error), ((b"retry-after", b"1"),))
        case TooManyHolds():
            return ApiProblem(429, str(error), ((b"retry-after", b"10"),))
        case CostTooHigh():
            return ApiProblem(422, str(error), excess=error)
        case StoreError():  # before ConfigError: StoreMisconfigured is both
            detail = f"the store cannot be reached: {redact(str(error))}"
            return ApiProblem(503, detail, ((b"retry-after", b"1"),))
        case ConfigError():
            return ApiProblem(422, str(error))
    logger.error("a request failed", exc_info=error)
    return ApiProblem(500, "internal error; the server's log has the reason")


def _no_limiter(name: str, known: list[str]) -> ApiProblem:
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "GET /v1/limiters lists them all"
    return ApiProblem(404, f"there is no limiter {name[:80]!r}; {hint}")
