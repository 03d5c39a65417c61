"""The gates of limiters on a store over a network, for threads and for tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar

from headgate.costs import Costs
from headgate.errors import HeadgateError, StoreConflict
from headgate.keys import Key
from headgate.stores.base import Answer, Receipts
from headgate.stores.remote.batching import Abandoned
from headgate.stores.remote.peer import FAILURES
from headgate.stores.request import Request

logger = logging.getLogger("headgate")

T = TypeVar("T")


Ask = tuple[Any, Callable[[Any], T]]
"""A request as a store takes it, `None` if nothing need be asked, and what reads the reply or raises what it means."""


class Asks(Protocol):
    """What the operations of a limiter's gate ask of a store."""

    def ask(self, request: Request) -> Ask[Answer]:
        """Return what answers a request."""

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> Ask[None]:
        """Return what gives units back."""

    def reset(self, key: Key | None) -> Ask[None]:
        """Return what forgets what was counted."""


class Engine(Protocol):
    """What carries requests of threads; see `ThreadEngine`."""

    def call(
        self, request: Any, due: float, source: str, must_leave: bool, abandoned: Abandoned | None
    ) -> Any: ...

    def tell(self, request: Any, due: float, source: str) -> None: ...


class EngineForTasks(Protocol):
    """What carries requests of tasks; see `AsyncEngine`."""

    def start(self, request: Any, due: float, source: str, must_leave: bool) -> asyncio.Future[Any]: ...

    async def call_async(self, request: Any, due: float, source: str, abandoned: Abandoned) -> Any: ...


class RemoteGate:
    """A limiter's rules, for threads.

    A thread may be interrupted at any time, by a signal handler that raises. What it had asked for then counts as charged if
    it has been sent; a hold is released when the reply is read, which the next call does; and what has been used or is given
    back is sent.

    Args:
        name: What the server is called in messages.
        asks: What to ask of it.
        engine: What carries that.
        limiter: The limiter's name.
        deadline: Seconds after which a call is given up.
    """

    def __init__(self, name: str, asks: Asks, engine: Engine, limiter: str, deadline: float) -> None:
        self._name = name
        self._asks = asks
        self._engine = engine
        self._limiter = limiter
        self._deadline = deadline

    def ask(self, request: Request) -> Answer:
        ask = self._asks.ask(request)
        release = partial(self._release, ask[1], request) if request.is_given_up else None
        return self._carry(ask, request.is_completed, release)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        self._carry(self._asks.refund(receipts, cost, now), True)

    def reset(self, key: Key | None) -> None:
        self._carry(self._asks.reset(key), True)

    def _carry(self, ask: Ask[T], must_leave: bool, abandoned: Abandoned | None = None) -> T:
        request, reader = ask
        if request is None:
            return reader(None)
        due = monotonic() + self._deadline
        return read(self._name, reader, self._engine.call(request, due, self._limiter, must_leave, abandoned))

    def _release(self, reader: Callable[[Any], Answer], request: Request, reply: Any) -> None:
        """Give back what was held for a caller that has been interrupted meanwhile."""
        refund = giving_back(self._asks, reader, request, reply)
        if refund is not None:
            self._engine.tell(refund, monotonic() + self._deadline, self._limiter)


class AsyncRemoteGate:
    """A limiter's rules, for tasks; see `RemoteGate`.

    A caller may be cancelled at any time. What it had asked for then counts as charged if it has been sent; a hold is
    released; and what has been used or is given back is sent.
    """

    def __init__(self, name: str, asks: Asks, engine: EngineForTasks, limiter: str, deadline: float) -> None:
        self._name = name
        self._asks = asks
        self._engine = engine
        self._limiter = limiter
        self._deadline = deadline

    async def ask(self, request: Request) -> Answer:
        asked, reader = self._asks.ask(request)
        if asked is None:
            return reader(None)
        due = monotonic() + self._deadline
        if request.is_given_up:
            release = partial(self._release, reader, request)
            reply = await self._engine.call_async(asked, due, self._limiter, release)
        else:
            reply = await self._engine.start(asked, due, self._limiter, request.is_completed)
        return read(self._name, reader, reply)

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        await self._carry(self._asks.refund(receipts, cost, now), True)

    async def reset(self, key: Key | None) -> None:
        await self._carry(self._asks.reset(key), True)

    async def _carry(self, ask: Ask[T], must_leave: bool) -> T:
        request, reader = ask
        if request is None:
            return reader(None)
        due = monotonic() + self._deadline
        return read(self._name, reader, await self._engine.start(request, due, self._limiter, must_leave))

    def _release(self, reader: Callable[[Any], Answer], request: Request, reply: Any) -> None:
        """Give back what was held for a caller that has been cancelled meanwhile."""
        refund = giving_back(self._asks, reader, request, reply)
        if refund is not None:
            sent = self._engine.start(refund, monotonic() + self._deadline, self._limiter, True)
            sent.add_done_callback(mention_failure)


def read(name: str, reader: Callable[[Any], T], reply: Any) -> T:
    """Return what a reply says.

    Raises:
        HeadgateError: What the reply means if it is no answer; StoreConflict if it means nothing to us.
    """
    try:
        return reader(reply)
    except HeadgateError:  # some of which are a ValueError
        raise
    except FAILURES as error:
        raise StoreConflict(f"{name} has answered something that cannot be read: {reply!r:.80}") from error


def giving_back(asks: Asks, reader: Callable[[Any], Answer], request: Request, reply: Any) -> Any:
    """Return the request that refunds the units a hold has taken according to its reply; `None` if there are none."""
    try:
        receipts = reader(reply)[1]
        return None if receipts is None else asks.refund(receipts, request.cost, request.now)[0]
    except (HeadgateError, *FAILURES):
        return None  # nothing was taken, or the reply cannot be read


def mention_failure(refund: asyncio.Future[Any]) -> None:
    """Log that units could not be given back for a caller that has gone: they count until they expire."""
    if not refund.cancelled() and (error := refund.exception()) is not None:
        logger.warning("a hold whose caller has gone could not be released: %s", error)
