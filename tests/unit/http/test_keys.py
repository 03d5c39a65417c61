"""Key functions over bare scopes; over real applications, see tests/integration/http."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import AsyncLimiter, ConfigError, Limiter, sliding_window, token_bucket
from headgate.http import Headers, by_address, by_all, by_header, by_route, by_user
from headgate.http.keys import takes_scope
from headgate.http.limit import RequestLimit
from headgate.keys import LONGEST_KEY
from headgate.stores.request import Request

SCOPE: dict[str, Any] = {
    "type": "http",
    "path": "/items/1",
    "client": ("192.0.2.1", 1),
    "headers": [(b"x-api-key", b"k1"), (b"x-api-key", b"k2"), (b"x-empty", b"")],
}


def question(scope: dict[str, Any], *, limiter: Limiter | None = None, **arguments: Any) -> Any:
    return parts_of(RequestLimit(limiter or Limiter("5/minute"), **arguments).question(scope))


def parts_of(request: Request) -> tuple[Any, int, str | None]:
    assert request.operation == "hit"
    return request.key, request.cost, request.tier


def test_default_key_is_the_address_and_default_cost_is_one() -> None:
    assert question(SCOPE) == ("192.0.2.1", 1, None)


def test_by_header_uses_the_first_value() -> None:
    assert question(SCOPE, key=by_header("X-API-Key"))[0] == "k1"


@pytest.mark.parametrize("name", ["X-Missing", "x-empty"])
def test_missing_key_falls_back_to_the_address_as_bytes(name: str) -> None:
    assert question(SCOPE, key=by_header(name))[0] == b"192.0.2.1"


def test_address_of_a_missing_key_respects_proxies() -> None:
    scope = {**SCOPE, "headers": [(b"x-forwarded-for", b"198.51.100.7")]}
    behind = by_address(proxies=["192.0.2.0/24"])
    assert question(scope, key=by_header("X-API-Key"), address=behind)[0] == b"198.51.100.7"
    assert question(scope, address=behind)[0] == "198.51.100.7"


def test_a_long_header_becomes_a_digest() -> None:
    long, longer = (
        by_header("a")({"headers": [(b"a", b"x" * length)]}) for length in (LONGEST_KEY + 1, 8000)
    )
    assert isinstance(long, bytes)
    assert isinstance(longer, bytes)
    assert long != longer
    assert len(longer) <= LONGEST_KEY


@pytest.mark.parametrize(
    ("scope", "key"),
    [
        ({"user": SimpleNamespace(id=42, is_authenticated=True)}, "42"),
        ({"user": SimpleNamespace(id=b"\x01")}, b"\x01"),
        ({"state": {"user": {"id": "ada"}}}, "ada"),
        ({"user": SimpleNamespace(id=42, is_authenticated=False)}, None),
        ({"state": {}}, None),
        ({}, None),
    ],
)
def test_by_user_reads_the_id_of_an_authenticated_user(scope: dict[str, Any], key: object) -> None:
    assert by_user()(scope) == key


def test_by_user_error_names_the_missing_attribute() -> None:
    with pytest.raises(ConfigError, match="has no 'id'"):
        by_user()({"user": SimpleNamespace(username="ada")})
    assert by_user("username")({"user": SimpleNamespace(username="ada")}) == "ada"


def test_requests_without_a_route_count_together() -> None:
    assert by_route()(SCOPE) == by_route()({**SCOPE, "path": "/made/up"}) == "*"


def test_by_route_uses_the_template_not_the_path() -> None:
    route = SimpleNamespace(path="/items/{id}")
    assert by_route()({**SCOPE, "route": route, "path_params": {"id": 1}}) == "/items/{id}"


def test_by_route_includes_the_parameters_of_a_mount() -> None:
    scope = {
        **SCOPE,
        "route": SimpleNamespace(path="/items/{id:int}"),
        "root_path": "/behind/tenants/7/v1",
        "app_root_path": "/behind",
        "path_params": {"id": 7, "tenant": 7},
    }
    assert by_route()(scope) == "/tenants/{tenant}/v1/items/{id:int}"


parts = st.lists(st.text(max_size=5) | st.binary(max_size=5), max_size=3)


@given(parts, parts)
def test_joined_keys_are_equal_only_if_all_parts_are(one: list[Any], other: list[Any]) -> None:
    keys = [by_all(*(lambda request, part=part: part for part in some))(None) for some in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def test_joined_keys_need_every_part() -> None:
    assert by_all(by_address(), by_header("x-missing"))(SCOPE) is None
    with pytest.raises(ConfigError, match="only text and bytes"):
        by_all(lambda request: {"user": "a"})(SCOPE)


def test_joined_keys_take_a_scope_if_all_parts_do() -> None:
    assert takes_scope(by_all(by_address(), by_route()))
    assert not takes_scope(by_all(by_address(), lambda request: "x"))


def test_each_scope_has_its_key_function() -> None:
    limiter = Limiter(sliding_window("5/minute", scope="user"), token_bucket("9/minute", scope="realm"))
    key, _, _ = question(
        SCOPE, limiter=limiter, key={"user": by_header("x-missing"), "realm": by_header("x-api-key")}
    )
    assert key == {"user": b"192.0.2.1", "realm": "k1"}
    assert limiter.hit(key)


def test_cost_and_tier_are_values_or_functions() -> None:
    assert question(SCOPE, cost=3, tier="pro")[1:] == (3, "pro")
    assert question(SCOPE, cost=lambda scope: len(scope["path"]), tier=lambda scope: scope["type"])[1:] == (
        8,
        "http",
    )


@pytest.mark.parametrize("cost", [6, -1, 1.5, True, "1"])
def test_invalid_fixed_cost_is_refused_at_construction(cost: Any) -> None:
    with pytest.raises(ConfigError):
        RequestLimit(Limiter("5/minute"), cost=cost)
    with pytest.raises(ConfigError):
        RequestLimit(Limiter("50/minute burst 5"), cost=cost)


def test_fixed_cost_may_fit_only_a_larger_tier() -> None:
    limiter = Limiter(sliding_window("5/minute", tiers={"pro": "50/minute"}))
    assert RequestLimit(limiter, cost=6, tier=lambda scope: "pro").question(SCOPE).cost == 6


class Slow:
    """A callable object that has to be awaited."""

    async def __call__(self, scope: Any) -> str | None:
        return scope["headers"][0][1].decode() if scope["headers"] else None


SLOW = Slow()
HEADERS = "headers= is 'both', 'ietf', 'x-ratelimit', 'none' or Headers(…)"


async def awaited(request: Any) -> str:
    return "k1"


async def test_key_cost_and_tier_functions_can_be_async() -> None:
    async def two(scope: Any) -> int:
        return 2

    async def pro(scope: Any) -> str:
        return "pro"

    limit = RequestLimit(AsyncLimiter("5/minute"), key=Slow(), cost=two, tier=pro)
    assert limit.awaits
    assert parts_of(await limit.awaited_question(SCOPE)) == ("k1", 2, "pro")
    assert (await limit.awaited_question({**SCOPE, "headers": []})).key == b"192.0.2.1"
    assert RequestLimit(AsyncLimiter("5/minute"), cost=two).awaits
    assert not RequestLimit(AsyncLimiter("5/minute")).awaits


async def test_one_scope_can_have_an_async_key_function() -> None:
    limiter = AsyncLimiter(sliding_window("5/minute", scope="user"), sliding_window("9/minute", scope="ip"))
    limit = RequestLimit(limiter, key={"user": Slow(), "ip": by_address()})
    assert limit.awaits
    assert (await limit.awaited_question(SCOPE)).key == {"user": "k1", "ip": "192.0.2.1"}
    assert (await limit.awaited_question({**SCOPE, "headers": []})).key == {
        "user": b"192.0.2.1",
        "ip": "192.0.2.1",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "user"}, "key= takes functions of the request, not 'user'"),
        ({"key": {"user": 7}}, "key= takes functions of the request, not 7"),
        ({"key": by_user}, "key= takes functions of the request: write by_user(…)"),
        ({"key": {"ip": by_address}}, "key= takes functions of the request: write by_address(…)"),
        ({"address": by_address}, "address= takes functions of the request: write by_address(…)"),
        ({"address": awaited}, f"address= cannot await: write a plain function instead of {awaited!r}"),
        ({"exempt": awaited}, f"exempt= cannot await: write a plain function instead of {awaited!r}"),
        ({"exempt": SLOW}, f"exempt= cannot await: write a plain function instead of {SLOW!r}"),
        ({"exempt": "/health"}, "exempt= takes functions of the request, not '/health'"),
        ({"exempt": ["/health"]}, "exempt= takes functions of the request, not ['/health']"),
        ({"count": 401}, "count= is a list like [401, 403], or a function of the status, not 401"),
        ({"count": "401"}, "count= is a list like [401, 403], or a function of the status, not '401'"),
        ({"count": ["401"]}, "count= is a list like [401, 403], or a function of the status, not ['401']"),
        (
            {"count": awaited},
            f"count= is a list like [401, 403], or a function of the status, not {awaited!r}",
        ),
        ({"tier": 5}, "tier= is a name or a function of the request, not 5"),
        ({"tier": ["pro"]}, "tier= is a name or a function of the request, not ['pro']"),
        *(({"headers": wrong}, f"{HEADERS}, not {wrong!r}") for wrong in ("IETF", "", 7, ["ietf"], Headers)),
        ({"quota": "5/minute", "quota_for": "60s"}, "quota_for= is seconds, at least 0, not '60s'"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_at_construction(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        RequestLimit(Limiter("5/minute"), **options)


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        (by_header, None, "the name of a header field is text, not None"),
        (by_header, "", "the name of a header field is text, not ''"),
        (by_header, ["X-Key"], "the name of a header field is text, not ['X-Key']"),
        (by_user, None, "the name of a user's attribute is text, not None"),
        (by_all, awaited, f"by_all cannot await: write a plain function instead of {awaited!r}"),
        (
            lambda wrong: by_address(proxies=wrong),
            "10.0.0.0/8",
            "proxies is a list like ['10.0.0.0/8'], not '10.0.0.0/8'",
        ),
        (lambda wrong: by_address(proxies=wrong), None, "proxies is a list like ['10.0.0.0/8'], not None"),
        (
            lambda wrong: by_address(ipv6_prefix=wrong),
            "64",
            "ipv6_prefix must be a whole number from 1 to 128, not '64'",
        ),
    ],
)
def test_key_functions_refuse_invalid_arguments(make: Callable[[Any], Any], wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make(wrong)


def test_by_all_refuses_invalid_key_functions() -> None:
    for wrong in (by_route, "ip"):
        with pytest.raises(ConfigError, match=r"^by_all takes functions of the request"):
            by_all(by_address(), wrong)  # type: ignore[arg-type]


def test_scoped_rules_need_a_key_function_for_each_scope() -> None:
    rules = sliding_window("5/minute", scope="user"), sliding_window("9/minute", scope="*")
    for key in (None, {"usr": by_user()}):
        with pytest.raises(
            ConfigError, match=r"^the rules count by 'user': write key=\{'user': function, …\}$"
        ):
            RequestLimit(Limiter(*rules), key=key)
    RequestLimit(Limiter(rules[1]))
