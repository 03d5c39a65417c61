"""URL, token and transport of a server."""

from __future__ import annotations

import httpx
import pytest

from headgate import ConfigError
from headgate.client.endpoint import ServerEndpoint, is_lost, unpacked
from headgate.client.wire import HttpRequest, Response

SECRET = "s3cret-token"


def sent(endpoint: ServerEndpoint, path: str = "/v1/limiters") -> httpx.Request:
    return endpoint.packed(HttpRequest("GET", path), 1.5)


@pytest.mark.parametrize(
    ("url", "name", "target"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080", "http://127.0.0.1:8080/v1/limiters"),
        ("http://localhost:8080/", "http://localhost:8080", "http://localhost:8080/v1/limiters"),
        (
            "https://example.org/limits",
            "https://example.org/limits",
            "https://example.org/limits/v1/limiters",
        ),
        ("http://[::1]:8080", "http://[::1]:8080", "http://[::1]:8080/v1/limiters"),
    ],
)
def test_paths_are_below_the_url(url: str, name: str, target: str) -> None:
    endpoint = ServerEndpoint(url)
    assert endpoint.name == name
    assert str(sent(endpoint).url) == target


def test_a_name_in_a_path_stays_escaped() -> None:
    assert sent(ServerEndpoint("http://x"), "/v1/limiters/a%2Fb").url.raw_path == b"/v1/limiters/a%2Fb"


@pytest.mark.parametrize(
    "endpoint",
    [
        ServerEndpoint("http://x:1", SECRET),
        ServerEndpoint(f"http://:{SECRET}@x:1"),
        ServerEndpoint(f"http://{SECRET}@x:1"),
    ],
    ids=["given apart", "as password", "as user"],
)
def test_token_is_sent_only_as_a_header(endpoint: ServerEndpoint) -> None:
    request = sent(endpoint)
    assert request.headers["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in str(request.url)
    assert SECRET not in endpoint.name
    assert request.headers["host"] == "x:1"


def test_a_token_in_a_url_may_be_percent_encoded() -> None:
    assert sent(ServerEndpoint("http://:a%2Fb%3D@x")).headers["authorization"] == "Bearer a/b="


def test_without_a_token_there_is_no_authorization_header() -> None:
    request = sent(ServerEndpoint("http://x"))
    assert "authorization" not in request.headers
    assert request.headers["content-type"] == "application/json"
    assert request.extensions["timeout"]["read"] == 1.5


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("ftp://x", None),
        ("x", None),
        ("http://", None),
        ("http://x?a=1", None),
        ("http://x#a", None),
        (f"http://user:{SECRET}@x", None),
        (f"http://:{SECRET}@x:port", None),
        (f"http://:{SECRET}@x", "another"),
        ("http://x", f"{SECRET}\n"),
        ("http://x", f"{SECRET} {SECRET}"),
        ("http://x", f"{SECRET}é"),
    ],
)
def test_invalid_url_or_token_is_refused_without_showing_the_token(url: str, token: str | None) -> None:
    with pytest.raises(ConfigError) as raised:
        ServerEndpoint(url, token)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("cause", "lost"),
    [
        (httpx.ReadError("x"), True),
        (httpx.RemoteProtocolError("x"), True),
        (httpx.ConnectError("x"), True),
        (httpx.ReadTimeout("x"), False),
        (TimeoutError(), False),
        (ValueError(), False),
    ],
)
def test_lost_connection_differs_from_a_timeout(cause: Exception, lost: bool) -> None:
    assert is_lost(cause) is lost


def test_response_without_json_has_no_body() -> None:
    assert unpacked(httpx.Response(502, text="<html>")) == Response(502, None)
    assert unpacked(httpx.Response(200, content=b"\xff")) == Response(200, None)
    assert unpacked(httpx.Response(200, json=[1])) == Response(200, [1])


def test_too_deeply_nested_response_has_no_body() -> None:
    assert unpacked(httpx.Response(200, content=b"[" * 1_000_000)) == Response(200, None)
