"""`python -m benchmarks.views [--quick]`: what a limit adds to a request in Flask, Django and Django REST framework.

Every contender is set up for memory as its own documentation says; the address is above each. A request is a call of the
WSGI application without a server or a client. Contenders take turns of a few requests each, so that whatever else the
machine does meets them alike. Costs are those over the same application without a limit, as the median of the differences
within each turn. Ours write all header fields; of the others only flask-limiter can write some, and does.

REST framework's throttles keep the time of every request, and so get slower with each. They are measured over 1,000 requests
of one client, as many as its documentation's example admits in a day, from none kept to all of them. How many are kept
decides this comparison: with up to 50, the throttle adds about 1.5 times what ours does, with 1,000 over 3 times. Of what
ours adds there, Django takes a third or more to put five fields on a response, of which the throttle has none.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from benchmarks.contenders import HEADGATE
from benchmarks.harness import (
    FULL,
    QUICK,
    Panel,
    Progress,
    Result,
    Runner,
    Scale,
    Section,
    Target,
    each,
    interleave,
    notes,
    number,
    table,
    target_table,
    write_chart,
    write_json,
)
from benchmarks.http import BARE, PLENTY, over

FRAMEWORKS = ("Flask", "Django", "REST framework")
TIMES_LESS = 3
CALLS = 1000
"""Requests after which the contenders that keep something start with nothing again."""
TURN = 50
"""Requests that a contender answers before it is the next one's turn."""

Build = Callable[[int], Any]
"""Returns a WSGI application that admits so many requests per hour."""


# --- Flask ------------------------------------------------------------------------------------------------------------


def flask_bare(limit: int) -> Any:
    """Build the application without a limit."""
    from flask import Flask

    app = Flask("benchmark")
    app.add_url_rule("/", view_func=lambda: "hello", endpoint="home")
    return app


def flask_headgate(limit: int) -> Any:
    """Build ours, with all fields."""
    from flask import Flask

    from headgate.http.flask import install
    from headgate.http.flask import limit as limit_to

    app = Flask("benchmark")
    install(app)
    app.add_url_rule("/", view_func=limit_to(f"{limit}/hour")(lambda: "hello"), endpoint="home")
    return app


# https://flask-limiter.readthedocs.io, "Quick start": a decorator; fields are off unless asked for.
def flask_limiter(limit: int) -> Any:
    """Build flask-limiter, with its fields."""
    from flask import Flask
    from flask_limiter import Limiter
    from flask_limiter.util import get_remote_address

    app = Flask("benchmark")
    limiter = Limiter(get_remote_address, app=app, storage_uri="memory://", headers_enabled=True)

    def home() -> str:
        return "hello"

    app.add_url_rule("/", view_func=limiter.limit(f"{limit}/hour")(home))
    return app


# --- Django and REST framework ----------------------------------------------------------------------------------------


def django_application(view: Any) -> Any:
    """Build a site with one view."""
    from django.conf import settings
    from django.core.handlers.wsgi import WSGIHandler
    from django.urls import path

    urls: Any = ModuleType("urls")
    urls.urlpatterns = [path("", view)]
    handler = WSGIHandler()

    def application(environ: Any, start_response: Any) -> Any:
        settings.ROOT_URLCONF = urls
        return handler(environ, start_response)

    return application


def configure_django() -> None:
    """Give Django the settings that all sites share; its cache is in memory by default."""
    import django
    from django.conf import settings

    rest_framework: dict[str, Any] = {"UNAUTHENTICATED_USER": None, "DEFAULT_AUTHENTICATION_CLASSES": []}
    settings.configure(ALLOWED_HOSTS=["*"], LOGGING_CONFIG=None, MIDDLEWARE=[], REST_FRAMEWORK=rest_framework)
    django.setup()


def hello(request: Any) -> Any:
    """Answer as a view does that has nothing to do."""
    from django.http import HttpResponse

    return HttpResponse("hello")


def django_bare(limit: int) -> Any:
    """Build the site without a limit."""
    return django_application(hello)


def django_headgate(limit: int) -> Any:
    """Build ours, with all fields."""
    from headgate.http.django import limit as limit_to

    return django_application(limit_to(f"{limit}/hour")(hello))


# https://django-ratelimit.readthedocs.io, "Using Django Ratelimit": a decorator; a refusal is a 403, without fields.
def django_ratelimit(limit: int) -> Any:
    """Build django-ratelimit."""
    from django_ratelimit.decorators import ratelimit

    return django_application(ratelimit(key="ip", rate=f"{limit}/h", group=str(limit))(hello))


def rest_view(*throttles: Any) -> Any:
    """Return a view of REST framework."""
    from rest_framework.renderers import JSONRenderer
    from rest_framework.response import Response
    from rest_framework.views import APIView

    class Home(APIView):  # type: ignore[misc]  # it has no types
        throttle_classes = throttles
        renderer_classes = (JSONRenderer,)

        def get(self, request: Any) -> Any:
            return Response({"hello": "world"})

    return Home.as_view()


def rest_bare(limit: int) -> Any:
    """Build the site without a limit."""
    return django_application(rest_view())


def rest_headgate(limit: int) -> Any:
    """Build ours, with all fields."""
    from headgate.http.rest_framework import throttle

    return django_application(rest_view(throttle(f"{limit}/hour")))


# https://www.django-rest-framework.org/api-guide/throttling/: AnonRateThrottle; refusals have Retry-After, no other fields.
def rest_throttle(limit: int) -> Any:
    """Build the framework's own throttle by address."""
    from rest_framework.throttling import AnonRateThrottle

    own = type("Own", (AnonRateThrottle,), {"rate": f"{limit}/hour", "scope": f"own-{limit}"})
    return django_application(rest_view(own))


BUILDS: dict[str, dict[str, Build]] = {
    "Flask": {BARE: flask_bare, HEADGATE: flask_headgate, "flask-limiter": flask_limiter},
    "Django": {BARE: django_bare, HEADGATE: django_headgate, "django-ratelimit": django_ratelimit},
    "REST framework": {BARE: rest_bare, HEADGATE: rest_headgate, "its own throttle": rest_throttle},
}


# --- Measuring --------------------------------------------------------------------------------------------------------


def environ() -> dict[str, Any]:
    """Return a request."""
    return {
        "REQUEST_METHOD": "GET",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/",
        "QUERY_STRING": "",
        "SERVER_NAME": "service",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_HOST": "service",
        "HTTP_ACCEPT": "*/*",
        "REMOTE_ADDR": "192.0.2.1",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }


def ask(app: Any, request: dict[str, Any]) -> int:
    """Send a request, read the response, and return its status."""
    statuses: list[int] = []

    def start(status: str, headers: Any, *error: Any) -> Any:
        statuses.append(int(status[:3]))
        return lambda part: None

    body = app(request, start)
    b"".join(body)
    if hasattr(body, "close"):
        body.close()
    return statuses[0]


def time_requests(app: Any, calls: int) -> float:
    """Return CPU microseconds per request."""
    requests = [environ() for _ in range(calls)]
    start = time.thread_time_ns()
    for request in requests:
        ask(app, request)
    return (time.thread_time_ns() - start) / calls / 1000


def runners_of(builds: Mapping[str, Build]) -> dict[str, Runner | Result]:
    """Build every contender, see that it limits, and return what times requests that it admits."""
    from django.core.cache import cache

    def build_and_check(build: Build) -> Runner:
        strict, app = build(1), build(PLENTY)
        seen = [ask(strict, environ()), ask(strict, environ()), ask(app, environ()), ask(app, environ())]
        is_limited = "_bare" not in build.__name__
        if seen[0] != 200 or seen[2:] != [200, 200] or (is_limited and seen[1] not in (429, 403)):
            raise RuntimeError(f"answered {seen}")
        turns = itertools.cycle(range(CALLS // TURN))

        def take_turn() -> float:
            if next(turns) == 0:
                cache.clear()
            return time_requests(app, TURN)

        return take_turn

    return each(builds, build_and_check)


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure what a limit adds, in each framework."""
    configure_django()
    for name in FRAMEWORKS:
        progress.begin(f"a limit in {name}")
        results = interleave(runners_of(BUILDS[name]), scale.rounds * CALLS // TURN, progress)
        added = {contender: over(result, results[BARE]) for contender, result in results.items()}
        [peer] = [contender for contender in added if contender not in (BARE, HEADGATE)]
        rows = [[contender, number(added[contender].median, 1)] for contender in (HEADGATE, peer)]
        title = f"{name}: microseconds that a limit adds to a request"
        times = added[peer].median / added[HEADGATE].median
        target = Target(f"{name}: times less than {peer}", TIMES_LESS, times, at_most=False)
        bars = [
            (contender, added[contender].median, number(added[contender].median, 1))
            for contender in (HEADGATE, peer)
        ]
        text = [table(title, ["contender", "admitted"], rows), *notes([added])]
        yield Section(name, text, {"admitted": added}, [target], [Panel(title, "µs", bars)])


def main() -> None:
    """Print tables and targets; write JSON and a chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough look: fewer rounds")
    options = parser.parse_args()
    progress = Progress(len(FRAMEWORKS))
    sections: list[Section] = []
    for found in run(QUICK if options.quick else FULL, progress):
        progress.end()
        print(*found.tables, sep="\n", flush=True)
        sections.append(found)
    promised = [target for found in sections for target in found.targets]
    print(target_table(promised, "Targets"))
    written = write_json("views", {**{found.name: found.data for found in sections}, "targets": promised})
    panels = [panel for found in sections for panel in found.panels]
    chart = write_chart("views", "What a limit adds to a request (less is better)", panels, HEADGATE)
    print(f"\n{written}\n{chart}", file=sys.stderr)


if __name__ == "__main__":
    main()
