"""The OpenAPI document is valid, and every example in it is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from headgate_server.endpoints import endpoints
from headgate_server.routing import Route
from tests.server.support import POLICY, Server
from tests.server.test_statistics import Demo


def table() -> list[Route]:
    """Return the endpoints of a server."""
    server = Server()
    app = server.app
    return endpoints(app._operations, app._events, server.statistics.history, app._candidates, None, None)


async def document() -> dict[str, Any]:
    response = await Server().client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    found = response.json()
    assert isinstance(found, dict)
    return found


def checker(whole: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    """Return what checks a value against a schema of the document."""
    return Draft202012Validator({**schema, "components": whole["components"]})


async def test_the_document_is_valid() -> None:
    OpenAPIV31SpecValidator(await document()).validate()


async def test_every_endpoint_of_the_api_is_described() -> None:
    described = {
        (method.upper(), path) for path, methods in (await document())["paths"].items() for method in methods
    }
    files = {("GET", "/"), ("GET", "/static/{file}"), ("GET", "/openapi.json")}
    assert described == {(endpoint.method, endpoint.path) for endpoint in table()} - files


async def test_every_schema_and_every_problem_is_used() -> None:
    whole = await document()
    text = str(whole)
    for kind in ("schemas", "responses"):
        for name in whole["components"][kind]:
            assert f"#/components/{kind}/{name}'" in text or name in ("History", "Tick"), name


JOBS = """
[limiters.jobs]
rules = [{ kind = "concurrent", quota = 5, lease = "60s", name = "in flight" }]
"""


@pytest.mark.parametrize(("method", "path"), [(one.method, one.path) for one in table() if one.doc])
async def test_examples_are_what_is_sent_and_answered(method: str, path: str) -> None:
    """The example request, on a server with such a policy, gets an answer of the example's status and shape."""
    whole = await document()
    operation = whole["paths"][path][method.lower()]
    server = Server(POLICY + JOBS, demo=Demo())
    target = await concrete(server, path, operation)
    if path == "/v1/events":
        response = await server.client.head(target)
        assert response.headers["content-type"] == "text/event-stream"
        return
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]["application/json"]
        checker(whole, content["schema"]).validate(content["example"])
        response = await server.client.post(target, json=content["example"])
    else:
        response = await server.client.get(target)
    assert response.status_code == 200, response.text
    (media_type, answer), *_ = operation["responses"]["200"]["content"].items()
    assert response.headers["content-type"].partition(";")[0] == media_type
    if media_type == "application/json":
        validator = checker(whole, answer["schema"])
        validator.validate(answer["example"])
        validator.validate(response.json())
        assert shape(answer["example"], response.json())


async def concrete(server: Server, path: str, operation: dict[str, Any]) -> str:
    """Return the path with its examples in it; a hold must have been taken."""
    if "{id}" in path:
        limiter, cost = ("jobs", 1) if path.endswith("/renew") else ("llm", 800)
        held = await server.answer(f"/v1/limiters/{limiter}/hold", {"key": "alice", "cost": cost})
        return path.replace("{id}", held["hold"])
    for parameter in operation.get("parameters", []):
        path = path.replace(f"{{{parameter['name']}}}", parameter["example"])
    return path


def shape(example: Any, answer: Any) -> bool:
    """Return whether a response has the members of an example, at every depth."""
    if isinstance(example, dict) and isinstance(answer, dict):
        free = {"tiers"}  # names that users choose
        return example.keys() == answer.keys() and all(
            name in free or shape(example[name], answer[name]) for name in example
        )
    if isinstance(example, list) and isinstance(answer, list):
        return all(shape(one, other) for one, other in zip(example, answer, strict=False))
    return isinstance(example, dict) is isinstance(answer, dict)


@pytest.mark.parametrize(
    ("status", "path", "content", "media_type"),
    [
        (400, "/v1/limiters/login/hit", b'{"key": "a", "cost": "1"}', "application/json"),
        (404, "/v1/limiters/lgoin/hit", b'{"key": "a"}', "application/json"),
        (413, "/v1/limiters/login/hit", b"x" * 70_000, "application/json"),
        (415, "/v1/limiters/login/hit", b'{"key": "a"}', "text/plain"),
        (422, "/v1/limiters/login/hit", b'{"key": "a", "cost": 9}', "application/json"),
    ],
)
async def test_examples_of_problems_are_what_is_answered(
    status: int, path: str, content: bytes, media_type: str
) -> None:
    example = (await document())["components"]["responses"][str(status)]["content"][
        "application/problem+json"
    ]
    response = await Server().client.post(path, content=content, headers={"content-type": media_type})
    assert response.json() == example["example"]


async def test_permissions_are_in_the_document() -> None:
    paths = (await document())["paths"]
    assert paths["/v1/limiters/{name}/hit"]["post"]["security"] == [{"bearer": ["decide"]}, {}]
    assert paths["/v1/limiters/{name}/reset"]["post"]["security"] == [{"bearer": ["administer"]}, {}]
    assert paths["/v1/limiters"]["get"]["security"] == [{"bearer": []}, {}]
    assert paths["/healthz"]["get"]["security"] == []


def test_the_permissions_table_in_the_docs_is_complete() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/server.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(decide|administer)` \| (.*) \|$", text, re.MULTILINE))
    for route in table():
        if route.needs in rows:
            operation = route.path.rpartition("/")[2]
            assert re.search(rf"\b{operation}\b", rows[route.needs]), f"{operation} needs {route.needs}"
