"""Access control."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from headgate.policy import AsyncLivePolicy
from headgate_server import access, make_app
from tests.server.support import Server, problem

TOKENS = {"decider": "tok-decide", "admin": "tok-admin", "both": "tok-both"}
MAY = {"decider": ["decide"], "admin": ["administer"], "both": ["decide", "administer"]}


def policy(*names: str) -> str:
    tables = "".join(
        f'[server.tokens.{name}]\nsha256 = "{sha256(TOKENS[name].encode()).hexdigest()}"\nmay = {MAY[name]}\n'
        for name in names
    )
    return f'[limiters.login]\nrules = ["5/minute"]\n{tables}'


OPEN = [
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/static/app.js"),
]
ANY = [
    ("GET", "/v1/history/day"),
    ("GET", "/metrics"),
    ("GET", "/v1/limiters"),
    ("GET", "/v1/limiters/login"),
    ("HEAD", "/v1/events"),
]
DECIDE = [
    ("POST", f"/v1/limiters/login/{operation}")
    for operation in ("hit", "check", "record", "hold", "wait-hint")
] + [
    ("POST", "/v1/holds/x/settle"),
    ("POST", "/v1/holds/x/confirm"),
    ("POST", "/v1/holds/x/renew"),
    ("POST", "/v1/holds/x/release"),
    ("POST", "/v1/inspect"),
    ("POST", "/v1/batch"),
]
ADMINISTER = [
    ("POST", "/v1/limiters/login/candidate"),
    ("POST", "/v1/limiters/login/reset"),
    ("POST", "/v1/demo/traffic"),
]


async def status(server: Server, method: str, path: str, token: str | None) -> int:
    headers = {"content-type": "application/json"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    response = await server.client.request(method, path, headers=headers, content=b"{}")
    return response.status_code


async def test_endpoints_check_permissions() -> None:
    server = Server(policy("decider", "admin"))
    refused = (401, 403)
    for method, path in OPEN:
        assert await status(server, method, path, None) == 200, path
    for method, path in ANY + DECIDE + ADMINISTER:
        assert await status(server, method, path, None) == 401, path
        assert await status(server, method, path, "guess") == 401, path
    for method, path in ANY:
        assert await status(server, method, path, TOKENS["decider"]) == 200, path
        assert await status(server, method, path, TOKENS["admin"]) == 200, path
    for method, path in DECIDE:
        assert await status(server, method, path, TOKENS["decider"]) not in refused, path
        assert await status(server, method, path, TOKENS["admin"]) == 403, path
    for method, path in ADMINISTER:
        assert await status(server, method, path, TOKENS["decider"]) == 403, path
        assert await status(server, method, path, TOKENS["admin"]) not in refused, path


async def test_all_endpoints_are_in_the_table() -> None:
    server = Server(policy("decider"))
    document = (await server.client.get("/openapi.json")).json()
    concrete = {
        (method.upper(), path.replace("{name}", "login").replace("{id}", "x").replace("{range}", "day"))
        for path, methods in document["paths"].items()
        for method in methods
    }
    listed = {
        ("GET" if method == "HEAD" else method, path) for method, path in OPEN + ANY + DECIDE + ADMINISTER
    }
    assert concrete <= listed


async def test_challenges_name_the_error() -> None:
    server = Server(policy("decider"))
    response = await server.post("/v1/limiters/login/hit", {"key": "a"})
    assert "Authorization: Bearer" in problem(response, 401)
    assert response.headers["www-authenticate"] == 'Bearer realm="headgate"'
    response = await server.post("/v1/limiters/login/hit", headers={"authorization": "Bearer wrong"})
    assert response.headers["www-authenticate"] == 'Bearer realm="headgate", error="invalid_token"'
    response = await server.post("/v1/limiters/login/reset", headers=bearer("decider"))
    assert problem(response, 403) == "the token 'decider' may not administer"
    assert 'error="insufficient_scope"' in response.headers["www-authenticate"]


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {TOKENS[name]}"}


@pytest.mark.parametrize(
    "field",
    [
        "tok-decide",
        "Basic tok-decide",
        "Bearer",
        "Bearer ",
        "Bearer tok-decide x",
        "Bearer " + sha256(b"tok-decide").hexdigest(),
        "Bearer tök",
        "Bearer " + "x" * 10_000,
    ],
)
async def test_invalid_tokens_are_refused(field: str) -> None:
    server = Server(policy("decider"))
    headers = [("authorization", field.encode())]
    response = await server.post("/v1/limiters/login/hit", {"key": "a"}, headers=headers)
    assert problem(response, 401)


async def test_bearer_is_case_insensitive_and_repeated_fields_are_refused() -> None:
    server = Server(policy("decider"))
    good = {"authorization": "bEARER tok-decide"}
    assert (await server.post("/v1/limiters/login/hit", {"key": "a"}, headers=good)).status_code == 200
    twice = [("authorization", "Bearer tok-decide")] * 2
    assert problem(await server.post("/v1/limiters/login/hit", {"key": "a"}, headers=twice), 401)


async def test_a_reset_in_a_batch_needs_its_own_permission() -> None:
    server = Server(policy("decider", "both"))
    calls = {"calls": [{"operation": "reset", "limiter": "login", "key": "a"}]}
    answers = {
        name: (await server.post("/v1/batch", calls, headers=bearer(name))).json()["answers"][0]["status"]
        for name in ("decider", "both")
    }
    assert answers == {"decider": 403, "both": 200}


async def test_tokens_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(policy("decider"))
    with caplog.at_level(0):
        for token in ("tok-decide", "wrong-token"):
            await server.post(
                "/v1/limiters/login/hit", {"key": "a"}, headers={"authorization": f"Bearer {token}"}
            )
    assert "tok-decide" not in caplog.text
    assert "wrong-token" not in caplog.text


# Without tokens


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8080",
        "localhost",
        "LOCALHOST:1",
        "[::1]:8080",
        "[::1]",
        "127.8.8.8",
        "a.localhost",
        "localhost.",
        "[::ffff:127.0.0.1]",
        "[::1%lo]",
    ],
)
async def test_loopback_names_need_no_tokens(host: str) -> None:
    response = await Server().client.get("/healthz", headers={"host": host})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "0.0.0.0",
        "[::]",
        "",
        "[::1]x",
        "10.0.0.1",
        "::1",
        "localhost:1:2",
    ],
)
@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/limiters"])
async def test_other_names_are_refused_without_tokens(host: str, path: str) -> None:
    response = await Server().client.get(path, headers={"host": host})
    assert "loopback" in problem(response, 421)


async def test_any_name_is_allowed_with_tokens() -> None:
    server = Server(policy("decider"))
    response = await server.client.get(
        "/v1/limiters", headers={"host": "limits.example", **bearer("decider")}
    )
    assert response.status_code == 200


@pytest.mark.parametrize("address", ["http://192.0.2.7", "http://[2001:db8::1]", "http://limits.example"])
async def test_remote_requests_are_refused_without_tokens(address: str) -> None:
    """As after a reload that has taken the last token out of the file of a public server."""
    server = Server(address=address)
    response = await server.client.get("/v1/limiters", headers={"host": "localhost"})
    assert "no tokens" in problem(response, 403)


@pytest.mark.parametrize("field", ["Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"])
async def test_forwarded_requests_are_refused_without_tokens(field: str) -> None:
    headers = {field: "192.0.2.7"}
    assert "a proxy" in problem(await Server().client.get("/v1/limiters", headers=headers), 403)
    with_tokens = Server(policy("decider"))
    response = await with_tokens.client.get("/v1/limiters", headers={**headers, **bearer("decider")})
    assert response.status_code == 200


async def test_server_is_closed_when_a_reload_removes_all_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A truncated file must not open it, not even to this machine, where a proxy may run."""
    file = tmp_path / "headgate.toml"
    file.write_text(policy("decider"))
    async with AsyncLivePolicy.from_file(file) as live:
        transport = httpx.ASGITransport(make_app(live), raise_app_exceptions=True)
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        assert (await client.get("/v1/limiters", headers=bearer("decider"))).status_code == 200
        for text, warnings in [(policy("admin"), 0), (policy(), 1), (policy() + "[server]\nport = 1\n", 2)]:
            file.write_text(text)
            assert live.reload()
            assert caplog.text.count("the last token was removed") == warnings
        for headers in ({}, bearer("decider"), bearer("admin")):
            response = await client.get("/v1/limiters", headers=headers)
            assert "the policy no longer has tokens" in problem(response, 403)
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).json()["stores"] == []
        file.write_text(policy("admin"))
        assert live.reload()
        assert (await client.get("/v1/limiters", headers=bearer("admin"))).status_code == 200


async def test_stores_are_hidden_without_a_token() -> None:
    assert (await Server(policy()).client.get("/readyz")).json()["stores"]
    response = await Server(policy("decider")).client.get("/readyz")
    assert response.json() == {"status": "ready", "stores": []}


async def test_cross_origin_requests_are_refused() -> None:
    """No CORS: the requests that a page of another origin can send are refused with 415, and it can read nothing."""
    server = Server()
    origin = {"origin": "https://evil.example"}
    for response in (
        await server.client.get("/v1/limiters", headers=origin),
        await server.client.options("/v1/limiters/login/hit", headers=origin),
    ):
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_unix_socket_is_local() -> None:
    server = Server()
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/healthz",
        "raw_path": b"/healthz",
        "headers": [(b"host", b"localhost")],
        "server": ("/run/headgate.sock", None),
    }
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await server.app(scope, httpx.AsyncByteStream, send)  # type: ignore[arg-type]  # nothing is received
    assert sent[0]["status"] == 200


# Who did what


async def test_tokens_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(policy("decider") + "expires = 2030-01-31\n")
    clock = [datetime(2030, 1, 30, 23, 59, 59, tzinfo=UTC).timestamp()]
    monkeypatch.setattr(access.time, "time", lambda: clock[0])
    assert (await server.client.get("/v1/limiters", headers=bearer("decider"))).status_code == 200
    clock[0] += 1
    answer = await server.client.get("/v1/limiters", headers=bearer("decider"))
    assert problem(answer, 401) == "the token 'decider' has expired"


async def test_resets_and_refused_tokens_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headgate.audit")
    server = Server(policy("decider", "both"))
    await server.post("/v1/limiters/login/reset", {"key": "alice"}, headers=bearer("both"))
    calls = [{"operation": "reset", "limiter": "login", "key": "bob"}]
    await server.post("/v1/batch", {"calls": calls}, headers=bearer("both"))
    await server.post("/v1/limiters/login/reset", {"key": "alice"}, headers=bearer("decider"))
    await server.post("/v1/batch", {"calls": calls}, headers=bearer("decider"))
    await server.client.get("/v1/limiters", headers={"authorization": "Bearer guessed"})
    await server.client.get("/v1/limiters")
    assert [record.getMessage() for record in caplog.records if record.name == "headgate.audit"] == [
        "both reset 'alice' in limiter 'login'",
        "both reset 'bob' in limiter 'login'",
        "refused a request from 127.0.0.1: the token 'decider' may not administer",
        "refused a reset in a batch: the token 'decider' may not administer",
        "refused a request from 127.0.0.1: this token is not in the policy",
    ]


async def test_api_responses_are_not_cached_or_sniffed() -> None:
    server = Server()
    for path in ("/v1/limiters", "/v1/nothing", "/healthz", "/metrics"):
        headers = (await server.client.get(path)).headers
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
