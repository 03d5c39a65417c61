"""The store that is a Headgate server: it decides, by the rules of its policy file, in whatever store that names."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from headgate import AsyncLimiter, Limiter
from headgate.client.encoder import LimiterEncoder
from headgate.client.endpoint import ServerEndpoint, Transport
from headgate.client.peer import ServerPeer, stream_events
from headgate.client.values import KeyState, ServerLimiter, WaitHint
from headgate.client.wire import (
    HttpRequest,
    alone,
    find_limiter,
    limiter_request,
    packed,
    read_key_states,
    read_limiters,
    read_wait_hint,
    reading,
)
from headgate.costs import Cost, check_whole
from headgate.hooks import Hook
from headgate.keys import Key, key_to_data
from headgate.outage.policies import OnStoreError
from headgate.rules import Rule
from headgate.stores.base import AsyncGate, Gate, Guarantees, check_deadline
from headgate.stores.remote._async.gate import AsyncRemoteGate
from headgate.stores.remote._sync.gate import RemoteGate
from headgate.stores.remote.encoding import EncodedRequest
from headgate.stores.remote.store import RemoteStore
from headgate.stores.remote.tasks import AsyncEngine
from headgate.stores.remote.threads import ThreadEngine

T = TypeVar("T")

DEFAULT_DEADLINE = 1.0
"""Seconds."""


class ServerStore(RemoteStore):
    """Counts on a Headgate server.

    Args:
        url: Where it is, as `http://127.0.0.1:8080`; `https://:TOKEN@host` has the token in it.
        token: The bearer token to log in with, if the server has tokens.
        deadline: Seconds after which a call is given up, with `StoreUnavailable`.
        tls: How to check the certificate of an https:// server, if not as the operating system does.
        transport: What to send requests with, instead of httpx's own: a test's.

    The server decides by the rules of its policy file, its stores and its clock. A limiter on this store has the name of one
    of its limiters; `limiter` and `async_limiter` ask for the rules that belong to it. Times of the caller's own are
    refused.

    A call that charges is sent at most once. Settling a hold is repeated, once, if the connection broke: the server knows
    whether it was settled before.

    Threads, tasks, event loops and processes may share a store; one that was made before a fork connects anew.
    """

    has_rules = True  # its rules may all be shadow rules, which a limiter does not see
    clock = None
    notes = None

    guarantees = Guarantees(
        shared=True,
        durable=True,
        may_lose=(
            "nothing when a client dies. When the server does, what the store of its limiter may lose; with a memory store "
            "that is everything. If that store is not exact or not all-or-nothing, neither is this"
        ),
    )

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        deadline: float = DEFAULT_DEADLINE,
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.endpoint = ServerEndpoint(url, token, tls, transport)
        self.deadline = check_deadline(deadline)
        peer = ServerPeer(self.endpoint)
        self._threads = ThreadEngine(peer, self.deadline)
        self._tasks = AsyncEngine(peer, self.deadline)

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        """Return the operations of the server's limiter of that name; calls are given up after `deadline` seconds.

        The first decision raises ConfigError if the server's rules have other names.
        """
        seconds = self.deadline if deadline is None else check_deadline(deadline)
        if self.endpoint.is_transport_given:
            self.endpoint.transport()  # fails here rather than at the first call
        return RemoteGate(self.endpoint.name, self._encoder(limiter, rules), self._threads, seconds)

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        """As `bind`, for coroutines."""
        seconds = self.deadline if deadline is None else check_deadline(deadline)
        if self.endpoint.is_transport_given:
            self.endpoint.async_transport()  # fails here rather than at the first call
        return AsyncRemoteGate(self.endpoint.name, self._encoder(limiter, rules), self._tasks, seconds)

    def limiter(
        self,
        name: str,
        *,
        on_store_error: OnStoreError | None = None,
        deadline: float | None = None,
        hooks: Iterable[Hook] = (),
    ) -> Limiter:
        """Return a limiter with the rules that the server has for that name.

        What it answers while the server cannot be asked is by default what the server's policy file says of its store.

        Raises:
            ConfigError: The server has no such limiter, or does not let us in.
            StoreUnavailable: It cannot be asked.
        """
        found = self._call(self._ask_for_limiter(name))
        policy = on_store_error or found.on_store_error
        return Limiter(
            *found.rules, name=name, store=self, on_store_error=policy, deadline=deadline, hooks=hooks
        )

    async def async_limiter(
        self,
        name: str,
        *,
        on_store_error: OnStoreError | None = None,
        deadline: float | None = None,
        hooks: Iterable[Hook] = (),
    ) -> AsyncLimiter:
        """As `limiter`, for coroutines."""
        found = await self._acall(self._ask_for_limiter(name))
        policy = on_store_error or found.on_store_error
        return AsyncLimiter(
            *found.rules, name=name, store=self, on_store_error=policy, deadline=deadline, hooks=hooks
        )

    def limiters(self) -> tuple[ServerLimiter, ...]:
        """Return all limiters that the server has.

        This and the calls below raise StoreUnavailable when the server cannot be asked: no policy answers for it.
        """
        return self._call(self._ask_for_limiters())

    async def async_limiters(self) -> tuple[ServerLimiter, ...]:
        """As `limiters`, for coroutines."""
        return await self._acall(self._ask_for_limiters())

    def wait_hint(
        self, limiter: str, key: Key | None = None, cost: Cost = 1, *, tier: str | None = None
    ) -> WaitHint:
        """Return when a call would be admitted, and take nothing."""
        return self._call(self._ask_for_hint(limiter, key, cost, tier))

    async def async_wait_hint(
        self, limiter: str, key: Key | None = None, cost: Cost = 1, *, tier: str | None = None
    ) -> WaitHint:
        """As `wait_hint`, for coroutines."""
        return await self._acall(self._ask_for_hint(limiter, key, cost, tier))

    def inspect(self, key: Key | None, *, tier: str | None = None) -> tuple[KeyState, ...]:
        """Return what every limiter has counted for a key; a text stands for every scope of a limiter that has scopes."""
        return self._call(self._ask_for_states(key, tier))

    async def async_inspect(self, key: Key | None, *, tier: str | None = None) -> tuple[KeyState, ...]:
        """As `inspect`, for coroutines."""
        return await self._acall(self._ask_for_states(key, tier))

    def events(self) -> Iterator[tuple[str, Any]]:
        """Yield the server's events as they come, each with its name, `history` or `tick`, and its data, until it stops.

        The server sends one a second; it is given up when none comes within the deadline.
        """
        return stream_events(self.endpoint, self.deadline)

    def _encoder(self, limiter: str, rules: tuple[Rule, ...]) -> LimiterEncoder:
        return LimiterEncoder(self.endpoint.name, limiter, rules)

    def _ask_for_limiters(self) -> EncodedRequest[tuple[ServerLimiter, ...]]:
        return (
            HttpRequest("GET", "/v1/limiters", may_repeat=True),
            reading(self.endpoint.name, read_limiters),
        )

    def _ask_for_limiter(self, name: str) -> EncodedRequest[ServerLimiter]:
        """Ask for all of them, so as to know what there is if there is no such one."""
        read = partial(find_limiter, self.endpoint.name, name)
        return HttpRequest("GET", "/v1/limiters", may_repeat=True), reading(self.endpoint.name, read)

    def _ask_for_hint(
        self, limiter: str, key: Key | None, cost: Cost, tier: str | None
    ) -> EncodedRequest[WaitHint]:
        for units in cost.values() if isinstance(cost, Mapping) else (cost,):
            check_whole(units)
        members = {"key": key_to_data(key), "cost": cost, "tier": tier}
        request = limiter_request(limiter, "wait-hint", members)
        return alone(request), reading(self.endpoint.name, read_wait_hint)

    def _ask_for_states(self, key: Key | None, tier: str | None) -> EncodedRequest[tuple[KeyState, ...]]:
        request = HttpRequest("POST", "/v1/inspect", packed({"key": key_to_data(key), "tier": tier}))
        return request, reading(self.endpoint.name, read_key_states)

    def _call(self, encoded: EncodedRequest[T]) -> T:
        request, reader = encoded
        return reader(self._threads.call(request, monotonic() + self.deadline))

    async def _acall(self, encoded: EncodedRequest[T]) -> T:
        request, reader = encoded
        return reader(await self._tasks.call(request, monotonic() + self.deadline))
