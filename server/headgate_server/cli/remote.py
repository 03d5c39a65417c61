"""Asking a running server: a few calls of its API, with nothing but the standard library."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from ipaddress import ip_address
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from headgate_server.cli.common import DEFAULT_SERVER, TOKEN_VARIABLE, Failure

_PATIENCE = 10.0
"""Seconds without a byte after which a server counts as gone; a stream of events has one every second."""

_LARGEST_PROBLEM = 65_536


class Server:
    """A Headgate server, as far as the command needs it.

    Args:
        url: Where it runs.
        token: What it wants to see; by default that of the environment.

    Raises:
        Failure: From every method: it is not there, refuses, or is none of ours.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Failure(f"a server is written as {DEFAULT_SERVER}, not {url!r}", code=2)
        self.url = url.rstrip("/")
        self._token = token or os.environ.get(TOKEN_VARIABLE)
        self._opener = _opener(parts.hostname)

    def get(self, *path: str) -> Any:
        """Return what is at a path."""
        with self._answer(path) as response:
            return json.load(response)

    def post(self, *path: str, body: object) -> Any:
        """Return the answer to a body at a path."""
        with self._answer(path, json.dumps(body).encode()) as response:
            return json.load(response)

    def events(self) -> Iterator[tuple[str, Any]]:
        """Yield the events of the server as they come, each with its name."""
        with self._answer(("events",)) as response:
            name = "message"
            for line in response:
                field, _, value = line.decode().rstrip("\r\n").partition(":")
                if field == "event":
                    name = value.strip()
                elif field == "data":
                    yield name, json.loads(value)

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Say so if what it has answered is not what it should be."""
        try:
            yield
        except (LookupError, TypeError, AttributeError) as error:
            raise self._stranger(error) from error

    @contextmanager
    def _answer(self, path: tuple[str, ...], body: bytes | None = None) -> Iterator[HTTPResponse]:
        request = Request(f"{self.url}/v1/" + "/".join(quote(part, safe="") for part in path), body)
        request.add_header("Accept", "application/json, text/event-stream")
        if body is not None:
            request.add_header("Content-Type", "application/json")
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with self._opener.open(request, timeout=_PATIENCE) as response:
                yield response
        except HTTPError as error:
            with error:
                raise Failure(f"{self.url}: {_problem(error)}") from error
        except URLError as error:
            raise Failure(f"no server at {self.url}: {error.reason}; `headgate serve` starts one") from error
        except (HTTPException, OSError) as error:
            raise Failure(
                f"{self.url}: the connection is lost: {str(error) or type(error).__name__}"
            ) from error
        except ValueError as error:
            raise self._stranger(error) from error

    def _stranger(self, error: Exception) -> Failure:
        return Failure(f"{self.url} does not answer as a Headgate server does: {error!r}")


class _NoRedirects(HTTPRedirectHandler):
    """Follows nothing: a token must not go to another host."""

    def redirect_request(self, *_: object) -> None:
        return None


def _opener(host: str) -> OpenerDirector:
    """Return what opens a URL; no proxy could reach this machine's own loopback addresses."""
    return build_opener(_NoRedirects, *([ProxyHandler({})] if _is_loopback(host) else []))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _problem(error: HTTPError) -> str:
    """Return what a server says is wrong."""
    if error.code == 401:
        return f"a token is wanted: set {TOKEN_VARIABLE}, or give --token (`headgate token` makes one)"
    try:
        problem = json.loads(error.read(_LARGEST_PROBLEM))
        return str(problem.get("detail") or problem["title"])
    except (OSError, ValueError, LookupError, AttributeError):
        return f"it answers {error.code} {error.reason}"
