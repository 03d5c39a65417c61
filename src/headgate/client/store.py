"""The store of a Headgate server, which decides by the rules and with the stores of its policy file."""

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
from headgate.stores.base import Guarantees, check_deadline
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
        url: The server's URL, like `http://127.0.0.1:8080`; `https://:TOKEN@host` includes the token.
        token: The bearer token, if the server requires one.
        deadline: Seconds until a call fails with `StoreUnavailable`.
        tls: The context that verifies the certificate of an https:// server; by default the operating system's settings.
        transport: A custom httpx transport, for tests.

    The server decides by the rules of its policy file, with its stores and its clock. A limiter on this store must have the
    name of a limiter of the server; `limiter` and `async_limiter` load its rules. Calls with `now=` are not accepted.

    A call that charges is sent at most once. Settling a hold is retried once if the connection broke, because the
    server records whether the hold was settled.

    Threads, tasks, event loops and processes may share a store; after a fork it opens new connections.
    """

    has_rules = True  # all rules of the server may be shadow rules, which a limiter does not see
    clock = None
    notes = None

    guarantees = Guarantees(
        shared=True,
        durable=True,
        may_lose=(
            "nothing when a client fails. When the server fails, the same as the store of its limiter; with a memory store "
            "everything. It is exact and all-or-nothing only if that store is"
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

    def limiter(
        self,
        name: str,
        *,
        on_store_error: OnStoreError | None = None,
        deadline: float | None = None,
        hooks: Iterable[Hook] = (),
    ) -> Limiter:
        """Return a limiter with the server's rules for that name.

        While the server is unreachable, the limiter uses `on_store_error`; by default the failure policy of the server's
        policy file.

        Raises:
            ConfigError: The server has no such limiter, or rejects the token.
            StoreUnavailable: The server is unreachable.
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
        """Like `limiter`, but for coroutines."""
        found = await self._acall(self._ask_for_limiter(name))
        policy = on_store_error or found.on_store_error
        return AsyncLimiter(
            *found.rules, name=name, store=self, on_store_error=policy, deadline=deadline, hooks=hooks
        )

    def limiters(self) -> tuple[ServerLimiter, ...]:
        """Return all limiters of the server.

        This and the following methods raise StoreUnavailable if the server is unreachable; no failure policy applies.
        """
        return self._call(self._ask_for_limiters())

    async def async_limiters(self) -> tuple[ServerLimiter, ...]:
        """Like `limiters`, but for coroutines."""
        return await self._acall(self._ask_for_limiters())

    def wait_hint(
        self, limiter: str, key: Key | None = None, cost: Cost = 1, *, tier: str | None = None
    ) -> WaitHint:
        """Return when a call would be admitted, without taking anything."""
        return self._call(self._ask_for_hint(limiter, key, cost, tier))

    async def async_wait_hint(
        self, limiter: str, key: Key | None = None, cost: Cost = 1, *, tier: str | None = None
    ) -> WaitHint:
        """Like `wait_hint`, but for coroutines."""
        return await self._acall(self._ask_for_hint(limiter, key, cost, tier))

    def inspect(self, key: Key | None, *, tier: str | None = None) -> tuple[KeyState, ...]:
        """Return the state of a key in every limiter; a text key is used for each scope of a limiter with scopes."""
        return self._call(self._ask_for_states(key, tier))

    async def async_inspect(self, key: Key | None, *, tier: str | None = None) -> tuple[KeyState, ...]:
        """Like `inspect`, but for coroutines."""
        return await self._acall(self._ask_for_states(key, tier))

    def events(self) -> Iterator[tuple[str, Any]]:
        """Yield the server's events until it stops, each as a name, `history` or `tick`, and its data.

        The server sends one event per second; if none arrives within the deadline, the call fails.
        """
        return stream_events(self.endpoint, self.deadline)

    def _encoder(self, limiter: str, rules: tuple[Rule, ...]) -> LimiterEncoder:
        return LimiterEncoder(self.endpoint.name, limiter, rules)

    def _thread_engine(self) -> Any:
        if self.endpoint.is_transport_given:
            self.endpoint.transport()  # fails here rather than at the first call
        return self._threads

    def _task_engine(self) -> Any:
        if self.endpoint.is_transport_given:
            self.endpoint.async_transport()  # fails here rather than at the first call
        return self._tasks

    def _ask_for_limiters(self) -> EncodedRequest[tuple[ServerLimiter, ...]]:
        return (
            HttpRequest("GET", "/v1/limiters", may_repeat=True),
            reading(self.endpoint.name, read_limiters),
        )

    def _ask_for_limiter(self, name: str) -> EncodedRequest[ServerLimiter]:
        """Request all limiters, so that an error can list the existing names."""
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
