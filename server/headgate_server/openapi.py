"""The OpenAPI document: what the endpoints are, made from their table and their types, with an example of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

import headgate
from headgate_server.problems import ProblemAnswer
from headgate_server.routing import Route
from headgate_server.wire import (
    DecisionAnswer,
    FinishAnswer,
    History,
    HoldAnswer,
    RecordAnswer,
    ResetAnswer,
    Tick,
    WaitAnswer,
)

JSON = "application/json"
PROBLEM = "application/problem+json"
_REF = "#/components/schemas/{name}"

_ABOUT = """\
Rate limiting for any language: the limiters of a policy file over HTTP.

A refusal is an answer, not an error: it has status 200 and `"allowed": false`. Everything else that is not a success is a
problem document (RFC 9457) whose `detail` says what to do. Times are seconds, exact to the microsecond; `null` means that
nothing applies. Bodies are JSON, with `Content-Type: application/json`.

A call that charges (hit, record, hold) and whose answer is lost may have counted. With an `Idempotency-Key` it can be sent
again: it counts once. To settle, confirm, renew or release a hold counts once anyway."""


@dataclass(frozen=True)
class Told:
    """What people are told of an endpoint.

    Attributes:
        name: Its name in generated clients.
        summary: One line.
        text: The rest.
        values: Examples of the placeholders.
        ask: Example of a body.
        answer: Example of the answer to it.
        media_type: Of the answer.
        problems: Statuses besides those that follow from the endpoint's nature.
    """

    name: str
    summary: str
    text: str = ""
    values: dict[str, str] = field(default_factory=dict)
    ask: Any = None
    answer: Any = None
    media_type: str = JSON
    problems: tuple[int, ...] = ()


_HOLD = "txuqFretGu8XE5rfpxGmBfnPdy7K"
_LOGIN = {"name": "login"}
_RULE = {
    "name": "sliding_window/1m",
    "kind": "sliding_window",
    "quota": "5/minute",
    "limit": 5,
    "period": 60.0,
    "burst": None,
    "scope": None,
    "tiers": {"pro": "50/minute"},
    "strict": True,
    "buckets": 60,
    "words": "at most 5 in any minute for each key",
    "unit": "requests",
    "lease": None,
    "timezone": None,
}
_LIMITER = {
    "name": "login",
    "rules": [_RULE],
    "shadow": [],
    "store": "redis://***@db:6379/0",
    "on_store_error": "open",
    "default_tier": None,
    "headers": "both",
}
_STORE = {
    "limiter": "login",
    "store": "memory://",
    "up": True,
    "breaker": "closed",
    "failures": 0,
    "reason": None,
    "since": None,
    "last_contact": None,
    "p50": None,
    "p99": None,
}


def _decision(
    allowed: bool, remaining: int, limit: int = 5, rule: str = "sliding_window/1m"
) -> dict[str, Any]:
    figures = {
        "allowed": allowed,
        "limit": limit,
        "remaining": remaining,
        "retry_after": None if allowed else 12.345678,
        "reset_after": 60.5,
    }
    about = {"rule": rule, "denied_by": None if allowed else rule, "degraded": False}
    return {**figures, **about, "results": [{"name": rule, **figures}]}


_ADMITTED = _decision(True, 4)
_FINISHED = {"hold": _HOLD, "limiter": "llm", "held": 800, "cost": 300, "first": True}
_CANNOT = (422, 503)
_CANNOT_END = (409, *_CANNOT)

_TOLD: dict[tuple[str, str], Told] = {
    ("POST", "/v1/limiters/{name}/hit"): Told(
        "hit",
        "Ask for units, and take them if all rules admit",
        "A refusal takes nothing, in no rule.",
        _LOGIN,
        {"key": "alice", "cost": 1},
        _ADMITTED,
        problems=_CANNOT,
    ),
    ("POST", "/v1/limiters/{name}/check"): Told(
        "check",
        "Say what a hit would be answered, and take nothing",
        values=_LOGIN,
        ask={"key": "alice"},
        answer=_ADMITTED,
        problems=_CANNOT,
    ),
    ("POST", "/v1/limiters/{name}/record"): Told(
        "record",
        "Count units that have been used already, even beyond the limit",
        values=_LOGIN,
        ask={"key": "alice", "cost": 2},
        answer={"recorded": 2},
        problems=_CANNOT,
    ),
    ("POST", "/v1/limiters/{name}/hold"): Told(
        "hold",
        "Take units that are not final yet",
        "Settle the hold at its true cost, confirm it, or release it. If nobody does, its units count until they expire, "
        "and its places in a concurrent rule until their lease ends.",
        {"name": "llm"},
        {"key": "alice", "cost": 800},
        {"decision": _decision(True, 200, 1000, "tokens"), "hold": _HOLD, "expires_after": 61.0},
        problems=(*_CANNOT, 501),
    ),
    ("POST", "/v1/limiters/{name}/wait-hint"): Told(
        "wait_hint",
        "Say how long until a hit would be admitted",
        "0 is now, null is never. Nobody is queued: somebody else may come first.",
        _LOGIN,
        {"key": "alice"},
        {"allowed": True, "wait": 0.0},
        problems=_CANNOT,
    ),
    ("POST", "/v1/limiters/{name}/reset"): Told(
        "reset",
        "Forget what was counted for a key",
        "In every rule of the limiter; of a rule that counts everybody together, for everybody.",
        _LOGIN,
        {"key": "alice"},
        {"reset": True},
        problems=_CANNOT,
    ),
    ("POST", "/v1/holds/{id}/settle"): Told(
        "settle",
        "Make a hold final at its true cost",
        "What was held beyond the cost is given back; what the cost is above it is counted, even beyond the limit. The "
        "first settle or release stands, whoever sends it; later ones return its outcome.",
        {"id": _HOLD},
        {"cost": 300},
        _FINISHED,
        problems=_CANNOT_END,
    ),
    ("POST", "/v1/holds/{id}/release"): Told(
        "release",
        "Give all units of a hold back",
        "As settle with a cost of 0.",
        {"id": _HOLD},
        {},
        {**_FINISHED, "cost": 0},
        problems=_CANNOT_END,
    ),
    ("POST", "/v1/holds/{id}/confirm"): Told(
        "confirm",
        "Make a hold final as of now",
        "Its units are given back and taken anew, at their true cost if one is given, in one step. If there is no room for "
        "them now it is refused, and the hold is still open. Its places in a concurrent rule are free.",
        {"id": _HOLD},
        {"cost": 300},
        _decision(True, 700, 1000, "tokens"),
        problems=_CANNOT_END,
    ),
    ("POST", "/v1/holds/{id}/renew"): Told(
        "renew",
        "Extend the lease of a hold's places in a concurrent rule",
        "The hold goes on under the id of the answer; the old id stands for it. A refusal changes nothing.",
        {"id": _HOLD},
        {},
        {"decision": _decision(True, 4, 5, "in flight"), "hold": _HOLD, "expires_after": 60.0},
        problems=_CANNOT_END,
    ),
    ("POST", "/v1/batch"): Told(
        "batch",
        "Make several calls at once",
        "Each is answered on its own, in order, as if it had been sent alone; at most 1000. A reset among them needs the "
        "permission to administer.",
        ask={
            "calls": [
                {"limiter": "login", "operation": "hit", "key": "alice"},
                {"limiter": "nobody", "operation": "check", "key": "alice"},
            ]
        },
        answer={
            "answers": [
                {"status": 200, "body": _ADMITTED},
                {
                    "status": 404,
                    "body": {
                        "type": "about:blank",
                        "title": "Not Found",
                        "status": 404,
                        "detail": "there is no limiter 'nobody'; GET /v1/limiters lists them all",
                    },
                },
            ]
        },
    ),
    ("POST", "/v1/inspect"): Told(
        "inspect",
        "Show the state of a key in every limiter",
        "Nothing is taken. A limiter whose rules the key does not fit says so in `error`. `used` may exceed the limit.",
        ask={"key": "alice"},
        answer={
            "limiters": [
                {
                    "name": "login",
                    "results": [
                        {
                            "name": "sliding_window/1m",
                            "limit": 5,
                            "used": 5,
                            "remaining": 0,
                            "reset_after": 48.2,
                            "frees_after": 12.345678,
                            "scope": None,
                            "kind": "sliding_window",
                            "unit": "requests",
                            "timezone": None,
                            "shadow": False,
                        }
                    ],
                    "error": None,
                }
            ]
        },
    ),
    ("GET", "/v1/limiters"): Told("limiters", "List all limiters", answer={"limiters": [_LIMITER]}),
    ("GET", "/v1/limiters/{name}"): Told("limiter", "Show one limiter", values=_LOGIN, answer=_LIMITER),
    ("POST", "/v1/limiters/{name}/candidate"): Told(
        "candidate",
        "Watch what a live rule would do with another quota",
        "It becomes a shadow rule, which refuses nothing, until the server ends; a quota of null ends it at once. What it "
        "would have refused is among the figures.",
        values=_LOGIN,
        ask={"rule": "sliding_window/1m", "quota": "3/minute"},
        answer={"limiter": "login", "rule": "sliding_window/1m", "quota": "3/minute"},
        problems=(404, 422),
    ),
    ("GET", "/v1/events"): Told(
        "events",
        "Follow the figures, as server-sent events",
        "First an event `history` with up to five minutes by the second (schema History), then the newest `tick` and one "
        "every second (schema Tick), of all workers together.",
        answer='event: tick\ndata: {"time":1763251200,"limiters":{},"totals":{},"stores":[],"shadow":[]}\n\n',
        media_type="text/event-stream",
        problems=(503,),
    ),
    ("GET", "/v1/history/{range}"): Told(
        "history",
        "Show what was decided in the last hour or day",
        "`hour` in steps of a minute, `day` in steps of a quarter of an hour, of all workers together.",
        values={"range": "hour"},
        answer={
            "step": 60,
            "steps": [{"time": 1763251200, "seconds": 60, "limiters": {"login": [120, 3, 0, 0]}}],
        },
        problems=(404,),
    ),
    ("POST", "/v1/demo/traffic"): Told(
        "demo_traffic",
        "Let the demo's callers be busy, or rest",
        "In the demo only.",
        ask={"on": True},
        answer={"on": True},
        problems=(404,),
    ),
    ("GET", "/healthz"): Told("healthz", "Say that the process answers", answer={"status": "ok"}),
    ("GET", "/readyz"): Told(
        "readyz",
        "Say whether every store can count",
        "With status 503 if one cannot, and the reason: it is down, has no schema, may only be read. Decisions are then "
        "made by the limiters' failure policies.",
        answer={"status": "ready", "stores": [_STORE]},
    ),
    ("GET", "/metrics"): Told(
        "metrics",
        "Show metrics for Prometheus, of all workers together",
        answer='headgate_decisions_total{degraded="false",limiter="login",outcome="refused",rule="5/m"} 3.0\n',
        media_type="text/plain",
    ),
}


def document(endpoints: Iterable[Route]) -> dict[str, Any]:
    """Return the document of those endpoints that people are told of; the dashboard's files are nobody's API."""
    told = [(endpoint, _TOLD[endpoint.method, endpoint.path]) for endpoint in endpoints if _is_told(endpoint)]
    paths: dict[str, dict[str, Any]] = {}
    for endpoint, text in told:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, text)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headgate",
            "version": headgate.__version__,
            "summary": "Rate limiting with exact answers.",
            "description": _ABOUT,
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in ("limiters", "holds", "figures", "operation")],
        "paths": paths,
        "components": {
            "schemas": _schemas(endpoints),
            "responses": {str(status): _problem(status) for status in sorted(_DETAILS)},
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token of the policy file. Without any there, none is needed, on loopback only.",
                }
            },
        },
    }


def _is_told(endpoint: Route) -> bool:
    return (endpoint.method, endpoint.path) in _TOLD


def _operation(endpoint: Route, told: Told) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": told.name,
        "tags": [_tag(endpoint.path)],
        "summary": told.summary,
        "security": [] if endpoint.needs == "nothing" else [{"bearer": _roles(endpoint)}, {}],
        "responses": {"200": _success(endpoint, told)},
    }
    if told.text:
        operation["description"] = told.text
    if told.values:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "example": value}
            for name, value in told.values.items()
        ]
    if endpoint.charges:
        operation.setdefault("parameters", []).append(_IDEMPOTENCY_KEY)
    if endpoint.takes is not None:
        content = {"schema": {"$ref": _REF.format(name=endpoint.takes.__name__)}, "example": told.ask}
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    for status in sorted(set(_problems(endpoint, told))):
        operation["responses"][str(status)] = {"$ref": f"#/components/responses/{status}"}
    if endpoint.path == "/readyz":
        operation["responses"]["503"] = _success(
            endpoint, told, "A store does not answer.", _not_ready(told.answer)
        )
    return operation


_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "Sent again with the same key within ten minutes, the call is not made again: the answer is that of the "
    "first call, refusals included, with the header field Idempotency-Replayed.",
    "schema": {"type": "string", "maxLength": 255},
    "example": "0b6f3d5e-order-66",
}


def _tag(path: str) -> str:
    if "holds" in path:
        return "holds"
    if path in ("/v1/events", "/metrics", "/v1/demo/traffic"):
        return "figures"
    return "limiters" if path.startswith("/v1") else "operation"


def _roles(endpoint: Route) -> list[str]:
    return [] if endpoint.needs == "token" else [endpoint.needs]


def _success(endpoint: Route, told: Told, description: str = "Done.", example: Any = None) -> dict[str, Any]:
    schema = (
        {"type": "string"} if endpoint.gives is None else {"$ref": _REF.format(name=endpoint.gives.__name__)}
    )
    content = {"schema": schema, "example": told.answer if example is None else example}
    return {"description": description, "content": {told.media_type: content}}


def _not_ready(answer: dict[str, Any]) -> dict[str, Any]:
    down = {
        **answer["stores"][0],
        "up": False,
        "breaker": "open",
        "failures": 3,
        "reason": "connection refused",
    }
    return {"status": "not ready", "stores": [down]}


def _problems(endpoint: Route, told: Told) -> Iterator[int]:
    yield from told.problems
    yield 421
    if endpoint.takes is not None:
        yield from (400, 408, 413, 415)
    if endpoint.needs != "nothing":
        yield from (401, 403)
    if "{" in endpoint.path:
        yield 404
    if endpoint.charges:
        yield from (409, 422, 429, 501)


_DETAILS = {
    400: "the body cannot be used: Expected `int | object`, got `str` - at `$.cost`",
    401: "a token is needed: Authorization: Bearer TOKEN",
    403: "this token may not administer",
    404: "there is no limiter 'lgoin'; did you mean 'login'?",
    408: "the body did not arrive within 10 s",
    409: "another call is confirming or renewing this hold; send the call again",
    413: "the body is larger than 65536 bytes, the policy's largest_body",
    415: "send JSON, with the header Content-Type: application/json",
    421: "without tokens the server answers to loopback names only, such as http://127.0.0.1 or http://localhost",
    422: "a cost of 9 can never be admitted: rule 'sliding_window/1m' holds 5 at most; split the work or raise the limit",
    429: "10000 holds of this caller are open; settle or release some, or let them expire",
    501: "the store of limiter 'llm' cannot remember holds",
    503: "the store cannot be asked: connection refused",
}


def _problem(status: int) -> dict[str, Any]:
    title = HTTPStatus(status).phrase
    example = {"type": "about:blank", "title": title, "status": status, "detail": _DETAILS[status]}
    if status == HTTPStatus.UNPROCESSABLE_ENTITY:
        example |= {"cost": 9, "capacity": 5, "rule": "sliding_window/1m", "unit": "requests"}
    content = {"schema": {"$ref": _REF.format(name="ProblemAnswer")}, "example": example}
    return {"description": title, "content": {PROBLEM: content}}


def _schemas(endpoints: Iterable[Route]) -> dict[str, Any]:
    types = [kind for endpoint in endpoints for kind in (endpoint.takes, endpoint.gives) if kind is not None]
    _, schemas = msgspec.json.schema_components([*types, History, Tick, ProblemAnswer], ref_template=_REF)
    bodies = (DecisionAnswer, RecordAnswer, HoldAnswer, WaitAnswer, ResetAnswer, FinishAnswer, ProblemAnswer)
    refs = [{"$ref": _REF.format(name=body.__name__)} for body in bodies]
    schemas["BatchAnswer"]["properties"]["body"] = {"anyOf": refs}
    return {name: _tidied(schema) for name, schema in sorted(schemas.items())}


def _tidied(schema: Any) -> Any:
    """Return a schema whose descriptions are not broken into the lines of a docstring."""
    if isinstance(schema, dict):
        return {name: _tidied(part) for name, part in schema.items()}
    if isinstance(schema, list):
        return [_tidied(part) for part in schema]
    return re.sub(r"\s*\n\s*", " ", schema) if isinstance(schema, str) else schema
