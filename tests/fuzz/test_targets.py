"""External input is accepted or refused with a documented error: never a crash, a 5xx or a hang.

`FUZZ_MINUTES=10 pytest -rP tests/fuzz` searches each of these for ten minutes; without it a few examples are tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from headgate import (
    ConfigError,
    CostTooHigh,
    Limiter,
    MemoryStore,
    Rule,
    SQLiteStore,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.http.address import Proxies, client_address, forwarded_entries
from headgate.http.headers import wire_name
from headgate.policy import PolicyError, parse_policy
from headgate.quota import MAX_UNITS, Quota, parse_calendar, parse_quotas, period_from
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from tests.fuzz.searching import search
from tests.server.support import POLICY, Server
from tests.unit.policy.test_load import FULL

words = st.sampled_from(
    [
        "5",
        "/",
        "minute",
        "s",
        "per",
        "burst",
        ";",
        " ",
        "-",
        "0",
        "1e9",
        "9" * 30,
        ".5",
        "h",
        "day",
        "\x00",
        "٣",
        "µs",
    ]
)
quota_texts = st.lists(words, max_size=8).map("".join) | st.text(max_size=40)

header_texts = st.text(
    alphabet="0123456789abcdef.:,;=\"'\\[]%_ \t/-forbyunknwx\x00\x7fé", max_size=120
) | st.text(max_size=40)

edits = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.integers(0, 40),
        st.text(max_size=10)
        | st.sampled_from(["[", "]", "=", '"', "\n", "[[limiters]]", "{}", "9" * 400, "nan", "1979-05-27"]),
    ),
    max_size=4,
)

plain_keys = st.text(max_size=300) | st.binary(max_size=300)
any_keys = (
    plain_keys
    | st.none()
    | st.integers()
    | st.floats()
    | st.dictionaries(st.text(max_size=5), plain_keys | st.none(), max_size=3)
)


def test_quotas() -> None:
    def read(text: str) -> None:
        with contextlib.suppress(ConfigError):
            for quota in parse_quotas(text):
                assert Quota.parse(str(quota)) == quota
        for parse in (Quota.parse, parse_calendar, lambda text: period_from(text, "period")):
            with contextlib.suppress(ConfigError):
                parse(text)

    search(quota_texts, read)


def test_policy_files() -> None:
    def read(changes: list[tuple[int, int, str]]) -> None:
        for text in (FULL, POLICY):
            for at, length, new in changes:
                text = text[:at] + new + text[at + length :]
            with contextlib.suppress(PolicyError):
                parse_policy(text, environment={})

    search(edits, read)


def test_policy_texts() -> None:
    def read(text: str) -> None:
        with contextlib.suppress(PolicyError):
            parse_policy(text, environment={})

    search(st.text(max_size=200), read)


def test_header_fields() -> None:
    def read(example: tuple[list[str], str]) -> None:
        lines, name = example
        for header in ("x-forwarded-for", "forwarded"):
            key = client_address("10.0.0.1", lines, Proxies(("10.0.0.0/8",), header=header))
            assert 0 < len(key) <= 64
            assert all(forwarded_entries(lines, header))
        assert wire_name(name).isascii()

    search(st.tuples(st.lists(header_texts, max_size=3), st.text(max_size=30)), read)


def test_keys() -> None:
    """Different keys never count together, and invalid keys are refused."""
    with MemoryStore() as memory, SQLiteStore(":memory:") as sqlite:

        def count(keys: tuple[Any, Any]) -> None:
            for store in (memory, sqlite):
                limiter = Limiter(sliding_log("1/hour"), name=secrets.token_hex(8), store=store)
                answers = [_answer(partial(limiter.hit, key)) for key in keys]
                assert all(answer is ConfigError or answer.allowed for answer in answers) or _same(*keys)

        search(st.tuples(any_keys, any_keys), count)


def _same(one: Any, other: Any) -> bool:
    return _raw(one) == _raw(other)


def _raw(key: Any) -> Any:
    return key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key


units = st.integers(1, 50) | st.sampled_from([1, 2**31, 2**52, MAX_UNITS - 1, MAX_UNITS])
periods = st.sampled_from(["1us", "7ms", "1s", "60s", "1h", "61m", "1d", "400d"])
steps = st.lists(
    st.tuples(
        st.sampled_from(["hit", "check", "record", "hold", "release", "confirm"]),
        plain_keys,
        st.integers(-1, 60) | units | st.sampled_from([0, -1, 2**53, 10**30]),
        st.integers(0, 3) | st.sampled_from([-5, 10**6, 10**11, 8 * 10**15]),
    ),
    min_size=1,
    max_size=12,
)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    quota = f"{draw(units)}/{draw(periods)}"
    kind = draw(st.sampled_from([fixed_window, sliding_window, sliding_log, token_bucket, concurrent]))
    with contextlib.suppress(ConfigError):
        rule = concurrent(draw(units), lease=draw(periods)) if kind is concurrent else kind(quota)
        Limiter(rule)  # refuses rules that cannot be counted exactly
        return rule
    return fixed_window("5/s")


Trace = tuple[Rule, list[tuple[str, Any, int, int]]]


def _trace(store: Any, trace: Trace) -> list[Any]:
    """Return the answers to calls in order on a store; errors of Headgate are answers."""
    rule, calls_made = trace
    limiter = Limiter(
        rule, name=secrets.token_hex(8), store=store, on_store_error=None if not store.remote else "raise"
    )
    now, holds, answers = 1_700_000_000 * 10**6, [], []
    key = calls_made[0][1]
    for operation, other, cost, pause in calls_made:
        now = min(max(0, now + pause), 8 * 10**15)
        key = key if cost % 3 else other
        at = now / 10**6
        if operation in ("release", "confirm"):
            if holds:
                hold = holds.pop()
                answers.append(_answer(partial(getattr(hold, operation), now=at)))
            continue
        answer = _answer(partial(getattr(limiter, operation), key, cost, now=at))
        if operation == "hold" and not isinstance(answer, type):
            holds.append(answer)
            answer = answer.decision
        answers.append(answer)
    return answers


def _answer(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (ConfigError, CostTooHigh) as error:
        return type(error)


def test_arguments_of_lua(headgate_redis_url: str) -> None:
    with RedisStore(headgate_redis_url, deadline=60) as store:
        search(st.tuples(rules(), steps), lambda trace: _compare(store, trace))


def test_arguments_of_sql(headgate_postgres_url: str) -> None:
    with PostgresStore(headgate_postgres_url, deadline=60) as store:
        search(st.tuples(rules(), steps), lambda trace: _compare(store, trace))


def _compare(store: Any, trace: Trace) -> None:
    """Any argument gives the same answer or error as the memory store."""
    assert _trace(store, trace) == _trace(MemoryStore(), trace)


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


def test_http_bodies() -> None:
    def send(example: tuple[str, Any]) -> None:
        path, body = example
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        asyncio.run(checked(Server(), path, content))

    batches = st.tuples(st.just("/v1/batch"), st.lists(calls, max_size=6).map(lambda made: {"calls": made}))
    search(st.tuples(st.sampled_from(PATHS), bodies | anything | st.binary(max_size=300)) | batches, send)


def test_http_paths() -> None:
    def send(example: tuple[str, str]) -> None:
        method, path = example
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode("utf-8", "replace"),
            "headers": [(b"host", b"localhost")],
            "server": ("127.0.0.1", 8080),
        }
        assert asyncio.run(_status(scope)) in {200, 404, 405, 415}

    search(st.tuples(st.sampled_from(["GET", "POST", "HEAD", "PUT"]), st.text(max_size=60)), send)


async def _status(scope: dict[str, Any]) -> int:
    """Return the status of the response to a request whose client is gone."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await Server().app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


def test_openapi_document() -> None:
    """Valid and invalid requests are answered as documented."""
    document = asyncio.run(Server().client.get("/openapi.json")).json()
    operations = [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    cases = [
        operation.as_strategy(mode)
        for operation in operations
        for mode in modes
        if operation.path != "/v1/events"  # an endless stream
    ]

    async def send(case: Any) -> httpx.Response:
        asked = requests.Request(**case.as_transport_kwargs(base_url="http://127.0.0.1")).prepare()
        client = Server().client
        return await client.request(
            asked.method or "", asked.url or "", headers=dict(asked.headers), content=asked.body
        )

    def check(case: Any) -> None:
        # A schema cannot express the keys and costs that a limiter accepts.
        case.validate_response(asyncio.run(send(case)), excluded_checks=[positive_data_acceptance])

    search(st.one_of(cases), check)
