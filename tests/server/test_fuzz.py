"""Any input gets a response that the OpenAPI document describes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.support import Server

PATHS = [
    *(
        f"/v1/limiters/{name}/{operation}"
        for name in ("login", "submit", "bucket", "llm")
        for operation in ("hit", "check", "record", "hold", "wait-hint", "reset")
    ),
    "/v1/inspect",
    "/v1/batch",
    "/v1/holds/x/settle",
    "/v1/holds/x/release",
]
ANSWERS = {200, 400, 404, 422}
HEADERS = {"content-type": "application/json"}

texts = st.text(max_size=200) | st.sampled_from(
    ["alice", "", "\x00", "*", "$base64", "login", "\u2028", "🦉" * 70]
)
numbers = st.integers() | st.floats() | st.sampled_from([0, 1, 5, 6, 2**53 - 1, 2**53, 10**400])
plain = texts | st.fixed_dictionaries({"$base64": texts | st.binary().map(lambda raw: raw.hex())})
keys = (
    st.none()
    | plain
    | st.dictionaries(st.sampled_from(["user", "realm", "*", ""]) | texts, plain, max_size=3)
)
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "key": keys | anything,
        "cost": numbers | anything,
        "tier": texts | anything,
        "operation": st.sampled_from(["hit", "hold", "settle", "release", "reset", "nonsense"]),
    },
)
calls = st.fixed_dictionaries(
    {
        "operation": st.sampled_from(
            ["hit", "check", "record", "hold", "wait-hint", "reset", "settle", "release"]
        )
    },
    optional={
        "limiter": st.sampled_from(["login", "submit", "bucket", "nobody"]) | texts,
        "hold": texts,
        "key": keys,
        "cost": st.integers(0, 2**53 - 1),
        "tier": st.none() | texts,
    },
)


async def checked(server: Server, path: str, content: bytes) -> None:
    response = await server.client.post(path, content=content, headers=HEADERS)
    assert response.status_code in ANSWERS, response.text
    answer = response.json()
    if response.status_code != 200:
        assert answer["status"] == response.status_code
    for one in answer.get("answers", []):
        assert one["status"] in ANSWERS, one


@pytest.fixture(scope="module")
def server() -> Server:
    """One server for all examples: creating it takes longer than they do."""
    return Server()


@given(key=keys)
async def test_a_key_is_refused_everywhere_or_counted_everywhere(server: Server, key: Any) -> None:
    """The same key over HTTP is the same key each time: five hits are admitted, and the sixth is not."""
    content = json.dumps({"key": key}).encode()
    await server.client.post("/v1/limiters/login/reset", content=content, headers=HEADERS)
    statuses = []
    allowed = []
    for _ in range(6):
        response = await server.client.post("/v1/limiters/login/hit", content=content, headers=HEADERS)
        statuses.append(response.status_code)
        allowed.append(response.json().get("allowed"))
    assert len(set(statuses)) == 1
    assert statuses[0] in ANSWERS
    if statuses[0] == 200:
        assert allowed == [True] * 5 + [False]


@given(path=st.text(max_size=60), method=st.sampled_from(["GET", "POST", "HEAD", "PUT"]))
async def test_no_path_is_too_strange(server: Server, path: str, method: str) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "headers": [(b"host", b"localhost")],
        "server": ("127.0.0.1", 8080),
    }
    await server.app(scope, receive, send)
    assert sent[0]["status"] in {200, 404, 405, 415}
