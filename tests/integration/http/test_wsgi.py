"""The WSGI middleware around bare applications, checked by the standard library's validator, and around Flask."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.validate import validator

import flask
import httpx
import pytest

from headgate import AsyncLimiter, ConfigError, Limiter, token_bucket
from headgate.http import by_header
from headgate.http.wsgi import RateLimitMiddleware
from headgate.testing import FakeClock
from tests.integration.http.clients import is_complete, left, policies


def echo_status(environ: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer with the status that the path names; `/broken` raises."""
    if environ["PATH_INFO"] == "/broken":
        raise RuntimeError("broken")
    start_response(f"{environ['PATH_INFO'].strip('/') or 200} X", [("Content-Type", "text/plain")])
    return [b"body"]


def application(limiter: Any = "5/minute", app: Any = echo_status, **arguments: Any) -> Any:
    return validator(RateLimitMiddleware(validator(app), limiter, **arguments))


def client_of(app: Any, address: str = "192.0.2.1", *, raising: bool = True) -> httpx.Client:
    transport = httpx.WSGITransport(app, raise_app_exceptions=raising, remote_addr=address)
    return httpx.Client(transport=transport, base_url="http://service")


def test_refused_head_request_has_no_body() -> None:
    """It would be taken for the beginning of the next response on the connection."""
    environ = {"REQUEST_METHOD": "HEAD", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"}
    started: list[Any] = []
    app = RateLimitMiddleware(echo_status, "0/minute")
    assert list(app(environ, lambda *start: started.append(start) or (lambda body: None))) == []
    ((status, headers),) = started
    assert status == "429 Too Many Requests"
    assert int(dict(headers)["Content-Length"]) > 0


def test_fields_of_the_application_are_replaced() -> None:
    def app(environ: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [("X-RateLimit-Limit", "7"), ("x-ratelimit-used", "3"), ("X-Own", "kept")])
        return [b""]

    started: list[Any] = []
    limited = RateLimitMiddleware(app, "5/minute")
    list(limited({"PATH_INFO": "/"}, lambda *start: started.append(start) or (lambda body: None)))
    names = [name.lower() for name, _ in started[0][1]]
    assert [value for name, value in started[0][1] if name.lower() == "x-ratelimit-limit"] == ["5"]
    assert "x-ratelimit-used" not in names
    assert "x-own" in names


def test_restarted_response_is_settled_once() -> None:
    def app(environ: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        try:
            raise RuntimeError("after the start")
        except RuntimeError as error:
            start_response(
                "401 No", [("Content-Type", "text/plain")], (RuntimeError, error, error.__traceback__)
            )
        return [b""]

    limiter = Limiter("5/minute")
    with client_of(RateLimitMiddleware(app, limiter, count={401}), raising=False) as client:
        assert left(client.get("/")) == {"per-minute": 5}
    assert limiter.check("192.0.2.1", 5)


def test_middleware_works_around_flask() -> None:
    app = flask.Flask(__name__)

    @app.get("/")
    def home() -> str:
        return "home"

    @app.get("/broken")
    def broken() -> str:
        raise RuntimeError("broken")

    app.wsgi_app = RateLimitMiddleware(app.wsgi_app, "9/minute")  # type: ignore[method-assign]
    with client_of(app) as client:
        for path, code in (("/", 200), ("/nowhere", 404), ("/broken", 500)):
            response = client.get(path)
            assert response.status_code == code
            assert is_complete(response)


def test_async_limiters_and_functions_are_refused() -> None:
    async def key(scope: Any) -> str:
        return "a"

    with pytest.raises(ConfigError, match="coroutine"):
        RateLimitMiddleware(echo_status, "5/minute", key=key)
    with pytest.raises(ConfigError, match="Limiter"):
        RateLimitMiddleware(echo_status, AsyncLimiter("5/minute"))  # type: ignore[arg-type]


def test_quota_can_depend_on_the_request() -> None:
    asked = []

    def quota(scope: Any) -> str | None:
        asked.append(scope["query_string"])
        return f"{scope['query_string'].decode()}/minute" if scope["query_string"] else None

    clock = FakeClock()
    limiter = Limiter(token_bucket("5/minute"), clock=clock)
    app = application(limiter, quota=quota, key=by_header("x-api-key"), quota_for=30)
    with client_of(app) as client:
        assert policies(client.get("/?7", headers={"x-api-key": "a"})) == {"per-minute": 7}
        assert left(client.get("/?9", headers={"x-api-key": "a"})) == {"per-minute": 5}  # cached quota
        assert policies(client.get("/", headers={"x-api-key": "b"})) == {"per-minute": 5}
        clock.advance(30)
        assert policies(client.get("/?9", headers={"x-api-key": "a"})) == {"per-minute": 9}
    assert asked == [b"7", b"", b"9"]


def test_request_quota_applies_to_outcomes() -> None:
    app = application(Limiter("1/minute", "9/hour"), count={200}, quota={"per-minute": "3/minute"})
    with client_of(app) as client:
        assert left(client.get("/")) == {"per-minute": 2, "per-hour": 8}
        assert left(client.get("/404")) == {"per-minute": 2, "per-hour": 8}
        assert policies(client.get("/")) == {"per-minute": 3, "per-hour": 9}
