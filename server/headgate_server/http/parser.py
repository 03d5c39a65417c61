"""Parse the requests of a connection, with bounds on heads and on the framing of bodies."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import httptools

from headgate_server.app import Scope
from headgate_server.http.encoding import encoded_fields, split_target
from headgate_server.problems import Field

if TYPE_CHECKING:
    from headgate_server.http.connection import BoundedProtocol

logger = logging.getLogger("headgate.server")

HEAD_BYTES = 32_768
"""The largest request line and header fields together."""

_ASGI = {"version": "3.0", "spec_version": "2.3"}
_TEXT: Field = (b"content-type", b"text/plain; charset=utf-8")


class RequestParser:
    """Parses the requests of a connection and passes them to it.

    Attributes:
        is_in_head: Whether a head has begun and is not complete.
    """

    __slots__ = (
        "_begun",
        "_connection",
        "_framing_bytes",
        "_head_bytes",
        "_headers",
        "_hosts",
        "_is_head_too_large",
        "_parser",
        "_piece_bytes",
        "_url",
        "is_in_head",
    )

    def __init__(self, connection: BoundedProtocol) -> None:
        self.is_in_head = False
        self._connection = connection
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: list[Field] = []
        self._hosts = 0
        """The number of `Host` fields among the headers."""
        self._head_bytes = 0
        self._piece_bytes = 0
        self._begun = 0
        """The number of heads that began in the current piece."""
        self._is_head_too_large = False
        self._framing_bytes = 0
        """Bytes read since the last part of a body: sizes of chunks with their extensions, and trailers."""

    def feed(self, data: bytes) -> None:
        """Parse a piece of input."""
        connection = self._connection
        newest = connection.newest
        had_more = self.is_in_head or (newest is not None and newest.has_more)
        self._begun = 0
        self._piece_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse()
            return
        connection.check_unread_body()
        newest = connection.newest
        # If a head begins after another request, most of this piece is usually not part of the head.
        if self.is_in_head and self._begun + had_more <= 1:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES and not connection.transport.is_closing():
                connection.end_with(431)
        elif had_more and newest is not None and newest.has_more:
            self._framing_bytes += len(data)
            if self._framing_bytes > HEAD_BYTES:
                connection.end_with(431)

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Parse a request again without its `Upgrade` field, because its body would not be parsed otherwise."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse()
            return
        fields = tuple(field for field in self._headers if field[0] != b"upgrade")
        self._parser = httptools.HttpRequestParser(self)
        self.feed(b"%b %b HTTP/%b\r\n%b\r\n%b" % (method, self._url, version, encoded_fields(fields), rest))

    def _refuse(self) -> None:
        connection = self._connection
        newest = connection.newest
        if newest is not None and not newest.keep_alive and not newest.has_more:
            return  # input after the last request
        if self._is_head_too_large:
            connection.end_with(431)
        else:
            peer = (connection.client or ("an unknown address",))[0]
            logger.warning("%s sent an invalid HTTP request; perhaps TLS or another protocol", peer)
            connection.end_with(400, (_TEXT,), b"Invalid HTTP request received.")

    # Called by httptools

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._url = b""
        self._headers = []
        self._hosts = 0
        self._head_bytes = 0
        self._begun += 1
        self.is_in_head = True
        self._connection.begin_head()

    def on_url(self, url: bytes) -> None:
        """Add a part of the request target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header field; trailers are ignored, because they could not be checked before the body."""
        if self.is_in_head:
            name = name.lower()
            self._headers.append((name, value))
            if name == b"host":
                self._hosts += 1

    def on_headers_complete(self) -> None:
        """Pass the request to the connection."""
        self.is_in_head = False
        connection = self._connection
        connection.end_head()
        if self._parser.should_upgrade():
            return  # it is parsed again without the upgrade
        if connection.newest is not None and not connection.newest.keep_alive:
            raise _EndOfParsing  # its response ends the connection
        if self._head_bytes + self._piece_bytes > HEAD_BYTES and self._head_size() > HEAD_BYTES:
            self._is_head_too_large = True
            raise _EndOfParsing
        version = self._parser.get_http_version()
        if self._hosts > 1 or (self._hosts == 0 and version != "1.0"):
            raise _EndOfParsing  # exactly one Host field (RFC 9112, section 3.2)
        self._framing_bytes = -self._piece_bytes
        keep_alive = version != "1.0" and self._parser.should_keep_alive()
        connection.add_request(self._scope(version), keep_alive)

    def _head_size(self) -> int:
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def _scope(self, http_version: str) -> Scope:
        path, raw_path, query = split_target(self._url)
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": http_version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": self._headers,
            "server": self._connection.server,
            "client": self._connection.client,
        }

    def on_body(self, body: bytes) -> None:
        """Add a part of the newest request's body."""
        self._framing_bytes = -self._piece_bytes
        self._connection.add_body(body)

    def on_message_complete(self) -> None:
        """End the newest request's body."""
        if not self._parser.should_upgrade():
            self._connection.end_body()


class _EndOfParsing(Exception):
    """The input is not a request for the application."""
