"""All endpoints of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headgate_server.candidates import Candidates
from headgate_server.events import Events
from headgate_server.history import DecisionHistory
from headgate_server.metrics import CONTENT_TYPE, ServerMetrics
from headgate_server.openapi import document
from headgate_server.operations import Operations
from headgate_server.pages import SECURITY, Page, find_page, is_known
from headgate_server.problems import ApiProblem
from headgate_server.replies import PRIVATE, Reply, Stream, json_reply
from headgate_server.routing import ApiRequest, Route
from headgate_server.statistics import Demo
from headgate_server.wire import (
    BatchAnswers,
    BatchAsk,
    CandidateAnswer,
    CandidateAsk,
    ConfirmAsk,
    DecisionAnswer,
    FinishAnswer,
    HealthAnswer,
    HistoryAnswer,
    HitAsk,
    HoldAnswer,
    InspectAnswer,
    InspectAsk,
    LimiterShown,
    LimitersShown,
    Readiness,
    RecordAnswer,
    RecordAsk,
    ReleaseAsk,
    RenewAsk,
    ResetAnswer,
    ResetAsk,
    SettleAsk,
    TrafficAnswer,
    TrafficAsk,
    WaitAnswer,
)


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
        Route("POST", f"{limiter}/hit", "decide", do.hit, HitAsk, DecisionAnswer, charges=True),
        Route("POST", f"{limiter}/check", "decide", do.check, HitAsk, DecisionAnswer),
        Route("POST", f"{limiter}/record", "decide", do.record, RecordAsk, RecordAnswer, charges=True),
        Route(
            "POST", f"{limiter}/hold", "decide", do.hold, HitAsk, HoldAnswer, wants_request=True, charges=True
        ),
        Route("POST", f"{limiter}/wait-hint", "decide", do.wait_hint, HitAsk, WaitAnswer),
        Route("POST", f"{limiter}/reset", "administer", do.reset, ResetAsk, ResetAnswer, wants_request=True),
        Route(
            "POST",
            f"{limiter}/candidate",
            "administer",
            _candidate(candidates),
            CandidateAsk,
            CandidateAnswer,
        ),
        Route("POST", f"{hold}/settle", "decide", do.settle, SettleAsk, FinishAnswer),
        Route("POST", f"{hold}/release", "decide", do.release, ReleaseAsk, FinishAnswer),
        Route("POST", f"{hold}/confirm", "decide", do.confirm, ConfirmAsk, DecisionAnswer),
        Route("POST", f"{hold}/renew", "decide", do.renew, RenewAsk, HoldAnswer),
        Route("POST", "/v1/batch", "decide", do.batch, BatchAsk, BatchAnswers, wants_request=True),
        Route("POST", "/v1/inspect", "decide", do.inspect, InspectAsk, InspectAnswer),
        Route("GET", "/v1/limiters", "token", do.limiters, gives=LimitersShown),
        Route("GET", limiter, "token", do.limiter, gives=LimiterShown),
        Route("GET", "/v1/events", "token", _events(events)),
        Route("GET", "/v1/history/{range}", "token", _history(history), gives=HistoryAnswer),
        Route("POST", "/v1/demo/traffic", "administer", _traffic(demo), TrafficAsk, TrafficAnswer),
        Route("GET", "/healthz", "nothing", do.healthz, gives=HealthAnswer),
        Route("GET", "/readyz", "nothing", _readyz(do), gives=Readiness, wants_request=True),
        Route("GET", "/metrics", "token", _metrics(metrics)),
        Route("GET", "/", "nothing", _page, wants_request=True),
        Route("GET", "/static/{file}", "nothing", _file, wants_request=True),
    ]
    described = json_reply(document(table))

    async def openapi() -> Reply:
        return described

    return [*table, Route("GET", "/openapi.json", "nothing", openapi)]


def _readyz(operations: Operations) -> Callable[[ApiRequest], Awaitable[Reply]]:
    async def readyz(request: ApiRequest) -> Reply:
        readiness = await operations.readyz()
        if not request.may:  # nobody has to show a token here, so strangers are told whether, not what
            readiness.stores = []
        return json_reply(readiness, 200 if readiness.status == "ready" else 503)

    return readyz


def _events(events: Events) -> Callable[[], Awaitable[Stream]]:
    fields = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), *SECURITY)

    async def stream() -> Stream:
        return Stream(fields, await events.stream())

    return stream


def _candidate(candidates: Candidates) -> Callable[[CandidateAsk, str], Awaitable[CandidateAnswer]]:
    async def watch(ask: CandidateAsk, name: str) -> CandidateAnswer:
        candidates.set(name, ask.rule, ask.quota)
        return CandidateAnswer(name, ask.rule, ask.quota)

    return watch


def _history(history: DecisionHistory) -> Callable[[str], Awaitable[HistoryAnswer]]:
    async def range_of(name: str) -> HistoryAnswer:
        found = history.range(name)
        if found is None:
            raise ApiProblem(404, "there is /v1/history/hour and /v1/history/day")
        return found

    return range_of


def _metrics(metrics: ServerMetrics | None) -> Callable[[], Awaitable[Reply]]:
    async def text() -> Reply:
        if metrics is None:
            raise ApiProblem(404, "this server keeps no metrics")
        return Reply(200, ((b"content-type", CONTENT_TYPE), *PRIVATE), metrics.text())

    return text


def _traffic(demo: Demo | None) -> Callable[[TrafficAsk], Awaitable[TrafficAnswer]]:
    async def switch(ask: TrafficAsk) -> TrafficAnswer:
        if demo is None:
            raise ApiProblem(404, "this is not the demo: there is no traffic to switch")
        demo.traffic = ask.on
        return TrafficAnswer(demo.traffic)

    return switch


async def _page(request: ApiRequest) -> Reply:
    return _sent(find_page("index.html"), request)


async def _file(request: ApiRequest, name: str) -> Reply:
    return _sent(find_page(name), request)


def _sent(page: Page, request: ApiRequest) -> Reply:
    if is_known(page, request.headers):
        return Reply(304, page.fields, b"")
    return Reply(200, page.fields, page.content)
