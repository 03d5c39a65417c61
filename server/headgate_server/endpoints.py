"""All endpoints of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headgate_server.board import Demo
from headgate_server.candidates import Candidates
from headgate_server.events import Events
from headgate_server.metrics import CONTENT_TYPE, Metrics
from headgate_server.openapi import document
from headgate_server.operations import Operations
from headgate_server.pages import SECURITY, Page, find_page, is_known
from headgate_server.past import Past
from headgate_server.problems import Problem
from headgate_server.replies import PRIVATE, Reply, Stream, json_reply
from headgate_server.routing import Endpoint, Request
from headgate_server.wire import (
    Ask,
    BatchAnswers,
    BatchAsk,
    CandidateAnswer,
    CandidateAsk,
    ConfirmAsk,
    DecisionAnswer,
    FinishAnswer,
    Health,
    HoldAnswer,
    InspectAnswer,
    InspectAsk,
    LimiterShown,
    LimitersShown,
    PastAnswer,
    Readiness,
    RecordAnswer,
    RecordAsk,
    ReleaseAsk,
    RenewAsk,
    ResetAnswer,
    ResetAsk,
    SettleAsk,
    Traffic,
    TrafficAsk,
    WaitAnswer,
)


def endpoints(
    operations: Operations,
    events: Events,
    past: Past,
    candidates: Candidates,
    metrics: Metrics | None,
    demo: Demo | None,
) -> list[Endpoint]:
    """Return the table of endpoints."""
    do = operations
    limiter, hold = "/v1/limiters/{name}", "/v1/holds/{id}"
    table = [
        Endpoint("POST", f"{limiter}/hit", "decide", do.hit, Ask, DecisionAnswer),
        Endpoint("POST", f"{limiter}/check", "decide", do.check, Ask, DecisionAnswer),
        Endpoint("POST", f"{limiter}/record", "decide", do.record, RecordAsk, RecordAnswer),
        Endpoint("POST", f"{limiter}/hold", "decide", do.hold, Ask, HoldAnswer, wants_request=True),
        Endpoint("POST", f"{limiter}/wait-hint", "decide", do.wait_hint, Ask, WaitAnswer),
        Endpoint(
            "POST", f"{limiter}/reset", "administer", do.reset, ResetAsk, ResetAnswer, wants_request=True
        ),
        Endpoint(
            "POST",
            f"{limiter}/candidate",
            "administer",
            _candidate(candidates),
            CandidateAsk,
            CandidateAnswer,
        ),
        Endpoint("POST", f"{hold}/settle", "decide", do.settle, SettleAsk, FinishAnswer),
        Endpoint("POST", f"{hold}/release", "decide", do.release, ReleaseAsk, FinishAnswer),
        Endpoint("POST", f"{hold}/confirm", "decide", do.confirm, ConfirmAsk, DecisionAnswer),
        Endpoint("POST", f"{hold}/renew", "decide", do.renew, RenewAsk, HoldAnswer),
        Endpoint("POST", "/v1/batch", "decide", do.batch, BatchAsk, BatchAnswers, wants_request=True),
        Endpoint("POST", "/v1/inspect", "decide", do.inspect, InspectAsk, InspectAnswer),
        Endpoint("GET", "/v1/limiters", "token", do.limiters, gives=LimitersShown),
        Endpoint("GET", limiter, "token", do.limiter, gives=LimiterShown),
        Endpoint("GET", "/v1/events", "token", _events(events)),
        Endpoint("GET", "/v1/history/{range}", "token", _past(past), gives=PastAnswer),
        Endpoint("POST", "/v1/demo/traffic", "administer", _traffic(demo), TrafficAsk, Traffic),
        Endpoint("GET", "/healthz", "nothing", do.healthz, gives=Health),
        Endpoint("GET", "/readyz", "nothing", _readyz(do), gives=Readiness, wants_request=True),
        Endpoint("GET", "/metrics", "token", _metrics(metrics)),
        Endpoint("GET", "/", "nothing", _page, wants_request=True),
        Endpoint("GET", "/static/{file}", "nothing", _file, wants_request=True),
    ]
    described = json_reply(document(table))

    async def openapi() -> Reply:
        return described

    return [*table, Endpoint("GET", "/openapi.json", "nothing", openapi)]


def _readyz(operations: Operations) -> Callable[[Request], Awaitable[Reply]]:
    async def readyz(request: Request) -> Reply:
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


def _past(past: Past) -> Callable[[str], Awaitable[PastAnswer]]:
    async def range_of(name: str) -> PastAnswer:
        found = past.range(name)
        if found is None:
            raise Problem(404, "there is /v1/history/hour and /v1/history/day")
        return found

    return range_of


def _metrics(metrics: Metrics | None) -> Callable[[], Awaitable[Reply]]:
    async def text() -> Reply:
        if metrics is None:
            raise Problem(404, "this server keeps no metrics")
        return Reply(200, ((b"content-type", CONTENT_TYPE), *PRIVATE), metrics.text())

    return text


def _traffic(demo: Demo | None) -> Callable[[TrafficAsk], Awaitable[Traffic]]:
    async def switch(ask: TrafficAsk) -> Traffic:
        if demo is None:
            raise Problem(404, "this is not the demo: there is no traffic to switch")
        demo.traffic = ask.on
        return Traffic(demo.traffic)

    return switch


async def _page(request: Request) -> Reply:
    return _sent(find_page("index.html"), request)


async def _file(request: Request, name: str) -> Reply:
    return _sent(find_page(name), request)


def _sent(page: Page, request: Request) -> Reply:
    if is_known(page, request.headers):
        return Reply(304, page.fields, b"")
    return Reply(200, page.fields, page.content)
