"""The types of requests and responses.

They validate requests, encode responses, and are the schemas of the OpenAPI document. Times are seconds, exact to the
microsecond. `None` means "not applicable".
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

MAX_CALLS = 1000
"""Calls in one batch."""

MAX_KEY = 512
"""Bytes of the longest key, or part of one; longer keys are replaced by their digest."""

MAX_TIER = 200

Units = Annotated[int, Meta(ge=0, le=MAX_UNITS, description="Units, a whole number.")]
Cost = Annotated[
    Units | dict[str, Units],
    Meta(
        description="Units: a whole number for every unit, or an object by unit, in which requests default to 1.",
        examples=[1, {"tokens": 800}],
    ),
]
CostOfEach = Annotated[
    Units | dict[str, Units] | list[Units],
    Meta(
        description="Units: as elsewhere, or an array with a number for each rule, in the order of the rules."
    ),
]
WireQuota = Annotated[
    str | Units | dict[str, str | Units | None] | None,
    Meta(
        description="A quota for this call only, in the form of the policy file; for several rules, an object by rule name.",
        examples=["50/minute", {"tokens": "90000/minute", "in flight": 20}],
    ),
]
WireKey = Annotated[
    str | dict[str, str | dict[str, str]] | None,
    Meta(
        description='The key: text, or an object with an entry per scope. Bytes are written {"$base64": "..."}. '
        f"A text longer than {MAX_KEY} bytes is replaced by sha256: and the 64 digits of its SHA-256.",
        examples=["alice", {"user": "42", "realm": "north"}, {"$base64": "AAEC"}],
    ),
]
Tier = Annotated[
    Annotated[str, Meta(max_length=MAX_TIER)] | None,
    Meta(description="The caller's tier; an unknown tier gets the default quota."),
]
Seconds = float


WireCost = int | dict[str, int]
"""The type of a cost in a message."""


class Body(Struct, forbid_unknown_fields=True):
    """Base of all request bodies; unknown fields are errors."""


class HitBody(Body):
    """Units for a key; `final` is false for an attempt that is repeated, whose refusal no penalty counts."""

    key: WireKey = None
    cost: Cost = 1
    tier: Tier = None
    quota: WireQuota = None
    final: bool = True


class RecordBody(Body):
    """Units that were already used."""

    key: WireKey = None
    cost: CostOfEach = 1
    tier: Tier = None
    quota: WireQuota = None


class ResetBody(Body):
    """The key to reset."""

    key: WireKey = None


class SettleBody(Body):
    """The true cost of a hold."""

    cost: Cost


class ReleaseBody(Body):
    """Empty: all units are given back."""


class RenewRequest(HitBody):
    """The original call of the hold; if the hold has expired, its units are taken again."""

    limiter: str = ""


class ConfirmBody(Body):
    """The true cost, if it differs from the held cost."""

    cost: Cost | None = None
    anew: RenewRequest | None = None


class RenewBody(Body):
    """Empty: the lease of the hold's places is extended."""


class InspectBody(Body):
    """The key to inspect. A text applies to every scope of a limiter with scopes."""

    key: WireKey = None
    tier: Tier = None


class BatchCall(Body):
    """One call of a batch, on a limiter or on a hold."""

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
    final: bool = True


class BatchBody(Body):
    """Calls that are answered separately, in order."""

    calls: Annotated[list[BatchCall], Meta(max_length=MAX_CALLS)]


class CandidateBody(Body):
    """A candidate quota for a live rule; null removes the candidate."""

    rule: str
    quota: str | None


class CandidateAnswer(Struct):
    """The current candidate of a rule."""

    limiter: str
    rule: str
    quota: str | None


class TrafficBody(Body):
    """Whether the demo's callers should send requests."""

    on: bool


class RuleAnswer(Struct):
    """The decision of one rule."""

    name: str
    allowed: bool
    limit: int
    remaining: int
    retry_after: Seconds | None
    reset_after: Seconds | None


class DecisionAnswer(Struct):
    """The decision of all rules; limit, remaining and times are those of the binding rule."""

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
    """The recorded cost; if degraded, it may not be counted, because the store could not be reached."""

    recorded: CostOfEach
    degraded: bool


class HoldAnswer(Struct):
    """The decision, and the id of the hold; null if it was refused."""

    decision: DecisionAnswer
    hold: str | None
    expires_after: Seconds | None


class WaitAnswer(Struct):
    """Seconds until the call would be admitted: 0 for now, null for never."""

    allowed: bool
    wait: Seconds | None


class ResetAnswer(Struct):
    """The key was reset."""

    reset: bool = True


class FinishAnswer(Struct):
    """The outcome of a hold; `first` is false if it was settled or released before.

    `degraded`: the store could not be reached, so units above the held cost may not be counted. Only the first response
    reports it reliably.
    """

    hold: str
    limiter: str
    held: Cost
    cost: Cost
    first: bool
    degraded: bool


class BatchAnswer(Struct):
    """The status and body that the call would have had as a single request."""

    status: int
    body: Any  # `headgate_server.openapi` has its schema


class BatchAnswers(Struct):
    """One answer per call, in the order of the calls."""

    answers: list[BatchAnswer]


class RuleShown(Struct):
    """A rule of the policy file; quotas have the form of the file: for a concurrent rule, a number.

    `toml`: the rule as TOML. `source`: its position, such as headgate.toml:12; null if it is not in the file.
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
    growth: int | None
    longest: Seconds | None
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
    """The state of a key in one limiter, or the reason in `error`."""

    name: str
    results: list[RuleUsage]
    error: str | None = None


class InspectAnswer(Struct):
    """The state of a key in every limiter."""

    limiters: list[LimiterState]


class StoreShown(Struct):
    """The state of a limiter's store.

    `since` is the start of an outage. `p50` and `p99` are the median and the 99th percentile of the response time in
    seconds, over the last one to two minutes.
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
    """The process is running."""

    status: Literal["ok"] = "ok"


class Readiness(Struct):
    """Whether every store can count."""

    status: Literal["ready", "not ready"]
    stores: list[StoreShown]


class TrafficAnswer(Struct):
    """Whether the demo's callers send requests."""

    on: bool


class Figures(Struct):
    """Numbers of decisions; `degraded` are those of the failure policy, `degraded_refused` the refusals among them."""

    admitted: int = 0
    refused: int = 0
    degraded: int = 0
    degraded_refused: int = 0


class ShadowFigures(Struct):
    """The decisions that a shadow rule would have made.

    `candidate_for`: the live rule, if this is a candidate; then `live_refused` is the number of its refusals in the same
    time, `admitted` the number of these that the candidate would have admitted, and `toml` the candidate for the policy
    file. `warming_up_until`: end of the candidate's warm-up, in seconds since the epoch; until then its figures are too
    favourable, and then they start from 0 again. Null after the warm-up.
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
    """One of the most refused keys; `refused` is a lower bound.

    `key` is text to show, `inspect` the key for `/v1/inspect`; null if it cannot be written as JSON.
    """

    limiter: str
    key: str
    refused: int
    inspect: WireKey = None


class RuleRefusals(Struct):
    """The refusals of a rule by tier; `tier` is null for unknown tiers."""

    limiter: str
    rule: str
    tier: str | None
    refused: int


class DemoService(Struct):
    """A service of the demo, with the numbers of its callers."""

    name: str
    url: str
    sent: int
    refused: int


class DemoFigures(Struct):
    """The demo's callers and services."""

    traffic: bool
    services: list[DemoService]


class Tick(Struct):
    """One second of all workers together; `totals` and `refusals` count since `started`.

    `held`: units of open holds by limiter and unit; for a concurrent rule, the held places of all keys.
    `seconds`: the seconds that the tick covers, if the server was too busy for one tick per second.
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
"""The short form of figures: admitted, refused, degraded, degraded_refused."""


class Second(Struct, omit_defaults=True):
    """The short form of a tick: admitted, refused, degraded, degraded_refused of each limiter with decisions.

    `seconds`: the seconds that it covers, if the server was too busy for one tick per second.
    """

    time: int
    limiters: dict[str, Row]
    seconds: int = 1


class History(Struct):
    """The last minutes, oldest first."""

    ticks: list[Second] = field(default_factory=list)


class HistoryStep(Struct):
    """The decisions of a step that starts at `time`, as in `Second`; `seconds` of it are known."""

    time: int
    seconds: int = 0
    limiters: dict[str, Row] = field(default_factory=dict)


class HistoryAnswer(Struct):
    """A range of the history in steps of `step` seconds, oldest first; steps without data are missing."""

    step: int
    steps: list[HistoryStep]


_SURELY_SHORT = MAX_KEY // 4
"""Characters that always fit into `MAX_KEY` bytes."""


def key_from(wire: str | dict[str, str | dict[str, str]] | None) -> Key | None:
    """Return the key for a limiter; long texts are replaced by their digest.

    Raises:
        ApiProblem: 400 if it is not a key.
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
    return raw if len(raw) <= MAX_KEY else b"sha256:" + sha256(raw).hexdigest().encode()


def _shortened(key: str) -> str:
    raw = key.encode("utf-8", "surrogatepass")
    return key if len(raw) <= MAX_KEY else f"sha256:{sha256(raw).hexdigest()}"


def wire_cost(cost: int | Mapping[str, int]) -> WireCost:
    """Return a cost for a message."""
    return cost if isinstance(cost, int) else dict(cost)


def decision_answer(decision: Decision) -> DecisionAnswer:
    """Return a decision for a message."""
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
            # Not from `results`: creating these takes longer than everything else.
            for name, (allowed, limit, remaining, retry_after_us, reset_after_us) in zip(
                decision.names, decision.fields, strict=True
            )
        ],
    )


def wait_answer(decision: Decision) -> WaitAnswer:
    """Return the waiting time for a decision."""
    return WaitAnswer(decision.allowed, 0.0 if decision.allowed else decision.retry_after)
