"""What goes over the wire: the types of requests and responses.

They check what comes in, write what goes out, and are the schemas of the OpenAPI document: one source for all three. Times
are seconds, exact to the microsecond. `None` means that nothing applies, never -1.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from headgate import Decision
from headgate.clock import MICROSECONDS
from headgate.keys import BASE64, Key, PlainKey
from headgate.outage import FailureData
from headgate.quota import MAX_UNITS
from headgate.usage import RuleUsage
from headgate_server.problems import ApiProblem

MOST_CALLS = 1000
"""Calls in one batch."""

LONGEST_KEY = 512
"""Bytes of the longest key, or part of one, that is kept as it is; of a longer one only the digest is kept, everywhere."""

LONGEST_TIER = 200

Units = Annotated[int, Meta(ge=0, le=MAX_UNITS, description="Units, a whole number.")]
Cost = Annotated[
    Units | dict[str, Units],
    Meta(
        description="Units: a whole number of everything, or an object by unit. Requests that are not named are 1.",
        examples=[1, {"tokens": 800}],
    ),
]
CostOfEach = Annotated[
    Units | dict[str, Units] | list[Units],
    Meta(description="Units: as elsewhere, or an array with a number for each rule, in their order."),
]
WireQuota = Annotated[
    str | Units | dict[str, str | Units | None] | None,
    Meta(
        description="A quota for this call alone, as the policy file would have it; of several rules, an object by name.",
        examples=["50/minute", {"tokens": "90000/minute", "in flight": 20}],
    ),
]
WireKey = Annotated[
    str | dict[str, str | dict[str, str]] | None,
    Meta(
        description='Who: text, or an object with an entry per scope. Bytes are written {"$base64": "..."}. '
        f"What is longer than {LONGEST_KEY} bytes counts as its SHA-256, written sha256: and 64 digits.",
        examples=["alice", {"user": "42", "realm": "north"}, {"$base64": "AAEC"}],
    ),
]
Tier = Annotated[
    Annotated[str, Meta(max_length=LONGEST_TIER)] | None,
    Meta(description="The caller's tier; unknown ones count as the default."),
]
Seconds = float


WireCost = int | dict[str, int]
"""A cost as it goes over the wire."""


class Body(Struct, forbid_unknown_fields=True):
    """What every request body has in common: a misspelt field is an error, not a default."""


class HitBody(Body):
    """Units for a key."""

    key: WireKey = None
    cost: Cost = 1
    tier: Tier = None
    quota: WireQuota = None


class RecordBody(Body):
    """Units that have been used already."""

    key: WireKey = None
    cost: CostOfEach = 1
    tier: Tier = None
    quota: WireQuota = None


class ResetBody(Body):
    """Whose counts to forget."""

    key: WireKey = None


class SettleBody(Body):
    """The true cost of what was held."""

    cost: Cost


class ReleaseBody(Body):
    """Nothing: all units go back."""


class RenewRequest(HitBody):
    """What the hold was taken for: if it is forgotten by now, its units have expired, and are taken anew."""

    limiter: str = ""


class ConfirmBody(Body):
    """The true cost, if it is not what was held."""

    cost: Cost | None = None
    anew: RenewRequest | None = None


class RenewBody(Body):
    """Nothing: the lease of its places is extended."""


class InspectBody(Body):
    """Whose state to show. Text serves as every scope of a limiter with scopes."""

    key: WireKey = None
    tier: Tier = None


class BatchCall(Body):
    """One call of a batch: on a limiter, or on a hold."""

    operation: Literal[
        "hit", "check", "record", "hold", "wait-hint", "reset", "settle", "release", "confirm", "renew"
    ]
    limiter: str | None = None
    hold: str | None = None
    key: WireKey = None
    cost: CostOfEach | None = None
    tier: Tier = None
    quota: WireQuota = None
    anew: RenewRequest | None = None


class BatchBody(Body):
    """Calls that are answered each on its own, in order."""

    calls: Annotated[list[BatchCall], Meta(max_length=MOST_CALLS)]


class CandidateBody(Body):
    """Another quota for a live rule, to be watched; null ends that."""

    rule: str
    quota: str | None


class CandidateAnswer(Struct):
    """What is watched now."""

    limiter: str
    rule: str
    quota: str | None


class TrafficBody(Body):
    """Whether the demo's callers should be busy."""

    on: bool


class RuleAnswer(Struct):
    """What one rule said."""

    name: str
    allowed: bool
    limit: int
    remaining: int
    retry_after: Seconds | None
    reset_after: Seconds | None


class DecisionAnswer(Struct):
    """What all rules said; the figures are those of the rule that binds."""

    allowed: bool
    limit: int | None
    remaining: int | None
    retry_after: Seconds | None
    reset_after: Seconds | None
    rule: str | None
    denied_by: str | None
    degraded: bool
    results: list[RuleAnswer]


class RecordAnswer(Struct):
    """What was counted; if it is degraded, it may not be, because the store could not be asked."""

    recorded: CostOfEach
    degraded: bool


class HoldAnswer(Struct):
    """The decision, and what to call the hold when it is settled; no hold if it was refused."""

    decision: DecisionAnswer
    hold: str | None
    expires_after: Seconds | None


class WaitAnswer(Struct):
    """How long until the call would be admitted: 0 is now, null is never."""

    allowed: bool
    wait: Seconds | None


class ResetAnswer(Struct):
    """Done."""

    reset: bool = True


class FinishAnswer(Struct):
    """What stands for the hold; `first` is false if it was settled or released before.

    `degraded`: the store could not be asked, so that units above what was held may not be counted. Only the first answer is
    sure to say it.
    """

    hold: str
    limiter: str
    held: Cost
    cost: Cost
    first: bool
    degraded: bool


class BatchAnswer(Struct):
    """One answer: the status and body that the call alone would have had."""

    status: int
    body: Any  # what the document says of it is written in `headgate_server.openapi`


class BatchAnswers(Struct):
    """One answer per call, in the order of the calls."""

    answers: list[BatchAnswer]


class RuleShown(Struct):
    """A rule of the policy file; its quotas as they are there: that of a concurrent rule is a number.

    `toml`: the rule as the file could have it. `source`: where it is, as in headgate.toml:12; null if it is not there.
    """

    name: str
    kind: str
    quota: str | int
    limit: int
    period: Seconds
    burst: int | None
    scope: str | None
    tiers: dict[str, str | int]
    strict: bool
    buckets: int
    words: str
    unit: str
    lease: Seconds | None
    timezone: str | None
    toml: str
    source: str | None


class LimiterShown(Struct):
    """A limiter of the policy file."""

    name: str
    rules: list[RuleShown]
    shadow: list[RuleShown]
    store: str
    on_store_error: FailureData
    default_tier: str | None
    headers: str
    source: str | None = None


class LimitersShown(Struct):
    """All limiters."""

    limiters: list[LimiterShown]


class LimiterState(Struct):
    """The state of a key in one limiter, or in `error` why it cannot be shown."""

    name: str
    results: list[RuleUsage]
    error: str | None = None


class InspectAnswer(Struct):
    """The state of a key in every limiter."""

    limiters: list[LimiterState]


class StoreShown(Struct):
    """How a limiter's store is doing.

    `since` (when it went down), `reason` and `last_contact` are null where nothing applies; `p50` and `p99` are the seconds
    within which it has answered half and 99% of the calls of the last minute or two.
    """

    limiter: str
    store: str
    up: bool
    breaker: Literal["closed", "open"]
    failures: int
    reason: str | None = None
    since: Seconds | None = None
    last_contact: Seconds | None = None
    p50: Seconds | None = None
    p99: Seconds | None = None


class HealthAnswer(Struct):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(Struct):
    """Whether every store answers."""

    status: Literal["ready", "not ready"]
    stores: list[StoreShown]


class TrafficAnswer(Struct):
    """Whether the demo's callers are busy."""

    on: bool


class Figures(Struct):
    """Decisions; those that the failure policy made instead of the store are counted again as degraded.

    `degraded_refused`: the refusals among those.
    """

    admitted: int = 0
    refused: int = 0
    degraded: int = 0
    degraded_refused: int = 0


class ShadowFigures(Struct):
    """What a rule that only watches would have done.

    `candidate_for`: the live rule that it is a candidate for; then `live_refused` is what that one has refused meanwhile,
    `admitted` how many of these the candidate would have admitted, and `toml` what puts the candidate in its place.
    `warming_up_until`: when a candidate will have seen all that it would count, in seconds since the epoch; its figures
    are too favourable until then, and start from 0 again. Null if it has.
    """

    limiter: str
    rule: str
    words: str
    asked: int
    refused: int
    failed: int
    admitted: int = 0
    quota: str = ""
    candidate_for: str | None = None
    live_refused: int = 0
    toml: str = ""
    warming_up_until: float | None = None


class RefusedKey(Struct):
    """One of the keys refused most; at least so often.

    `key` is text to show, `inspect` the key itself as `/v1/inspect` takes it; null if there is none, or no JSON for it.
    """

    limiter: str
    key: str
    refused: int
    inspect: WireKey = None


class RuleRefusals(Struct):
    """How often a rule has refused callers of a tier; `tier` is null for those whose tier it does not know."""

    limiter: str
    rule: str
    tier: str | None
    refused: int


class DemoService(Struct):
    """A service of the demo, and what its callers saw."""

    name: str
    url: str
    sent: int
    refused: int


class DemoFigures(Struct):
    """The demo's callers and services."""

    traffic: bool
    services: list[DemoService]


class Tick(Struct):
    """One second, all workers together; `totals` and `refusals` count since `started`.

    `held`: the units of open holds, by limiter and unit; of a concurrent rule these are the places held, of all keys.
    `seconds`: how many it is about, if the server was too busy to take note of each.
    """

    time: int
    limiters: dict[str, Figures]
    totals: dict[str, Figures]
    stores: list[StoreShown]
    shadow: list[ShadowFigures]
    top: list[RefusedKey] | None = None
    policy_error: str | None = None
    workers: int = 1
    demo: DemoFigures | None = None
    refusals: list[RuleRefusals] = field(default_factory=list)
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    started: int = 0
    seconds: int = 1


Row = tuple[int, int, int, int]
"""Figures in short: admitted, refused, degraded, and the refused among the degraded."""


class Second(Struct, omit_defaults=True):
    """One second in short: of each limiter that decided something admitted, refused, degraded, degraded_refused.

    `seconds`: how many it is about, if the server was too busy to take note of each.
    """

    time: int
    limiters: dict[str, Row]
    seconds: int = 1


class History(Struct):
    """The last minutes, oldest first."""

    ticks: list[Second] = field(default_factory=list)


class HistoryStep(Struct):
    """What was decided in the `seconds` that are known of a step from `time` on, as in `Second`."""

    time: int
    seconds: int = 0
    limiters: dict[str, Row] = field(default_factory=dict)


class HistoryAnswer(Struct):
    """A range of the history in steps of so many seconds, oldest first; a step of which nothing is known is missing."""

    step: int
    steps: list[HistoryStep]


_SURELY_SHORT = LONGEST_KEY // 4
"""Characters that fit into the bytes of the longest key, whatever they are."""


def key_from(wire: str | dict[str, str | dict[str, str]] | None) -> Key | None:
    """Return a key as limiters take it; what is long is its digest.

    Raises:
        ApiProblem: It is no key: 400.
    """
    if type(wire) is str:
        return wire if len(wire) <= _SURELY_SHORT else _shortened(wire)
    if wire is None:
        return None
    assert isinstance(wire, dict)
    if wire.keys() == {BASE64}:
        return _plain(wire)
    return {scope: _plain(part) for scope, part in wire.items()}


def _plain(part: str | dict[str, str | dict[str, str]] | dict[str, str]) -> PlainKey:
    if isinstance(part, str):
        return part if len(part) <= _SURELY_SHORT else _shortened(part)
    encoded = part.get(BASE64)
    if len(part) != 1 or not isinstance(encoded, str):
        raise ApiProblem(400, f'a key is text, or bytes as {{"{BASE64}": "..."}} - at `$.key`')
    try:
        raw = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiProblem(400, f"not base64: {error} - at `$.key`") from error
    return raw if len(raw) <= LONGEST_KEY else b"sha256:" + sha256(raw).hexdigest().encode()


def _shortened(key: str) -> str:
    raw = key.encode("utf-8", "surrogatepass")
    return key if len(raw) <= LONGEST_KEY else f"sha256:{sha256(raw).hexdigest()}"


def wire_cost(cost: int | Mapping[str, int]) -> WireCost:
    """Return a cost as it goes over the wire."""
    return cost if isinstance(cost, int) else dict(cost)


def decision_answer(decision: Decision) -> DecisionAnswer:
    """Return a decision as it goes over the wire."""
    return DecisionAnswer(
        decision.allowed,
        decision.limit,
        decision.remaining,
        decision.retry_after,
        decision.reset_after,
        decision.rule,
        decision.denied_by,
        decision.degraded,
        [
            RuleAnswer(
                name,
                allowed,
                limit,
                remaining,
                None if retry_after_us is None else retry_after_us / MICROSECONDS,
                None if reset_after_us is None else reset_after_us / MICROSECONDS,
            )
            # Not by `results`: to make those first takes longer than all the rest.
            for name, (allowed, limit, remaining, retry_after_us, reset_after_us) in zip(
                decision.names, decision.fields, strict=True
            )
        ],
    )


def wait_answer(decision: Decision) -> WaitAnswer:
    """Return how long until what was decided would be admitted."""
    return WaitAnswer(decision.allowed, 0.0 if decision.allowed else decision.retry_after)
