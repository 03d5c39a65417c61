"""Limits in Flask applications."""

from __future__ import annotations

from typing import Any

import flask
import httpx
import pytest
from flask.views import MethodView

from headgate import AsyncLimiter, ConfigError, Limiter, MemoryStore, sliding_window
from headgate.http import by_all, by_route, by_user
from headgate.http.flask import exempt, install, limit
from headgate.testing import FakeClock
from tests.integration.http.clients import left, policies


def application(*limits: Any) -> flask.Flask:
    app = flask.Flask(__name__)
    install(app, *limits)
    return app


def client_of(app: Any, address: str = "192.0.2.1", *, raising: bool = True) -> httpx.Client:
    transport = httpx.WSGITransport(app, raise_app_exceptions=raising, remote_addr=address)
    return httpx.Client(transport=transport, base_url="http://service")


def ok(**_: Any) -> str:
    return "ok"


def test_blueprints_share_a_limit_and_override_defaults() -> None:
    outer, inner, free = (flask.Blueprint(name, __name__) for name in ("outer", "inner", "free"))
    for blueprint in (outer, inner, free):
        blueprint.add_url_rule("/", view_func=ok)
        blueprint.add_url_rule("/own", endpoint="own", view_func=limit("7/day")(ok))
    limit("2/minute")(outer)
    limit("3/minute", default=True)(inner)
    exempt(free)
    app = application(limit("9/hour", default=True), limit("9/week"))
    outer.register_blueprint(inner, url_prefix="/inner")
    app.register_blueprint(outer, url_prefix="/outer")
    app.register_blueprint(free, url_prefix="/free")
    with client_of(app) as client:
        assert set(policies(client.get("/outer/"))) == {"per-week", "per-minute"}
        assert set(policies(client.get("/outer/inner/own"))) == {
            "per-week",
            "per-minute",
            "per-day",
        }
        assert client.get("/outer/").status_code == 429
        assert "ratelimit" not in client.get("/free/").headers
        assert policies(client.get("/free/own")) == {"per-day": 7}


def test_functions_get_the_request_and_its_context() -> None:
    app = application()

    @app.before_request
    def authenticate() -> None:
        flask.g.user = {"id": flask.request.args.get("user", "nobody")}

    quotas = {"gold": "5/minute"}

    @app.get("/<item>")
    @limit(
        sliding_window("1/minute", tiers={"pro": "3/minute"}),
        key=by_all(by_user(), by_route()),
        cost=lambda request: int(request.args.get("cost", 1)),
        tier=lambda request: flask.request.headers.get("x-tier"),
        quota=lambda request: quotas.get(flask.g.user["id"]),
        exempt=lambda request: request.args.get("user") == "admin",
    )
    def view(item: str) -> str:
        return item

    with client_of(app) as client:
        assert [client.get(path).status_code for path in ("/a?user=1", "/b?user=1", "/a?user=2")] == [
            200,
            429,
            200,
        ]
        assert client.get("/a?user=3", headers={"x-tier": "pro"}).headers["x-ratelimit-remaining"] == "2"
        assert policies(client.get("/a?user=gold")) == {"per-minute": 5}
        assert client.get("/a?user=gold&cost=4").headers["x-ratelimit-remaining"] == "0"
        assert client.get("/a?user=4&cost=4").status_code == 413
        assert "ratelimit" not in client.get("/a?user=admin").headers


def test_application_can_customize_the_refusal() -> None:
    app = application()
    app.register_error_handler(429, lambda error: (f"slow down: {error.code}", 429))
    app.add_url_rule("/", view_func=limit("0/minute")(ok))
    app.add_url_rule("/raised", endpoint="raised", view_func=Limiter("0/minute").guard("x")(ok))
    with client_of(app) as client:
        for path in ("/", "/raised"):
            response = client.get(path)
            assert (response.status_code, response.text) == (429, "slow down: 429")
            assert left(response) == {"per-minute": 0}


def test_async_views() -> None:
    app = application()

    @app.get("/")
    @limit("1/minute")
    async def view() -> str:
        return "awaited"

    with client_of(app) as client:
        first, second = client.get("/"), client.get("/")
    assert (first.text, second.status_code) == ("awaited", 429)


def test_class_based_views() -> None:
    class Pages(MethodView):
        init_every_request = False
        decorators = (limit("3/hour"),)

        def get(self) -> str:
            return "got"

        @limit("1/minute")
        def post(self) -> str:
            return "posted"

    class Plain(MethodView):
        @limit("1/minute")
        def get(self) -> str:
            return "got"

        def post(self) -> str:
            return "posted"

    app = application(limit("9/day", default=True))
    app.add_url_rule("/", view_func=Pages.as_view("pages"))
    app.add_url_rule("/plain", view_func=Plain.as_view("plain"))
    with client_of(app) as client:
        assert policies(client.get("/")) == {"per-hour": 3}
        assert [client.post("/").status_code for _ in range(2)] == [200, 429]
        assert client.get("/").status_code == 429
        assert policies(client.get("/plain")) == {"per-minute": 1}
        assert policies(client.head("/plain")) == {"per-minute": 1}
        assert policies(client.post("/plain")) == {"per-day": 9}


def test_applications_can_share_one_limit() -> None:
    store = MemoryStore()
    shared = limit("9/minute", store=store)
    for _ in range(2):
        app = flask.Flask("service")
        install(app, shared)
        app.add_url_rule("/", view_func=ok)
        with client_of(app) as client:
            response = client.get("/")
    assert left(response) == {"per-minute": 7}


def test_default_names_come_from_views_and_blueprints() -> None:
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    app = application(limit("9/minute", store=store))
    app.add_url_rule("/", view_func=limit("9/minute", store=store)(ok))
    with client_of(app) as client:
        assert left(client.get("/")) == {"per-minute": 8, "per-minute-2": 8}
    for name, key in ((__name__, b"192.0.2.1"), (f"{__name__}.ok", b"192.0.2.1")):
        found = Limiter("9/minute", name=name, store=store)
        assert found.check("192.0.2.1", 0).remaining == 8, key
    unnamed = limit("1/minute", store=store)
    unnamed(flask.Blueprint("one", __name__))
    with pytest.raises(ConfigError, match="needs a name="):
        unnamed(flask.Blueprint("two", __name__))


@limit("1/minute")
def wrapped_too_late() -> str:
    return "ok"


def test_limit_above_the_route_decorator_is_always_refused() -> None:
    by_decorator, of_blueprint, by_name = application(), application(), application()
    bare = flask.Flask("bare")
    blueprint = flask.Blueprint("pages", __name__)

    @limit("1/minute")
    @by_decorator.get("/")
    @bare.get("/")
    @blueprint.get("/")
    @limit("5/hour")
    def page() -> str:
        return "page"

    of_blueprint.register_blueprint(blueprint)
    by_name.add_url_rule("/", view_func=wrapped_too_late.__wrapped__)  # type: ignore[attr-defined]
    for app in (by_decorator, of_blueprint, by_name, bare):
        app.add_url_rule("/other", view_func=ok)
        with client_of(app) as client:
            assert [client.get("/").status_code, client.get("/other").status_code] == [500, 500]
        app.testing = True
        with (
            client_of(app) as client,
            pytest.raises(ConfigError, match=r"@limit\(…\) below .*(page|too_late)"),
        ):
            client.get("/")


def test_limit_applies_only_where_the_limited_view_is_registered() -> None:
    def page() -> str:
        return "page"

    app, other, bare = application(), application(), flask.Flask("bare")
    limit("1/minute")(ok)
    for one in (app, other, bare):
        one.add_url_rule("/ok", view_func=ok)
    for one in (other, bare):
        one.add_url_rule("/", view_func=page)
    app.add_url_rule("/free", view_func=page, endpoint="free")
    app.add_url_rule("/", view_func=exempt(limit("1/minute")(page)))
    for one in (other, bare):  # before the first request to the application with the limit
        with client_of(one) as client:
            assert [client.get(path).status_code for path in ("/ok", "/", "/")] == [200] * 3
    with client_of(app) as client:
        assert [client.get(path).status_code for path in ("/ok", "/free", "/free", "/", "/")] == [200] * 4 + [
            429
        ]


def test_configuration_errors_name_the_fix() -> None:
    app = application()
    without = flask.Flask(__name__)
    without.testing = True
    without.add_url_rule("/", view_func=limit("1/minute")(ok))
    with client_of(without) as client, pytest.raises(ConfigError, match=r"install\(app\)"):
        client.get("/")
    for wrong, message in (
        (lambda: install(app), "already"),
        (lambda: install("1/minute"), r"app is an application, .*install\(app, .*, not '1/minute'"),  # type: ignore[arg-type]
        (lambda: limit("1/minute", store="sqlit:///x.db")(ok), "no store is known for 'sqlit'"),
        (lambda: limit("1/minute")(app), "install"),
        (lambda: limit("1/minute", default=True)(ok), "default=True"),
        (lambda: limit(), "rules"),
        (lambda: limit(AsyncLimiter("1/minute")), "type Limiter"),
        (lambda: limit(Limiter("1/minute"), name="x"), "already"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong()

    async def key(request: Any) -> str:
        return "a"

    with pytest.raises(ConfigError, match="ASGI"):
        limit("1/minute", key=key)


def test_full_dispatch_request_applies_limits_without_wsgi_app() -> None:
    app = application("1/minute")
    app.add_url_rule("/", view_func=ok)
    with app.test_request_context("/", environ_base={"REMOTE_ADDR": "192.0.2.1"}):
        assert app.full_dispatch_request().status_code == 200
        assert app.full_dispatch_request().status_code == 429
