"""All endpoints of the server, with documentation and examples."""

from __future__ import annotations

from functools import cache, partial

from headgate import sliding_window
from headgate.usage import RuleUsage
from headgate_server.candidates import Candidates
from headgate_server.describe import rule_shown
from headgate_server.events import Events
from headgate_server.history import DecisionHistory
from headgate_server.metrics import CONTENT_TYPE, ServerMetrics
from headgate_server.openapi import document
from headgate_server.operations import Operations
from headgate_server.pages import SECURITY, find_page, is_known
from headgate_server.problems import ApiProblem
from headgate_server.replies import PRIVATE, Reply, Stream, json_reply
from headgate_server.routing import ApiRequest, Route
from headgate_server.statistics import Demo
from headgate_server.wire import (
    BatchAnswer,
    BatchAnswers,
    BatchBody,
    CandidateAnswer,
    CandidateBody,
    ConfirmBody,
    DecisionAnswer,
    FinishAnswer,
    HealthAnswer,
    HistoryAnswer,
    HitBody,
    HoldAnswer,
    InspectAnswer,
    InspectBody,
    LimiterShown,
    LimitersShown,
    LimiterState,
    Readiness,
    RecordAnswer,
    RecordBody,
    ReleaseBody,
    RenewBody,
    ResetAnswer,
    ResetBody,
    RuleAnswer,
    SettleBody,
    StoreShown,
    TrafficAnswer,
    TrafficBody,
    WaitAnswer,
)

_HOLD = "txuqFretGu8XE5rfpxGmBfnPdy7K"
_LOGIN = {"name": "login"}
_LIMITER = LimiterShown(
    name="login",
    rules=[rule_shown(sliding_window("5/minute", tiers={"pro": "50/minute"}), "headgate.toml:13")],
    shadow=[],
    store="redis://***@db:6379/0",
    on_store_error="open",
    default_tier=None,
    headers="both",
    source="headgate.toml:12",
)


def _admitted(remaining: int, limit: int, rule: str) -> DecisionAnswer:
    result = RuleAnswer(rule, True, limit, remaining, None, 60.5)
    return DecisionAnswer(True, limit, remaining, None, 60.5, rule, None, False, [result])


_ADMITTED = _admitted(4, 5, "per-minute")
_CANNOT = (422, 503)
_CANNOT_END = (409, *_CANNOT)


def endpoints(
    operations: Operations,
    events: Events,
    history: DecisionHistory,
    candidates: Candidates,
    metrics: ServerMetrics | None,
    demo: Demo | None,
) -> list[Route]:
    """Return the table of endpoints."""
    do = operations
    limiter, hold = "/v1/limiters/{name}", "/v1/holds/{id}"
    table = [
        Route("POST", f"{limiter}/hit", "decide", do.hit, HitBody, DecisionAnswer, charges=True).documented(
            "hit",
            "Take units if all rules admit them",
            "A refusal takes nothing from any rule.",
            _LOGIN,
            {"key": "alice", "cost": 1},
            _ADMITTED,
            problems=_CANNOT,
        ),
        Route("POST", f"{limiter}/check", "decide", do.check, HitBody, DecisionAnswer).documented(
            "check",
            "Return what a hit would return, without taking units",
            values=_LOGIN,
            body={"key": "alice"},
            answer=_ADMITTED,
            problems=_CANNOT,
        ),
        Route(
            "POST", f"{limiter}/record", "decide", do.record, RecordBody, RecordAnswer, charges=True
        ).documented(
            "record",
            "Count units that were already used, even beyond the limit",
            values=_LOGIN,
            body={"key": "alice", "cost": 2},
            answer={"recorded": 2, "degraded": False},
            problems=_CANNOT,
        ),
        Route(
            "POST",
            f"{limiter}/hold",
            "decide",
            do.hold,
            HitBody,
            HoldAnswer,
            wants_request=True,
            charges=True,
        ).documented(
            "hold",
            "Take units that are not final yet",
            "Settle the hold at its true cost, confirm it, or release it. Otherwise its units count until they "
            "expire, and its places in a concurrent rule until their lease ends.",
            {"name": "llm"},
            {"key": "alice", "cost": 800},
            HoldAnswer(_admitted(200, 1000, "tokens"), _HOLD, 61.0),
            problems=(*_CANNOT, 501),
        ),
        Route("POST", f"{limiter}/wait-hint", "decide", do.wait_hint, HitBody, WaitAnswer).documented(
            "wait_hint",
            "Return how long until a hit would be admitted",
            "0 for now, null for never. Calls are not queued: another caller may take the units first.",
            _LOGIN,
            {"key": "alice"},
            {"allowed": True, "wait": 0.0},
            problems=_CANNOT,
        ),
        Route(
            "POST", f"{limiter}/reset", "administer", do.reset, ResetBody, ResetAnswer, wants_request=True
        ).documented(
            "reset",
            "Reset the counts of a key",
            "In every rule of the limiter. A rule that is shared by all keys is reset for all of them.",
            _LOGIN,
            {"key": "alice"},
            {"reset": True},
            problems=_CANNOT,
        ),
        Route(
            "POST",
            f"{limiter}/candidate",
            "administer",
            partial(_candidate, candidates),
            CandidateBody,
            CandidateAnswer,
        ).documented(
            "candidate",
            "Try another quota for a live rule",
            "The candidate is a shadow rule, which refuses nothing, until the server ends; a quota of null removes it. "
            "The figures show what it would have refused, and what it would have admitted instead of the live rule.",
            values=_LOGIN,
            body={"rule": "per-minute", "quota": "3/minute"},
            answer={"limiter": "login", "rule": "per-minute", "quota": "3/minute"},
            problems=(404, 422),
        ),
        Route("POST", f"{hold}/settle", "decide", do.settle, SettleBody, FinishAnswer).documented(
            "settle",
            "Make a hold final at its true cost",
            "If the cost is lower than the held cost, the difference is given back; if it is higher, the excess is counted, "
            "even beyond the limit. Only the first settle or release has an effect; later ones return its outcome.",
            {"id": _HOLD},
            {"cost": 300},
            FinishAnswer(_HOLD, "llm", held=800, cost=300, first=True, degraded=False),
            problems=_CANNOT_END,
        ),
        Route("POST", f"{hold}/release", "decide", do.release, ReleaseBody, FinishAnswer).documented(
            "release",
            "Give all units of a hold back",
            "Like settle with a cost of 0.",
            {"id": _HOLD},
            {},
            FinishAnswer(_HOLD, "llm", held=800, cost=0, first=True, degraded=False),
            problems=_CANNOT_END,
        ),
        Route("POST", f"{hold}/confirm", "decide", do.confirm, ConfirmBody, DecisionAnswer).documented(
            "confirm",
            "Make a hold final as of now",
            "Its units are given back and taken again in one step, at the true cost if it is given. If they are not "
            "available now, the call is refused and the hold stays open. Its places in a concurrent rule are freed.",
            {"id": _HOLD},
            {"cost": 300},
            _admitted(700, 1000, "tokens"),
            problems=_CANNOT_END,
        ),
        Route("POST", f"{hold}/renew", "decide", do.renew, RenewBody, HoldAnswer).documented(
            "renew",
            "Extend the lease of a hold's places in a concurrent rule",
            "The lease is counted from now. The id stays the same, and the call may be repeated. It is refused if the lease "
            "has ended.",
            {"id": _HOLD},
            {},
            HoldAnswer(_admitted(4, 5, "in flight"), _HOLD, 60.0),
            problems=_CANNOT_END,
        ),
        Route(
            "POST", "/v1/batch", "decide", do.batch, BatchBody, BatchAnswers, wants_request=True
        ).documented(
            "batch",
            "Make several calls at once",
            "Each is answered like a single request, in order; at most 1000. A reset needs the permission "
            "`administer`.",
            body={
                "calls": [
                    {"limiter": "login", "operation": "hit", "key": "alice"},
                    {"limiter": "lgoin", "operation": "check", "key": "alice"},
                ]
            },
            answer=BatchAnswers(
                [
                    BatchAnswer(200, _ADMITTED),
                    BatchAnswer(
                        404,
                        ApiProblem(
                            404, "there is no limiter 'lgoin'; GET /v1/limiters lists them all"
                        ).document,
                    ),
                ]
            ),
        ),
        Route("POST", "/v1/inspect", "decide", do.inspect, InspectBody, InspectAnswer).documented(
            "inspect",
            "Show the state of a key in every limiter",
            "Nothing is taken. If the key does not fit the rules of a limiter, `error` has the reason. `used` may exceed "
            "the limit.",
            body={"key": "alice"},
            answer=InspectAnswer(
                [LimiterState("login", [RuleUsage("per-minute", 5, 5, 0, 48.2, 12.345678, None)])]
            ),
        ),
        Route("GET", "/v1/limiters", "token", do.limiters, gives=LimitersShown).documented(
            "limiters", "List all limiters", answer=LimitersShown([_LIMITER])
        ),
        Route("GET", limiter, "token", do.limiter, gives=LimiterShown).documented(
            "limiter", "Show one limiter", values=_LOGIN, answer=_LIMITER
        ),
        Route("GET", "/v1/events", "token", partial(_events, events)).documented(
            "events",
            "Stream the figures as server-sent events",
            "First an event `history` with up to five minutes by second (schema History), then the newest `tick` "
            "and one every second (schema Tick), of all workers together.",
            answer='event: tick\ndata: {"time":1763251200,"limiters":{},"totals":{},"stores":[],"shadow":[]}\n\n',
            media_type="text/event-stream",
            problems=(503,),
        ),
        Route(
            "GET", "/v1/history/{range}", "token", partial(_history, history), gives=HistoryAnswer
        ).documented(
            "history",
            "Show the decisions of the last hour or day",
            "`hour` in steps of one minute, `day` in steps of 15 minutes, of all workers together.",
            values={"range": "hour"},
            answer={
                "step": 60,
                "steps": [{"time": 1763251200, "seconds": 60, "limiters": {"login": [120, 3, 0, 0]}}],
            },
            problems=(404,),
        ),
        Route(
            "POST", "/v1/demo/traffic", "administer", partial(_traffic, demo), TrafficBody, TrafficAnswer
        ).documented(
            "demo_traffic",
            "Start or stop the demo's callers",
            "In the demo only.",
            body={"on": True},
            answer={"on": True},
            problems=(404,),
        ),
        Route("GET", "/healthz", "nothing", do.healthz, gives=HealthAnswer).documented(
            "healthz", "Report that the process is running", answer={"status": "ok"}
        ),
        Route(
            "GET", "/readyz", "nothing", partial(_readyz, do), gives=Readiness, wants_request=True
        ).documented(
            "readyz",
            "Report whether every store can count",
            "Status 503 if one cannot, with the reason: it is down, has no schema, is read-only. Decisions are then "
            "made by the limiters' failure policies.",
            answer=Readiness(
                "ready", [StoreShown("login", "memory://", up=True, breaker="closed", failures=0)]
            ),
        ),
        Route("GET", "/metrics", "token", partial(_metrics, metrics)).documented(
            "metrics",
            "Show metrics for Prometheus, of all workers together",
            answer='headgate_decisions_total{degraded="false",limiter="login",outcome="refused",rule="5/m"} 3.0\n',
            media_type="text/plain",
        ),
        Route("GET", "/", "nothing", _file, wants_request=True),
        Route("GET", "/static/{file}", "nothing", _file, wants_request=True),
    ]

    @cache  # created on the first request, because that takes four times as long as creating the rest of the application
    def described() -> Reply:
        return json_reply(document(table))

    async def openapi() -> Reply:
        return described()

    return [*table, Route("GET", "/openapi.json", "nothing", openapi)]


async def _readyz(operations: Operations, request: ApiRequest) -> Reply:
    readiness = await operations.readyz()
    if not request.may:  # without a token: status only
        readiness.stores = []
    return json_reply(readiness, 200 if readiness.status == "ready" else 503)


async def _events(events: Events) -> Stream:
    # Nginx buffers responses, unless it is told not to.
    fields = (
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    )
    return Stream((*fields, *SECURITY), await events.stream())


async def _candidate(candidates: Candidates, body: CandidateBody, name: str) -> CandidateAnswer:
    candidates.set(name, body.rule, body.quota)
    return CandidateAnswer(name, body.rule, body.quota)


async def _history(history: DecisionHistory, name: str) -> HistoryAnswer:
    found = history.range(name)
    if found is None:
        raise ApiProblem(404, "unknown range; use /v1/history/hour or /v1/history/day")
    return found


async def _metrics(metrics: ServerMetrics | None) -> Reply:
    if metrics is None:
        raise ApiProblem(404, "this server has no metrics")
    return Reply(200, ((b"content-type", CONTENT_TYPE), *PRIVATE), metrics.text())


async def _traffic(demo: Demo | None, body: TrafficBody) -> TrafficAnswer:
    if demo is None:
        raise ApiProblem(404, "this server is not the demo")
    demo.traffic = body.on
    return TrafficAnswer(demo.traffic)


async def _file(request: ApiRequest, name: str = "index.html") -> Reply:
    page = find_page(name)
    if is_known(page, request.fields):
        return Reply(304, page.fields, b"")
    return Reply(200, page.fields, page.content)
