"""Limits in Django: middleware and decorator, sync and async views, under WSGI and ASGI; and REST framework throttles."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from asgiref.sync import iscoroutinefunction
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse
from django.test import override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import action, api_view, throttle_classes
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from headgate import AsyncLimiter, ConfigError, Limiter, MemoryStore, concurrent, sliding_window
from headgate.http import by_address, by_all, by_header, by_route
from headgate.http import by_user as by_scope_user
from headgate.http.asgi import RateLimitMiddleware
from headgate.http.django import by_session, by_user, limit
from headgate.http.rest_framework import throttle
from headgate.http.wsgi import RateLimitMiddleware as WSGIRateLimitMiddleware
from tests.integration.http.clients import client_of, is_complete, left, policies


class Person:
    """A user as authentication puts it into a request."""

    def __init__(self, pk: int | None) -> None:
        self.pk = self.id = pk
        self.is_authenticated = pk is not None


class Session:
    def __init__(self, session_key: str | None) -> None:
        self.session_key = session_key


def authentication(get_response: Any) -> Any:
    """Authenticate by a header field; in a task the user has to be awaited."""

    def prepare(request: Any) -> None:
        number = request.headers.get("X-User")
        person = Person(int(number) if number else None)
        request.session = Session(request.headers.get("X-Session"))

        async def auser() -> Person:
            return person

        request.user, request.auser = person, auser

    if iscoroutinefunction(get_response):

        async def middle(request: Any) -> Any:
            prepare(request)
            del request.user  # to be awaited only
            return await get_response(request)

        return middle

    def simple(request: Any) -> Any:
        prepare(request)
        return get_response(request)

    return simple


authentication.sync_capable = authentication.async_capable = True  # type: ignore[attr-defined]
RATE_LIMITS = "headgate.http.django.rate_limits"


@asynccontextmanager
async def asgi(*urls: Any, **arguments: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a site with these views, under ASGI."""
    with site(*urls, **arguments):
        async with client_of(ASGIHandler()) as client:
            yield client


class site:  # noqa: N801  # a context manager that reads like one
    """Settings of a site with these views, and a client of it under WSGI."""

    def __init__(
        self, *urls: Any, middleware: Any = (RATE_LIMITS,), limits: Any = (), around: Any = None
    ) -> None:
        urlconf: Any = ModuleType("urlconf")
        urlconf.urlpatterns = list(urls)
        self._settings = override_settings(
            ROOT_URLCONF=urlconf, MIDDLEWARE=list(middleware), HEADGATE_LIMITS=limits
        )
        self._around = around

    def __enter__(self) -> httpx.Client:
        self._settings.enable()
        app = WSGIHandler()
        transport = httpx.WSGITransport(
            self._around(app) if self._around else app, raise_app_exceptions=False, remote_addr="192.0.2.1"
        )
        return httpx.Client(transport=transport, base_url="http://service")

    def __exit__(self, *error: object) -> None:
        self._settings.disable()


def ok(request: Any, **_: Any) -> Any:
    return HttpResponse("ok")


async def awaited(request: Any, **_: Any) -> Any:
    return HttpResponse("awaited")


def raising(view: Any) -> Any:
    """Return a view that a limiter guards."""
    kind = AsyncLimiter if iscoroutinefunction(view) else Limiter
    return kind("1/hour").guard("report", lambda request: int(request.GET.get("cost", 1)))(view)  # type: ignore[arg-type]


def test_unhandled_refusal_logs_the_missing_middleware(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with site(path("", raising(ok)), middleware=()) as client:
        assert [client.get("/").status_code for _ in range(2)] == [200, 500]
    assert "'headgate.http.django.rate_limits' in MIDDLEWARE of Django" in caplog.text


async def test_keys_by_user_session_and_address() -> None:
    middleware = ["tests.integration.http.test_django.authentication", RATE_LIMITS]
    headers = [{"x-user": "1"}, {"x-user": "1"}, {"x-user": "2"}, {}, {}]
    for view in (ok, awaited):
        urls = [
            path("user", limit("1/minute", key=by_user)(view)),
            path("session", limit("1/minute", key=by_session)(view)),
            path("scoped", limit(sliding_window("1/minute", scope="user"), key={"user": by_user})(view)),
            path("<int:number>", limit("1/minute", key=by_all(by_address(), by_route()))(view)),
        ]
        async with asgi(*urls, middleware=middleware) as client:
            codes = [(await client.get("/session", headers={"x-session": key})).status_code for key in "aab"]
            assert codes == [200, 429, 200]
            assert [(await client.get(f"/{number}")).status_code for number in (1, 2)] == [200, 429]
            for page in ("/user", "/scoped") if view is awaited else ():
                codes = [(await client.get(page, headers=sent)).status_code for sent in headers]
                assert codes == [200, 429, 200, 200, 429]
    for key in (by_user, by_scope_user()):
        with site(path("user", limit("1/minute", key=key)(ok)), middleware=middleware) as sync_client:
            codes = [sync_client.get("/user", headers=sent).status_code for sent in headers]
            assert codes == [200, 429, 200, 200, 429]


async def test_async_views_accept_async_functions() -> None:
    async def quota(request: Any) -> str | None:
        return f"{request.GET['quota']}/minute" if "quota" in request.GET else None

    async def tier(request: Any) -> str | None:
        return request.GET.get("tier")  # type: ignore[no-any-return]

    view = limit(
        sliding_window("5/minute", tiers={"pro": "7/minute"}),
        key=by_header("x-user"),
        cost=lambda request: int(request.GET.get("cost", 1)),
        tier=tier,
        quota=quota,
        exempt=lambda request: "free" in request.GET,
    )(awaited)
    async with asgi(path("", view)) as client:

        async def get(user: str, query: str) -> httpx.Response:
            return await client.get(f"/?{query}", headers={"x-user": user})

        assert left(await get("a", "cost=2")) == {"per-minute": 3}
        assert policies(await get("a", "tier=pro")) == {"per-minute": 7}
        assert policies(await get("b", "quota=20&cost=15")) == {"per-minute": 20}
        assert (await get("c", "cost=15")).status_code == 413
        assert "ratelimit" not in (await get("c", "free")).headers


async def test_class_based_views() -> None:
    @method_decorator(limit("3/hour", store=MemoryStore()), name="dispatch")
    class Pages(View):
        def get(self, request: Any) -> Any:
            return HttpResponse("got")

        @limit("1/minute")
        def post(self, request: Any) -> Any:
            return HttpResponse("posted")

    class AsyncPages(View):
        @limit("1/minute")
        async def get(self, request: Any) -> Any:
            return HttpResponse("got")

        async def post(self, request: Any) -> Any:
            return HttpResponse("posted")

    urls = path("", Pages.as_view()), path("async", AsyncPages.as_view())
    async with asgi(*urls, limits=[limit("9/day", default=True)]) as client:
        assert policies(await client.get("/")) == {"per-hour": 3}
        assert [(await client.post("/")).status_code for _ in range(2)] == [200, 429]
        assert (await client.get("/")).status_code == 429
        assert policies(await client.get("/async")) == {"per-minute": 1}
        assert policies(await client.head("/async")) == {"per-minute": 1}
        assert policies(await client.post("/async")) == {"per-day": 9}


BOTH = {"per-hour", "per-minute"}


def test_limits_around_the_site_share_the_fields() -> None:
    urls = path("", limit("5/minute")(ok)), path("awaited", limit("5/minute")(awaited))
    with site(*urls, around=lambda app: WSGIRateLimitMiddleware(app, "9/hour")) as client:
        responses = [client.get("/"), client.get("/awaited")]
    assert all(map(is_complete, responses))
    assert [set(left(response)) for response in responses] == [BOTH, BOTH]


async def test_limits_around_the_site_share_the_fields_under_asgi() -> None:
    urls = path("", limit("5/minute")(ok)), path("awaited", limit("5/minute")(awaited))
    with site(*urls):
        async with client_of(RateLimitMiddleware(ASGIHandler(), "9/hour")) as client:
            responses = [await client.get("/"), await client.get("/awaited")]
    assert all(map(is_complete, responses))
    assert [set(left(response)) for response in responses] == [BOTH, BOTH]


def test_default_names_on_a_given_store() -> None:
    store = MemoryStore()
    views = path("", limit("9/minute", store=store)(ok))
    with site(views, limits=[limit("9/minute", store=store)]) as client:
        assert left(client.get("/")) == {"per-minute": 8, "per-minute-2": 8}
    for name in ("site", f"{__name__}.ok"):
        assert Limiter("9/minute", name=name, store=store).check("192.0.2.1", 0).remaining == 8
    unnamed = limit("1/minute", store=store)
    unnamed(ok)
    with pytest.raises(ConfigError, match="needs a name="):
        unnamed(awaited)


def test_configuration_errors_name_the_fix() -> None:
    async def key(request: Any) -> str:
        return "a"

    for wrong, message in (
        (lambda: limit("1/minut"), "minut"),
        (lambda: limit("1/minute", default=True)(ok), "HEADGATE_LIMITS"),
        (lambda: limit("1/minute")(View), "method_decorator"),
        (lambda: limit("1/minute", key="user")(ok), "functions of the request"),  # type: ignore[arg-type]
        (lambda: limit(AsyncLimiter("1/minute"))(ok), "type Limiter"),
        (lambda: limit("1/minute")(ok)("no request"), "request"),
        (lambda: site(limits="1/minute").__enter__(), "HEADGATE_LIMITS is a list like"),
        (lambda: site(limits=limit("1/minute")).__enter__(), "HEADGATE_LIMITS is a list like"),
        (lambda: site(limits=[AsyncLimiter("1/minute")]).__enter__(), "type Limiter, not <AsyncLimiter"),
        (lambda: throttle("1/minute", store=MemoryStore()), "name="),
        (lambda: throttle("1/minute", key=key), "coroutine"),
        (lambda: throttle(AsyncLimiter("1/minute")), "type Limiter"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=message):
            wrong()


class TestThrottles:
    def view(self, **options: Any) -> Any:
        class Reports(APIView):
            throttle_classes = (throttle("1/minute", **options),)

            def get(self, request: Any) -> Any:
                return Response({"ok": True})

        return path("", Reports.as_view())

    def test_anonymous_requests_are_counted_by_address(self) -> None:
        with site(self.view(key=by_user)) as client:
            assert [client.get("/").status_code for _ in range(2)] == [200, 429]

    def test_fields_are_sent_without_the_middleware(self) -> None:
        day = throttle("9/day")

        class Both(APIView):
            throttle_classes = (day, throttle("1/minute"))

            def get(self, request: Any) -> Any:
                return Response({"ok": True})

        with site(path("", Both.as_view()), middleware=()) as client:
            first, second = [client.get("/") for _ in range(2)]
        assert (first.status_code, second.status_code) == (200, 429)
        assert is_complete(first)
        assert is_complete(second)
        assert left(first) == {"per-day": 8, "per-minute": 0}
        assert left(second) == {"per-day": 7, "per-minute": 0}

    def test_outcomes_need_the_middleware(self) -> None:
        with site(self.view(count={500})) as client:
            assert [client.get("/").status_code for _ in range(2)] == [200, 200]
        with site(self.view(count={500}), middleware=()) as client:
            assert client.get("/").status_code == 500

    @pytest.mark.parametrize("stored", [False, True])
    async def test_outcomes_and_places_under_asgi(self, stored: bool, tmp_path: Path) -> None:
        failures = Limiter(
            "1/minute", name="failures", store=f"sqlite:///{tmp_path}/failures" if stored else None
        )
        places = Limiter(concurrent(1, lease="60s"))

        class Reports(APIView):
            throttle_classes = (throttle(failures, count={418}), throttle(places))

            def get(self, request: Any) -> Any:
                assert not places.check("192.0.2.1")
                return Response({}, 418 if "fail" in request.query_params else 200)

        with failures:
            async with asgi(path("", Reports.as_view())) as client:
                responses = [await client.get(query) for query in ("/", "/", "/?fail", "/")]
        assert [response.status_code for response in responses] == [200, 200, 418, 429]
        assert all(is_complete(response) for response in responses)
        assert places.check("192.0.2.1")

    async def test_a_middleware_around_the_site_sees_its_throttles(self) -> None:
        with site(self.view(count={418}), middleware=()):
            async with client_of(RateLimitMiddleware(ASGIHandler(), "9/hour")) as client:
                response = await client.get("/")
        assert left(response) == {"per-hour": 8, "per-minute": 1}

    @pytest.mark.parametrize("middleware", [(RATE_LIMITS,), ()])
    async def test_throttles_after_a_refusal_are_not_charged(self, middleware: Any) -> None:
        later = Limiter("9/day")

        class Reports(APIView):
            throttle_classes = (throttle("1/minute"), throttle(later), throttle("5/minute", count={200}))[
                : 3 if middleware else 2
            ]

            def get(self, request: Any) -> Any:
                return Response({})

        with site(path("", Reports.as_view()), middleware=middleware) as client:
            assert [client.get("/").status_code for _ in range(5)] == [200, 429, 429, 429, 429]
        assert later.check("192.0.2.1", 0).remaining == 8
        async with asgi(path("", Reports.as_view()), middleware=middleware) as awaited_client:
            assert (await awaited_client.get("/")).status_code == 429
        assert later.check("192.0.2.1", 0).remaining == 8

    def test_a_throttle_on_a_view_replaces_a_default_of_the_site(self) -> None:
        own = throttle("9/minute")

        class Plain(APIView):
            def get(self, request: Any) -> Any:
                return Response({})

        class Own(Plain):
            throttle_classes = (own,)

        class Items(ViewSet):
            def list(self, request: Any) -> Any:
                return Response({})

            @method_decorator(limit("9/minute"))
            def create(self, request: Any) -> Any:
                return Response({})

            @action(detail=False, throttle_classes=[own])
            def best(self, request: Any) -> Any:
                return Response({})

        @api_view(["GET"])
        @throttle_classes([own])
        def function(request: Any) -> Any:
            return Response({})

        router = SimpleRouter()
        router.register("items", Items, "items")
        urls = [
            path("plain", Plain.as_view()),
            path("own", Own.as_view()),
            path("given", Plain.as_view(throttle_classes=[own])),
            path("function", function),
            *router.urls,
        ]
        with site(*urls, limits=[limit("9/hour", default=True)]) as client:
            for place in ("plain", "items/"):
                assert policies(client.get(f"/{place}")) == {"per-hour": 9}, place
            for place in ("own", "given", "function", "items/best/"):
                assert policies(client.get(f"/{place}")) == {"per-minute": 9}, place
            assert policies(client.post("/items/")) == {"per-minute": 9}
        with site(*urls, limits=[limit("9/hour")]) as client:
            assert policies(client.get("/own")) == {"per-hour": 9, "per-minute": 9}
