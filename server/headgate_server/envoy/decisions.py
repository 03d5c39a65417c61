"""One request of Envoy: matched, decided in one round trip, answered.

The descriptors of a request are decided together: all are charged, or none. Two cases need more than one round trip: a
descriptor that is only checked beside others that are charged, and two descriptors that count in the same scope by
different keys. Shadow rules and recorded descriptors are not part of the set.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headgate import AsyncHold, CostTooHigh, Decision
from headgate.observe import redact
from headgate.policy import AsyncLivePolicy
from headgate.quota import MAX_UNITS
from headgate.stores import Request
from headgate_server.envoy.answers import REFUSED, Status, answer, status_of
from headgate_server.envoy.matching import Asked, Matcher
from headgate_server.envoy.messages import OVER_LIMIT
from headgate_server.envoy.parts import LimiterPart, LimiterParts, rounded_deadline

logger = logging.getLogger("headgate.server")

Statuses = dict[int, Status]


class SetOutcome(NamedTuple):
    """The decision of some counters.

    Attributes:
        allowed: Whether they were admitted.
        statuses: The statuses of their descriptors, by place.
        room: The fewest remaining units; negative for a refusal.
        fields: Header fields.
    """

    allowed: bool
    statuses: Statuses
    room: int
    fields: Mapping[str, str]


class EnvoyDecisions:
    """Decides requests by the newest policy.

    Args:
        live: The limiters.
    """

    def __init__(self, live: AsyncLivePolicy) -> None:
        self._live = live
        self._policy = live.policy
        self._matchers: dict[str, Matcher] = {}
        self._parts: dict[str, LimiterParts] = {}
        self._logged = ""
        """The last logged error, until a request succeeds."""

    async def decide(self, request: Any, remaining: float | None = None) -> Any:
        """Return the response to a `RateLimitRequest`; it never raises.

        Args:
            request: The request.
            remaining: Seconds until the deadline of the call.
        """
        number = len(request.descriptors)
        matcher = self._matcher(request.domain)
        if matcher is None:
            return answer(number, {})
        try:
            plan = matcher.plan(request)
            parts = self._parts_of(matcher.domain.limiter)
            call = _Call(parts, rounded_deadline(remaining))
            outcomes = await call.decide(plan.decided, atomic=matcher.domain.atomic)
            if plan.recorded:
                await call.record(plan.recorded)
        except Exception as error:  # noqa: BLE001  # Envoy would admit after an error
            return self._failed(matcher, number, error)
        self._logged = ""
        if len(outcomes) == 1:
            return answer(number, outcomes[0].statuses, outcomes[0].fields.items())
        statuses: Statuses = {}
        for outcome in outcomes:
            statuses |= outcome.statuses
        binding = min(outcomes, key=lambda outcome: outcome.room, default=None)
        return answer(number, statuses, binding.fields.items() if binding is not None else ())

    def _failed(self, matcher: Matcher, number: int, error: Exception) -> Any:
        """Answer by the failure policy after an unexpected error; of equal errors in a row, one is logged."""
        name = matcher.domain.limiter
        message = redact(f"{type(error).__name__}: {error}")
        if message != self._logged:
            self._logged = message
            logger.error("requests of Envoy to limiter %r fail: %s", name, message, exc_info=error)
        limiter = self._live.policy.limiters.get(name)
        if limiter is not None and limiter.on_store_error == "closed":
            return answer(number, dict.fromkeys(range(number), REFUSED))
        return answer(number, {})

    def _matcher(self, domain: str) -> Matcher | None:
        policy = self._live.policy
        if policy is not self._policy:
            self._policy = policy
            self._matchers.clear()
        found = self._matchers.get(domain)
        if found is None and policy.envoy is not None and domain in policy.envoy.domains:
            found = self._matchers[domain] = Matcher(policy.envoy.domains[domain])
        return found

    def _parts_of(self, limiter: str) -> LimiterParts:
        version = self._live[limiter].current
        found = self._parts.get(limiter)
        if found is None or found.version is not version:
            found = self._parts[limiter] = LimiterParts(version)
        return found


class _Call:
    """The decisions of one request."""

    def __init__(self, parts: LimiterParts, deadline: float | None) -> None:
        self._parts = parts
        self._deadline = deadline

    async def decide(self, asked: Sequence[Asked], *, atomic: bool) -> list[SetOutcome]:
        """Decide counters together, or each separately; counters with only shadow rules are always separate."""
        live = self._parts.live_scopes
        together = [each for each in asked if atomic and each.scope in live]
        if len(together) == len(asked):
            return await self._all_or_nothing(together)
        alone = [each for each in asked if each not in together]
        outcomes, others = await asyncio.gather(
            self._all_or_nothing(together), asyncio.gather(*(self._charge([each]) for each in alone))
        )
        return [*outcomes, *others]

    async def record(self, asked: Sequence[Asked]) -> None:
        """Record units, even beyond the limit."""
        await asyncio.gather(*(self._record(each) for each in asked))

    async def _record(self, asked: Asked) -> None:
        part = self._parts.get([asked], self._deadline)
        await part.limiter.gate.decide(part.request([asked], "record"))

    async def _all_or_nothing(self, asked: Sequence[Asked]) -> list[SetOutcome]:
        if not asked:
            return []
        first = {each.scope: each for each in reversed(asked)}
        if len(first) == len(asked):
            return [await self._charge(asked)]
        others = [each for each in asked if first[each.scope] is not each]
        return await self._with_holds(others, list(first.values()))

    async def _with_holds(self, others: Sequence[Asked], together: Sequence[Asked]) -> list[SetOutcome]:
        """Hold the units of counters that share a scope with another one, charge the rest, and settle or release."""
        outcomes: list[SetOutcome] = []
        holds: list[AsyncHold] = []
        is_admitted = False
        try:
            for each in others:
                part = self._parts.get([each], self._deadline)
                outcomes.append(await self._held(part, each, holds))
                if not outcomes[-1].allowed:
                    return outcomes
            outcomes.append(await self._charge(together))
            is_admitted = outcomes[-1].allowed
        finally:
            for hold in holds:
                await (hold.settle(hold.cost) if is_admitted else hold.release())
        return outcomes

    async def _held(self, part: LimiterPart, asked: Asked, holds: list[AsyncHold]) -> SetOutcome:
        if not asked.cost:
            return await self._charge([asked])
        request = part.request([asked])
        quota = {
            rule.name: own
            for rule, own in zip(part.limiter.rules, request.quotas or (), strict=False)
            if own is not None
        }
        try:
            hold = await part.limiter.hold(request.key, asked.cost, quota=quota or None)
        except CostTooHigh as error:
            return _too_costly(part, [asked], error)
        if hold.allowed:
            holds.append(hold)
        return _outcome(part, [asked], hold.decision, request)

    async def _charge(self, asked: Sequence[Asked]) -> SetOutcome:
        """Decide counters with different scopes in one call of the store.

        A hit without cost is always admitted, so counters that are only checked are checked before the others are charged.
        """
        part = self._parts.get(asked, self._deadline)
        decide, request = part.limiter.gate.decide, part.request(asked)
        try:
            if not all(each.cost for each in asked):
                decision, _ = await decide(part.request(asked, "peek"))
                if not decision.allowed or not any(each.cost for each in asked):
                    return _outcome(part, asked, decision, request)
            decision, _ = await decide(request)
        except CostTooHigh as error:
            return _too_costly(part, asked, error)
        return _outcome(part, asked, decision, request)


def _outcome(part: LimiterPart, asked: Sequence[Asked], decision: Decision, request: Request) -> SetOutcome:
    if not part.limiter.rules:  # only shadow rules
        return SetOutcome(True, {}, MAX_UNITS, {})
    terms = part.terms(request)
    verdicts, limits = decision.fields, part.limits(terms)
    statuses: Statuses = {}
    for each, rules in zip(asked, part.places, strict=True):
        found = status_of([verdicts[rule] for rule in rules], [limits[rule] for rule in rules])
        for place in each.places:
            statuses[place] = found
    fields = part.writer.text_fields(decision, time.time_ns() // 1_000, terms)
    room = (decision.remaining or 0) if decision.allowed else -1
    return SetOutcome(decision.allowed, statuses, room, fields)


def _too_costly(part: LimiterPart, asked: Sequence[Asked], error: CostTooHigh) -> SetOutcome:
    """Return the refusal of a cost that can never be admitted."""
    limits = part.limits(part.terms(part.request(asked)))
    statuses: Statuses = {
        place: Status(OVER_LIMIT, limits[rule])
        for each, rules in zip(asked, part.places, strict=True)
        for rule in rules
        if part.limiter.rules[rule].name == error.rule
        for place in each.places
    }
    return SetOutcome(False, statuses, -1, {})
