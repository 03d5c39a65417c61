"""Calls from threads: each has a connection to itself while it lasts."""

from __future__ import annotations

import threading

import httpx

from headgate._fork import watch
from headgate.client.endpoint import Endpoint, is_lost, unpacked
from headgate.client.wire import HttpRequest, Response


class Lines:
    """The connections of this process to a server, as many as there were calls at once."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._transport: httpx.BaseTransport | None = None
        self._lock = threading.Lock()
        self._closed = False
        watch(self)

    def call(self, request: HttpRequest, deadline: float) -> Response:
        """Send a request and return the answer; each step takes so many seconds at most.

        It is sent once; again only if that does no harm and the connection broke.

        Raises:
            StoreUnavailable: There is no answer.
        """
        try:
            try:
                return self._send(request, deadline)
            except httpx.TransportError as cause:
                if not (request.may_repeat and is_lost(cause)):
                    raise
                return self._send(request, deadline)
        except httpx.RequestError as cause:
            raise self.endpoint.error(cause) from cause

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _send(self, request: HttpRequest, deadline: float) -> Response:
        transport = self._transport or self._open()
        response = transport.handle_request(self.endpoint.packed(request, deadline))
        try:
            response.read()
        finally:
            response.close()
        return unpacked(response)

    def _open(self) -> httpx.BaseTransport:
        with self._lock:
            if self._closed:
                raise self.endpoint.closed()
            if self._transport is None:
                self._transport = self.endpoint.transport()
            return self._transport

    def after_fork_in_child(self) -> None:
        """Leave the parent's connections alone; they are kept, because forgetting them would close them."""
        _inherited.append(self._transport)
        self._transport = None
        self._lock = threading.Lock()


_inherited: list[object] = []
