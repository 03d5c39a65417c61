"""A request and its response, for ASGI and without messages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headgate_server.app import DIRECT, Message, Scope
from headgate_server.http.encoding import CLOSE, encoded_head
from headgate_server.problems import Field

if TYPE_CHECKING:
    from headgate_server.http.connection import BoundedProtocol

NO_CONTENT, NOT_MODIFIED = 204, 304
"""Statuses of responses without a body."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpExchange:
    """A request and its response.

    Attributes:
        scope: The request, as an ASGI scope.
        keep_alive: Whether the connection stays open after the response.
        has_more: Whether a part of the body has not arrived.
        body: The part of the body that has arrived and was not received by the application.
        is_started: Whether a part of the response was written.
        is_complete: Whether the whole response was written.
    """

    def __init__(self, connection: BoundedProtocol, scope: Scope, keep_alive: bool) -> None:
        scope["extensions"] = {DIRECT: self}
        self.scope = scope
        self.keep_alive = keep_alive
        self.body: bytes | bytearray = b""
        self.has_more = True
        self.is_started = self.is_complete = False
        self._connection = connection
        self._is_chunked = self._is_gone = self._has_news = self._has_continued = False
        self._news: asyncio.Event | None = None

    def feed(self, body: bytes) -> None:
        """Add a part of the body."""
        if not self.body:
            self.body = body
        elif isinstance(self.body, bytearray):
            self.body += body
        else:
            self.body = bytearray(self.body) + body
        self.notify()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is written."""
        return self.is_complete or self._is_gone

    def notify(self) -> None:
        """Wake a call of `receive`."""
        self._has_news = True
        if self._news is not None:
            self._news.set()

    def lose(self) -> None:
        """Record that the client is gone."""
        self._is_gone = not self.is_complete
        self.notify()

    # ASGI messages

    async def receive(self) -> Message:
        """Return the next part of the body, or a disconnect after the last one."""
        if self._awaits_continue() and not self.is_started:
            self._has_continued = True
            self._connection.write(_CONTINUE)
        while not (self._has_news or self._is_gone or self.is_complete):
            self._connection.resume_reading()
            self._news = self._news or asyncio.Event()
            self._news.clear()
            await self._news.wait()
        if self._is_gone or self.is_complete:
            return {"type": "http.disconnect"}
        self._has_news = False
        body, self.body = self.body, b""
        return {"type": "http.request", "body": bytes(body), "more_body": self.has_more}

    def _awaits_continue(self) -> bool:
        """Return whether the client waits for `100 Continue` before it sends the body."""
        return (
            self.has_more
            and not (self._has_continued or self.body)
            and self.scope["http_version"] != "1.0"
            and any(
                name == b"expect" and value.lower() == b"100-continue"
                for name, value in self.scope["headers"]
            )
        )

    async def send(self, message: Message) -> None:
        """Write a part of the response, once the client has read enough of the earlier parts."""
        await self._connection.until_writable()
        if self._is_gone:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], tuple(message["headers"]))
        else:
            self._continue(message.get("body", b""), more=message.get("more_body", False))

    def _start(self, status: int, fields: tuple[Field, ...]) -> None:
        self.is_started = True
        fields = self._with_close(fields)
        is_sized = any(name == b"content-length" for name, _ in fields)
        if not is_sized and status not in (NO_CONTENT, NOT_MODIFIED) and self.scope["http_version"] != "1.0":
            fields = (*fields, (b"transfer-encoding", b"chunked"))
            self._is_chunked = self.scope["method"] != "HEAD"
        head = b"%b%b\r\n" % (encoded_head(status, fields), self._connection.default_fields())
        self._connection.write(head)

    def _with_close(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Add `Connection: close` if this response ends the connection.

        Responses to clients that wait for `100 Continue` do, because it is unknown whether the body follows.
        """
        if CLOSE in fields:
            self.keep_alive = False
            return fields
        if self.has_more and self._awaits_continue():
            self.keep_alive = False
        return fields if self.keep_alive else (*fields, CLOSE)

    def _continue(self, body: bytes, *, more: bool) -> None:
        if self._is_chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = body if more else body + b"0\r\n\r\n"
        if body and self.scope["method"] != "HEAD":
            self._connection.write(body)
        if not more:
            self._complete()

    # Without messages, for the usual case that nothing has to wait

    def whole_body(self) -> bytes | None:
        """Return the body; `None` if it has not arrived completely."""
        return None if self.has_more else bytes(self.body)

    def reply(self, status: int, fields: tuple[Field, ...], body: bytes) -> bool:
        """Write the whole response; do nothing and return false if writing would have to wait."""
        connection = self._connection
        if self._is_gone or connection.writable is not None:
            return False
        head = encoded_head(status, self._with_close(fields)) + connection.default_fields()
        if self.scope["method"] == "HEAD":
            response = b"%bcontent-length: %d\r\n\r\n" % (head, len(body))
        elif status in (NO_CONTENT, NOT_MODIFIED):
            response = head + b"\r\n"
        else:
            response = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
        connection.write(response)
        self._complete()
        return True

    def abort(self) -> None:
        """Cut the connection, even if the client has not read everything."""
        self._connection.transport.abort()

    def _complete(self) -> None:
        self.is_started = self.is_complete = True
        self.notify()
        self._connection.completed(self)
