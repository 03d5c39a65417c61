"""The OpenAPI document, generated from the endpoints, their types and their documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any

import msgspec

import headgate
from headgate_server.problems import ProblemAnswer
from headgate_server.routing import JSON, EndpointDoc, Route
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

PROBLEM = "application/problem+json"
_REF = "#/components/schemas/{name}"

_ABOUT = """\
Rate limiting for any language: the limiters of a policy file over HTTP.

A refusal is not an error: it has status 200 and `"allowed": false`. Errors are problem documents (RFC 9457) whose `detail`
says what to do. Times are seconds, exact to the microsecond; `null` means "not applicable". Bodies are JSON, with
`Content-Type: application/json`.

If the response to a hit, record or hold is lost, the call may have counted. With an `Idempotency-Key` it can be repeated and
counts once. Settle, confirm, renew and release can always be repeated."""


def document(endpoints: Iterable[Route]) -> dict[str, Any]:
    """Return the document of all documented endpoints; the dashboard's files are not documented."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        if endpoint.doc is not None:
            paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, endpoint.doc)
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
                    "description": "A token of the policy file. If the file has no tokens, none is needed on loopback, and "
                    "remote clients are refused.",
                }
            },
        },
    }


def _operation(endpoint: Route, doc: EndpointDoc) -> dict[str, Any]:
    roles = [] if endpoint.needs == "token" else [endpoint.needs]
    operation: dict[str, Any] = {
        "operationId": doc.name,
        "tags": [_tag(endpoint.path)],
        "summary": doc.summary,
        "security": [] if endpoint.needs == "nothing" else [{"bearer": roles}, {}],
        "responses": {"200": _success(endpoint, doc)},
    }
    if doc.text:
        operation["description"] = doc.text
    if doc.values:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "example": value}
            for name, value in doc.values.items()
        ]
    if endpoint.charges:
        operation.setdefault("parameters", []).append(_IDEMPOTENCY_KEY)
    if endpoint.takes is not None:
        content = {"schema": {"$ref": _REF.format(name=endpoint.takes.__name__)}, "example": doc.body}
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    for status in sorted(set(_problems(endpoint, doc))):
        operation["responses"][str(status)] = {"$ref": f"#/components/responses/{status}"}
    if endpoint.path == "/readyz":
        operation["responses"]["503"] = _success(
            endpoint, doc, "A store cannot count.", _not_ready(msgspec.to_builtins(doc.answer))
        )
    return operation


_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "If a call is repeated with the same key within ten minutes, it is not made again: the response is that "
    "of the first call, refusals included, with the header field Idempotency-Replayed.",
    "schema": {"type": "string", "maxLength": 255},
    "example": "0b6f3d5e-order-66",
}


def _tag(path: str) -> str:
    if "holds" in path:
        return "holds"
    if path in ("/v1/events", "/metrics", "/v1/demo/traffic"):
        return "figures"
    return "limiters" if path.startswith("/v1") else "operation"


def _success(
    endpoint: Route, doc: EndpointDoc, description: str = "Done.", example: Any = None
) -> dict[str, Any]:
    schema = (
        {"type": "string"} if endpoint.gives is None else {"$ref": _REF.format(name=endpoint.gives.__name__)}
    )
    content = {"schema": schema, "example": msgspec.to_builtins(doc.answer) if example is None else example}
    return {"description": description, "content": {doc.media_type: content}}


def _not_ready(answer: dict[str, Any]) -> dict[str, Any]:
    down = {
        **answer["stores"][0],
        "up": False,
        "breaker": "open",
        "failures": 3,
        "reason": "connection refused",
    }
    return {"status": "not ready", "stores": [down]}


def _problems(endpoint: Route, doc: EndpointDoc) -> Iterator[int]:
    yield from doc.problems
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
    403: "the token 'gateway' may not administer",
    404: "there is no limiter 'lgoin'; did you mean 'login'?",
    408: "the body did not arrive within 10 s",
    409: "another call is confirming this hold; send the call again",
    413: "the body is larger than 65536 bytes, the policy's largest_body",
    415: "send JSON, with the header Content-Type: application/json",
    421: "without tokens the server accepts only loopback names, such as http://127.0.0.1 or http://localhost",
    422: "a cost of 9 can never be admitted: rule 'per-minute' holds 5 at most; split the work or raise the limit",
    429: "this caller has 10000 open holds; settle or release some, or wait until they expire",
    501: "limiter 'llm' counts in a KVStore, which cannot keep holds; use memory, SQLite, Redis or PostgreSQL",
    503: "the store cannot be reached: connection refused",
}


def _problem(status: int) -> dict[str, Any]:
    title = HTTPStatus(status).phrase
    example = {"type": "about:blank", "title": title, "status": status, "detail": _DETAILS[status]}
    if status == HTTPStatus.UNPROCESSABLE_ENTITY:
        example |= {"cost": 9, "capacity": 5, "rule": "per-minute", "unit": "requests"}
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
    """Return a schema without the line breaks of docstrings."""
    if isinstance(schema, dict):
        return {name: _tidied(part) for name, part in schema.items()}
    if isinstance(schema, list):
        return [_tidied(part) for part in schema]
    return re.sub(r"\s*\n\s*", " ", schema) if isinstance(schema, str) else schema
