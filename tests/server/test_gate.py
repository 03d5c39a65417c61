"""The gate for proxies that ask by HTTP: keys, answers, access."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest

from headgate.policy import PolicyError, parse_policy
from tests.server.support import Server, problem

POLICY = """
[limiters.login]
rules = ["2/minute"]
[limiters.api]
rules = [{ quota = "2/minute", scope = "user" }, { quota = "5/minute", scope = "client" }]
[limiters.session]
rules = ["2/minute"]
[limiters.never]
rules = ["0/minute"]
[gate]
proxies = ["127.0.0.1"]
[gate.limiters]
login = "address"
api = { user = "header X-User", client = "address" }
session = "cookie sid"
never = "address"
"""
TOKEN = "a-token-of-a-proxy"
TOKENS = f"""
[server.tokens.proxy]
sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
may = ["gate"]
[server.tokens.other]
sha256 = "{hashlib.sha256(b"other").hexdigest()}"
may = ["decide", "administer"]
"""


async def ask(
    server: Server, name: str = "login", client: str = "192.0.2.1", **fields: str
) -> httpx.Response:
    """Ask as a proxy on this machine."""
    headers = {"x-forwarded-for": client} | {
        field.replace("_", "-"): value for field, value in fields.items()
    }
    return await server.client.get(f"/v1/gate/{name}", headers=headers)


async def test_admission_and_refusal_have_the_header_fields() -> None:
    server = Server(POLICY)
    admitted = await ask(server)
    assert (admitted.status_code, admitted.content) == (204, b"")
    assert admitted.headers["ratelimit"] == '"per-minute";r=1;t=61'
    assert "retry-after" not in admitted.headers
    await ask(server)
    refused = await ask(server)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "61"
    assert refused.headers["ratelimit-policy"] == '"per-minute";q=2;w=60'
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["violated-policies"] == ["per-minute"]


async def test_clients_are_counted_separately() -> None:
    server = Server(POLICY)
    for client in ("192.0.2.1", "192.0.2.2", "8.8.8.8, 192.0.2.3"):
        assert [(await ask(server, client=client)).status_code for _ in range(3)] == [204, 204, 429]
    assert (await ask(server, client="9.9.9.9, 192.0.2.3")).status_code == 429


async def test_forwarded_address_of_an_unknown_proxy_is_ignored() -> None:
    server = Server(POLICY.replace("127.0.0.1", "10.0.0.1"))
    answers = [(await ask(server, client=f"192.0.2.{number}")).status_code for number in range(3)]
    assert answers == [204, 204, 429]


async def test_key_from_header_and_address() -> None:
    server = Server(POLICY)
    assert [(await ask(server, "api", x_user="ann")).status_code for _ in range(3)] == [204, 204, 429]
    assert (await ask(server, "api", x_user="bob")).status_code == 204
    client = (await server.live["api"].check({"user": "x", "client": "192.0.2.1"})).results[1]
    assert client.remaining == 1  # of 5, after three admissions and this check


async def test_request_without_the_header_is_counted_by_address() -> None:
    server = Server(POLICY)
    assert [(await ask(server, "api")).status_code for _ in range(3)] == [204, 204, 429]
    assert (await ask(server, "api", x_user="192.0.2.1")).status_code == 204  # another key than the address


async def test_key_from_cookie() -> None:
    server = Server(POLICY)
    for sid in ("a", "b", "c" * 4_000):
        cookie = f"theme=dark; sid={sid}; other=1"
        assert [(await ask(server, "session", cookie=cookie)).status_code for _ in range(3)] == [
            204,
            204,
            429,
        ]
    assert (await ask(server, "session", cookie="sidx=a; sid=")).status_code == 204


async def test_refusals_are_403_for_nginx() -> None:
    server = Server(POLICY)
    headers = {"x-forwarded-for": "192.0.2.1"}
    for _ in range(2):
        assert (await server.client.get("/v1/gate/login?deny=403", headers=headers)).status_code == 204
    refused = await server.client.post("/v1/gate/login?deny=403", headers=headers, content=b"ignored")
    assert (refused.status_code, refused.headers["retry-after"]) == (403, "61")
    unknown = await server.client.get("/v1/gate/login?deny=500", headers=headers)
    assert "deny is 403 or 429" in problem(unknown, 400)


async def test_permanent_refusal_has_no_retry_after() -> None:
    refused = await ask(Server(POLICY), "never")
    assert refused.status_code == 429
    assert "retry-after" not in refused.headers


async def test_only_named_limiters_have_a_gate() -> None:
    server = Server(POLICY + "[limiters.hidden]\nrules = ['1/s']\n")
    assert "[gate.limiters]" in problem(await ask(server, "hidden"), 404)


async def test_reload_changes_the_origin_of_the_key() -> None:
    server = Server(POLICY)
    assert [(await ask(server, x_key="a")).status_code for _ in range(3)] == [204, 204, 429]
    server.live._use(parse_policy(POLICY.replace('login = "address"', 'login = "header X-Key"')))
    assert (await ask(server, x_key="a")).status_code == 204


# Access


async def test_gate_needs_its_own_permission() -> None:
    server = Server(POLICY + TOKENS)
    assert (await ask(server, headgate_token=TOKEN)).status_code == 204
    assert (await ask(server, headgate_token="wrong")).status_code == 401
    assert "Headgate-Token" in problem(await ask(server, authorization=f"Bearer {TOKEN}"), 401)
    assert "may not gate" in problem(await ask(server, headgate_token="other"), 403)
    as_client = {"authorization": f"Bearer {TOKEN}"}
    answer = await server.client.post("/v1/limiters/login/hit", json={"key": "a"}, headers=as_client)
    assert "may not decide" in problem(answer, 403)


async def test_authorization_of_the_client_does_not_matter() -> None:
    server = Server(POLICY + TOKENS)
    assert (
        await ask(server, headgate_token=TOKEN, authorization="Bearer of-the-application")
    ).status_code == 204
    open_server = Server(POLICY)
    assert (
        await ask(open_server, authorization="Basic x", host="example.com", via="1.1 edge")
    ).status_code == 204


async def test_without_tokens_only_a_local_address_is_asked() -> None:
    server = Server(POLICY, address="http://192.0.2.7")
    assert "add [server.tokens.NAME]" in problem(await ask(server), 403)


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        ('[gate.limiters]\nlogin = "address"', 'write proxies = ["127.0.0.1"]'),
        ('[gate]\nproxies = ["nearby"]', "'nearby' is neither an address nor a network"),
        (
            '[gate.limiters]\nlogin = "header"',
            "write 'address', 'header NAME' or 'cookie NAME', not 'header'",
        ),
        ('[gate.limiters]\nlogin = "header X:Y"', "not 'header X:Y'"),
        ('[gate.limiters]\nother = "header X"', "there is no limiter 'other'"),
        ('[gate.limiters]\napi = "header X"', "expected a table"),
        ('[gate.limiters]\napi = { user = "header X" }', "count by 'client', 'user'"),
        ('[gate.limiters]\nslots = "header X"', "does not see the end of a request"),
        ("[gate]\nlogin = 1", "unknown key 'login'"),
    ],
)
def test_invalid_gate_is_an_error(gate: str, reason: str) -> None:
    rules: Any = (
        POLICY.partition("[gate]")[0] + '[limiters.slots]\nrules = [{kind="concurrent",quota=1,lease="1s"}]\n'
    )
    with pytest.raises(PolicyError) as error:
        parse_policy(f"{rules}{gate}\n")
    assert reason in str(error.value)
