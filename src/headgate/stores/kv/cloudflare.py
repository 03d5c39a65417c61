"""Cloudflare Workers KV, over its public HTTP API.

Written from Cloudflare's documentation:

- the routes: https://developers.cloudflare.com/api/resources/kv/subresources/namespaces/subresources/values/ and …/keys/
- one write per second and key, else 429: https://developers.cloudflare.com/kv/api/write-key-value-pairs/
- a read may be 60 seconds old: https://developers.cloudflare.com/kv/concepts/how-kv-works/
- 1,200 API calls in five minutes, else 429 with `retry-after`:
  https://developers.cloudflare.com/fundamentals/api/reference/limits/

So a read may return a value that this process has already replaced, and a burst of writes to one key is refused. Both would
lose counts. Against stale reads, the adapter remembers replaced values for a minute: if a read returns one of them, the
newest value is used instead. An unknown value was written by another process, and is assumed to be newer. Against refused
writes, the adapter retries after a pause.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from headgate._checks import check_kind, check_text
from headgate._extras import needing
from headgate.clock import MICROSECONDS, Clock, SteadyClock, check_clock, to_microseconds
from headgate.errors import ConfigError, StoreMisconfigured, StoreUnavailable
from headgate.stores.base import Guarantees, check_deadline
from headgate.stores.kv.loops import PerLoop

with needing("headgate.stores.kv.cloudflare", "cloudflare"):
    import httpx

__all__ = ["API_BASE", "CloudflareKV"]

API_BASE = "https://api.cloudflare.com/client/v4"
"""The address of Cloudflare's API."""
STALE_FOR = 60.0
"""Seconds for which a read may return a replaced value."""

_FIRST_PAUSE = 0.5
_KEYS_PER_PAGE = 1000
_NAMESPACE_NOT_FOUND = 10013
_logger = logging.getLogger(__name__)


class CloudflareKV:
    """Keeps values in a Workers KV namespace.

    Args:
        account_id: The account's identifier.
        namespace_id: The namespace's identifier; it should not be used for anything else.
        api_token: A token with the permission "Workers KV Storage Write". It is sent as a header, and never logged.
        api_base: The address of the API.
        timeout: Seconds for one attempt.
        deadline: Seconds for a call with all its attempts. After a timeout, a 429 or a 5xx the call is repeated, after a
            pause that doubles each time, or after `retry-after` if that is longer.
        clock: The clock for deadlines and pauses.
        transport: An httpx transport to use instead of the default one.

    Several processes may count in one namespace, but then some of their counts may be lost: the API has no
    compare-and-swap, and other processes may see a write a minute later.
    """

    guarantees = Guarantees(
        exact=False,
        shared=True,
        durable=True,
        may_lose="counts of processes that write at the same time, or within a minute of one another",
    )

    def __init__(
        self,
        account_id: str,
        namespace_id: str,
        api_token: str,
        *,
        api_base: str = API_BASE,
        timeout: float = 5.0,
        deadline: float = 10.0,
        clock: Clock | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        for name, value in (("account", account_id), ("namespace", namespace_id), ("token", api_token)):
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(
                    f"Cloudflare KV needs an account id, a namespace id and a token; the {name} is missing"
                )
        self._deadline_us = to_microseconds(check_deadline(deadline))
        seconds = check_deadline(timeout)
        check_kind("transport", transport, httpx.AsyncBaseTransport | None, "one of httpx for coroutines")
        self._clock: Clock = check_clock(clock) or SteadyClock()
        self._latest = _Latest()
        base = check_text("api_base", api_base).rstrip("/")
        self._namespace = f"{base}/accounts/{quote(account_id)}/storage/kv/namespaces/{quote(namespace_id)}"
        headers = {"Authorization": f"Bearer {api_token}"}
        self._clients = PerLoop(
            lambda: httpx.AsyncClient(headers=headers, timeout=seconds, transport=transport)
        )

    async def get(self, key: str) -> str | None:
        response = await self._call("GET", self._value_url(key))
        if response.status_code == httpx.codes.NOT_FOUND and _error_code(response) != _NAMESPACE_NOT_FOUND:
            found = None
        else:
            found = _checked(response).text
        return self._latest.of(key, found, self._clock.now_us())

    async def put(self, key: str, value: str, ttl: int) -> None:
        response = await self._call(
            "PUT",
            self._value_url(key),
            params={"expiration_ttl": ttl},
            content=value.encode(),
            headers={"Content-Type": "application/octet-stream"},
        )
        _checked_result(response)
        self._latest.put(key, value, self._clock.now_us())

    async def delete(self, key: str) -> None:
        _checked_result(await self._call("DELETE", self._value_url(key)))
        self._latest.put(key, None, self._clock.now_us())

    async def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        cursor = ""
        while True:
            params: dict[str, str | int] = {"prefix": prefix, "limit": _KEYS_PER_PAGE, "cursor": cursor}
            response = await self._call(
                "GET",
                f"{self._namespace}/keys",
                params={name: value for name, value in params.items() if value},
            )
            page = _checked_result(response)
            for key in page.get("result") or ():
                yield str(key["name"])
            cursor = str((page.get("result_info") or {}).get("cursor") or "")
            if not cursor:
                return

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await self._clients.own().aclose()

    def _value_url(self, key: str) -> str:
        return f"{self._namespace}/values/{quote(key, safe='')}"

    async def _call(self, method: str, url: str, **request: Any) -> httpx.Response:
        """Send a request, and return a response other than 429 or 5xx; all requests are idempotent.

        Raises:
            StoreUnavailable: No such response arrived in time.
        """
        give_up_at = self._clock.now_us() + self._deadline_us
        pause = _FIRST_PAUSE
        while True:
            try:
                response = await self._clients.own().request(method, url, **request)
            except httpx.RequestError as error:
                problem, wait = f"no answer ({type(error).__name__})", pause
                cause: Exception | None = error
            else:
                if response.status_code != httpx.codes.TOO_MANY_REQUESTS and not response.is_server_error:
                    return response
                problem, wait = _describe(response), max(pause, _retry_after(response))
                cause = None
            if self._clock.now_us() + wait * MICROSECONDS > give_up_at:
                raise StoreUnavailable(f"Cloudflare KV: {problem}") from cause
            _logger.warning("Cloudflare KV: %s to a %s; retrying in %g s", problem, method, wait)
            await self._clock.asleep(wait)
            pause *= 2


@dataclass(slots=True)
class _CloudflareEntry:
    """The newest known value, and earlier values with the times at which they were replaced."""

    value: str | None
    touched: int
    replaced: dict[str | None, int] = field(default_factory=dict)


class _Latest:
    """The newest known values of the keys that were written or read in the last minute."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _CloudflareEntry] = OrderedDict()  # least recently used first
        self._stale_for_us = to_microseconds(STALE_FOR)

    def of(self, key: str, found: str | None, now: int) -> str | None:
        """Return the newest known value, given the result of a read."""
        self._forget(now)
        entry = self._entries.get(key)
        if entry is not None:
            replaced_at = entry.replaced.get(found)
            if found == entry.value or (replaced_at is not None and now - replaced_at < self._stale_for_us):
                return entry.value
        return self.put(key, found, now)

    def put(self, key: str, value: str | None, now: int) -> str | None:
        """Remember a value as the newest, and return it."""
        entry = self._entries.setdefault(key, _CloudflareEntry(value, now))
        if entry.value != value:
            entry.replaced[entry.value] = now
            entry.value = value
        entry.replaced = {old: at for old, at in entry.replaced.items() if now - at < self._stale_for_us}
        entry.touched = now
        self._entries.move_to_end(key)
        return value

    def _forget(self, now: int) -> None:
        """Forget entries that reads can no longer contradict."""
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now - entry.touched < self._stale_for_us:
                return
            del self._entries[key]


def _checked(response: httpx.Response) -> httpx.Response:
    """Return the response if it is a success."""
    if response.status_code in (401, 403):
        raise StoreMisconfigured(f"Cloudflare KV: {_describe(response)}; check the token and its permissions")
    if not response.is_success:
        raise StoreUnavailable(f"Cloudflare KV: {_describe(response)}")
    return response


def _checked_result(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON document of a successful response."""
    body = _document(_checked(response))
    if body.get("success") is not True:
        raise StoreUnavailable(f"Cloudflare KV: {_describe(response)}")
    return body


def _document(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _errors(response: httpx.Response) -> list[dict[str, Any]]:
    errors = _document(response).get("errors")
    return [error for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []


def _error_code(response: httpx.Response) -> object:
    return next((error.get("code") for error in _errors(response)), None)


def _describe(response: httpx.Response) -> str:
    """Return the status and Cloudflare's error messages."""
    said = "; ".join(f"{error.get('code')}: {error.get('message')}" for error in _errors(response))
    return f"answered {response.status_code}{f' ({said})' if said else ''}"


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds in `retry-after`, or 0."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0
