"""Expressions over the fields of a line."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_server.replay.errors import ReplayError
from headgate_server.replay.expressions import Getter, compile_expression

ROW = {"client": "192.0.2.1", "user": None, "path": "/api/items/42?page=2", "bytes": "2049", "plan": "gold"}


def lookup(name: str) -> Getter:
    if name not in ROW:
        raise ReplayError(f"there is no field {name!r}")
    return lambda row: row[name]


def value(expression: str, row: Mapping[str, str | None] = ROW) -> str | None:
    return compile_expression(expression, lookup)(row)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("{client}", "192.0.2.1"),
        ("{ client }", "192.0.2.1"),
        ("ip:{client} {plan}", "ip:192.0.2.1 gold"),
        ("{user}", None),
        ("who:{user}", None),
        ("{user|or:client}", "192.0.2.1"),
        ("{plan|or:client}", "gold"),
        ("{user|default:nobody}", "nobody"),
        ("{plan|default:nobody}", "gold"),
        (r"{path|match:^/api/(\w+)}", "items"),
        (r"{path|match:\d+}", "42"),
        (r"{path|match:^/(web\|api)/}", "api"),
        (r"{path|match:\d\{2\}}", "42"),
        (r"{path|match:^/web}", None),
        (r"{path|match:^/web|default:other}", "other"),
        ("{bytes|per:1024}", "3"),
        ("{plan|per:1024}", "gold"),
        ("{path|shape}", "/api/items/:id"),
        ("{client|network}", "192.0.2.1"),
        ("{plan|map:gold=pro,silver=free}", "pro"),
        ("{plan|map:silver=free}", None),
        ("{plan|upper}", "GOLD"),
        ("{plan|upper|lower}", "gold"),
        ("all", "all"),
        ("{{{plan}}}", "{gold}"),
        ("", ""),
    ],
)
def test_values(expression: str, expected: str | None) -> None:
    assert value(expression) == expected


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/users/17/posts/4", "/users/:id/posts/:id"),
        ("/users/17?x=1", "/users/:id"),
        ("/d/3f2504e0-4f89-11d3-9a0c-0305e82c3301/x", "/d/:id/x"),
        ("/c/deadbeefcafe", "/c/:id"),
        ("/v1/health", "/v1/health"),
        ("/a-very-long-name-of-a-page", "/a-very-long-name-of-a-page"),
        ("/s/tok_9fK2mQ71xzLp0000", "/s/:id"),
        ("/" + "a/" * 400, "/" + "a/" * 400),
    ],
)
def test_shape_replaces_ids_only(path: str, shape: str) -> None:
    assert value("{path|shape}", {"path": path}) == shape


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("192.0.2.1:5123", "192.0.2.1"),
        ("[2001:db8::1]:443", "2001:db8::/64"),
        ("unix:", "unix:"),
    ],
)
def test_network_of_addresses(address: str, network: str) -> None:
    assert value("{client|network}", {"client": address}) == network


def test_hash() -> None:
    first, second = value("{client|hash}"), value("{client|hash}", {"client": "192.0.2.2"})
    assert first == value("{client|hash}")
    assert first != second
    assert first is not None
    assert "192" not in first


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("{client", "single '{' at position 1"),
        ("client}", "single '}' at position 7"),
        ("{}", "a field has no name"),
        ("{nothing}", "there is no field 'nothing'"),
        ("{client|or:nothing}", "there is no field 'nothing'"),
        ("{client|reverse}", "unknown filter 'reverse'"),
        ("{client|lower:x}", "lower has no argument"),
        ("{client|match}", "match needs an argument"),
        ("{client|match:(}", "is not a valid pattern"),
        ("{client|map:a}", "write map as"),
        ("{bytes|per:0}", "per needs a whole number"),
        ("{bytes|per:x}", "per needs a whole number"),
        ("{__import__('os')}", "there is no field"),
    ],
)
def test_an_invalid_expression_is_an_error(expression: str, problem: str) -> None:
    with pytest.raises(ReplayError) as raised:
        value(expression)
    assert problem in str(raised.value)


@given(st.text())
def test_any_text_is_valid_or_an_error(expression: str) -> None:
    with suppress(ReplayError):
        assert isinstance(value(expression), str | None)
