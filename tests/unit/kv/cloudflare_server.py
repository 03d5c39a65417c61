"""Cloudflare's KV API, as its documentation describes it.

- https://developers.cloudflare.com/api/resources/kv/subresources/namespaces/subresources/values/ : a value is read as it
  was written, with its expiration in a header; a write takes `expiration_ttl`, at least 60, in the query; answers other
  than a value are JSON with `success`, `errors`, `messages` and `result`.
- https://developers.cloudflare.com/api/resources/kv/subresources/namespaces/subresources/keys/ : `prefix`, `limit` from 10
  to 1000, and a `cursor` in `result_info` while there is more.
- https://developers.cloudflare.com/kv/api/write-key-value-pairs/ : more than one write per second to a key is refused with
  429, and a key has 512 bytes at most.
- https://developers.cloudflare.com/kv/concepts/how-kv-works/ : a read may be up to 60 seconds old.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from headgate.testing import FakeClock

ACCOUNT = "023e105f4ecef8ad9ca31a8372d0c353"
NAMESPACE = "0f2ac74b498b48028cb68387c421e279"
TOKEN = "Sn3lZJTBX6kkg7OdcBUAxOO963GEIyGQqnFTOFYY"


class Version(NamedTuple):
    """The value of a key since a time; `None` if it was deleted."""

    since: float
    value: bytes | None
    expiration: int = 0


class CloudflareServer:
    """A namespace, in the time of a fake clock.

    Attributes:
        clock: The clock of the server.
        lag: Delay in seconds before a write can be read.
        writes_per_second_are_limited: Whether a second write to a key within a second is refused.
        failures: Responses to return first, instead of the usual ones.
        calls: Method and path of every call, in order.
        page_size: The most keys on a page of the list.
    """

    def __init__(self) -> None:
        self.app = FastAPI()
        path = "/client/v4/accounts/{account}/storage/kv/namespaces/{namespace}/{rest:path}"
        self.app.add_api_route(path, self.answer, methods=["GET", "PUT", "DELETE"])
        self.start_over(FakeClock())

    def start_over(self, clock: FakeClock) -> None:
        """Forget everything: starting a server for every test would take longer than the tests."""
        self.clock = clock
        self.lag = 0.0
        self.writes_per_second_are_limited = False
        self.failures: deque[Response] = deque()
        self.calls: list[tuple[str, str]] = []
        self.page_size = 1000
        self.history: dict[str, list[Version]] = {}

    def value(self, key: str) -> str | None:
        """Return the latest value, even if reads do not return it yet."""
        version = self._version(key, self.clock.now)
        return None if version is None or version.value is None else version.value.decode()

    def expiration(self, key: str) -> int:
        """Return when the value expires, in seconds since the epoch."""
        version = self._version(key, self.clock.now)
        assert version is not None
        return version.expiration

    def fail(self, status: int, code: int = 10001, message: str = "failure", **headers: str) -> None:
        """Answer the next call with this failure."""
        self.failures.append(failure(status, code, message, headers))

    async def answer(self, account: str, namespace: str, rest: str, request: Request) -> Response:
        self.calls.append((request.method, rest))
        if self.failures:
            return self.failures.popleft()
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return failure(401, 10000, "Authentication error")
        if (account, namespace) != (ACCOUNT, NAMESPACE):
            return failure(404, 10013, "namespace not found")
        if rest == "keys" and request.method == "GET":
            return self._list(request)
        return await self._value(rest.removeprefix("values/"), request)

    async def _value(self, key: str, request: Request) -> Response:
        if not 0 < len(key.encode()) <= 512:
            return failure(400, 10030, "key name is invalid")
        if request.method == "GET":
            version = self._version(key, self.clock.now - self.lag)
            if version is None or version.value is None:
                return failure(404, 10009, "get: 'key not found'")
            return Response(version.value, headers={"expiration": str(version.expiration)})
        return self._write(key, None if request.method == "DELETE" else await request.body(), request)

    def _write(self, key: str, value: bytes | None, request: Request) -> Response:
        ttl = int(request.query_params.get("expiration_ttl", "60"))
        if ttl < 60:
            return failure(400, 10033, "Expiration TTL must be at least 60")
        versions = self.history.setdefault(key, [])
        if self.writes_per_second_are_limited and versions and self.clock.now - versions[-1].since < 1:
            return failure(429, 10048, "Too many writes to the same key")
        versions.append(Version(self.clock.now, value, int(self.clock.now) + ttl))
        return success({})

    def _list(self, request: Request) -> Response:
        prefix, after = request.query_params.get("prefix", ""), request.query_params.get("cursor", "")
        keys = sorted(key for key in self.history if key.startswith(prefix) and self.value(key) is not None)
        rest = [key for key in keys if key > after]
        page = rest[: min(self.page_size, int(request.query_params.get("limit", "1000")))]
        cursor = page[-1] if len(page) < len(rest) else ""
        result = [{"name": key, "expiration": self.expiration(key)} for key in page]
        return success(result, {"count": len(page), "cursor": cursor})

    def _version(self, key: str, at: float) -> Version | None:
        versions = [version for version in self.history.get(key, []) if version.since <= at]
        return versions[-1] if versions and versions[-1].expiration > at else None


def success(result: object, result_info: dict[str, Any] | None = None) -> Response:
    body = {"success": True, "errors": [], "messages": [], "result": result}
    return JSONResponse(body if result_info is None else body | {"result_info": result_info})


def failure(status: int, code: int, message: str, headers: dict[str, str] | None = None) -> Response:
    errors = [{"code": code, "message": message}]
    body = {"success": False, "errors": errors, "messages": [], "result": None}
    return JSONResponse(
        body, status, {name.replace("_", "-"): text for name, text in (headers or {}).items()}
    )
