"""What every request passes through: its trace id and its metrics."""

from __future__ import annotations

import re
import time
from uuid import uuid4

import structlog
from fastapi import Response

from headgate.http import problem
from headgate.http.asgi import App, Message, Receive, Scope, Send
from headgate_services.petitions.api.problems import as_response
from headgate_services.petitions.infrastructure.metrics import MetricsCollector

_HEADER = b"x-correlation-id"
_TRACE_ID = re.compile(rb"[\w.:/+=-]{1,128}")


class TraceMiddleware:
    """Gives every request a trace id: that of `X-Correlation-ID`, or a new one.

    It is in every log line of the request and in the response's `X-Correlation-ID`. One that cannot be a header or a word
    in a log is replaced. What nothing inside has handled is logged and answered here, with the trace id: the framework's
    own answer to it is made outside of every middleware.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(_HEADER, b"")
        trace_id = given.decode("ascii") if _TRACE_ID.fullmatch(given) else str(uuid4())
        scope.setdefault("state", {})["trace_id"] = trace_id

        is_answered = False

        async def traced(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                message["headers"] = [*message.get("headers", ()), (_HEADER, trace_id.encode())]
            await send(message)

        with structlog.contextvars.bound_contextvars(trace_id=trace_id):
            try:
                await self.app(scope, receive, traced)
            except Exception:  # whatever nothing inside has handled
                structlog.get_logger().exception("request_failed", method=scope["method"], path=scope["path"])
                if is_answered:
                    raise  # the connection has to be closed, or the client would wait for the rest
                await _server_error(scope["path"], trace_id)(scope, receive, traced)


def _server_error(path: str, trace_id: str) -> Response:
    detail = "An unexpected error; the log has its traceback under this trace_id."
    members = {"instance": path, "trace_id": trace_id}
    return as_response(problem(500, detail, members=members, media_type=b"application/json"))


class MetricsMiddleware:
    """Counts and times requests, by the template of their route."""

    def __init__(self, app: App, metrics: MetricsCollector) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500
        begin = time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            endpoint = getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if endpoint != "unmatched" else "other"
            self.metrics.answered(method, endpoint, status, time.perf_counter() - begin)
