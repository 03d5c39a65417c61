"""Middleware for trace ids."""

from __future__ import annotations

import re
from uuid import uuid4

import structlog
from fastapi import Response

from headgate.http import problem
from headgate.http.asgi import App, Message, Receive, Scope, Send
from headgate_services.petitions.api.problems import as_response

_HEADER = b"x-correlation-id"
_TRACE_ID = re.compile(rb"[\w.:/+=-]{1,128}")


class TraceMiddleware:
    """Sets the trace id of a request: the value of `X-Correlation-ID`, or a new id if it is missing or invalid.

    The trace id is in every log line of the request and in the response's `X-Correlation-ID`. Unexpected errors are logged
    and answered here, because the framework's own response to them is created outside of all middleware.
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
            except Exception:  # an unexpected error
                structlog.get_logger().exception("request_failed", method=scope["method"], path=scope["path"])
                if is_answered:
                    raise  # closes the connection; otherwise the client would wait for the rest
                await _server_error(scope["path"], trace_id)(scope, receive, traced)


def _server_error(path: str, trace_id: str) -> Response:
    detail = "Unexpected error. The log has the traceback with this trace_id."
    members = {"instance": path, "trace_id": trace_id}
    return as_response(problem(500, detail, members=members, media_type=b"application/json"))
