"""The gates of limiters on a store over a network, for threads and for tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from headgate.costs import Costs
from headgate.errors import HeadgateError, StoreConflict
from headgate.keys import Key
from headgate.stores.base import Answer, Receipts
from headgate.stores.remote.peer import FAILURES
from headgate.stores.remote.tasks import AsyncEngine
from headgate.stores.remote.threads import ThreadEngine
from headgate.stores.request import Request

logger = logging.getLogger("headgate")

T = TypeVar("T")


class Ask(NamedTuple, Generic[T]):
    """A request as a store takes it, and how to read the reply, which may raise what the reply means.

    Attributes:
        request: What to send; `None` if nothing need be asked.
        read: Takes the reply.
    """

    request: Any
    read: Callable[[Any], T]


class Asks(Protocol):
    """What the operations of a limiter's gate ask of a store."""

    def ask(self, request: Request) -> Ask[Answer]:
        """Return what answers a request."""

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> Ask[None]:
        """Return what gives units back."""

    def reset(self, key: Key | None) -> Ask[None]:
        """Return what forgets what was counted."""


class RemoteGate:
    """A limiter's rules, for threads.

    A thread may be interrupted at any time, by a signal handler that raises. What it had asked for then counts as charged if
    it has been sent; a hold is released when the reply is read, which the next call does; and what has been used or is given
    back is sent.
    """

    def __init__(self, name: str, asks: Asks, engine: ThreadEngine, limiter: str, deadline: float) -> None:
        self._name = name
        self._asks = asks
        self._engine = engine
        self._limiter = limiter
        self._deadline = deadline

    def ask(self, request: Request) -> Answer:
        ask = self._asks.ask(request)
        if request.is_given_up:
            return self._call(ask, abandoned=partial(self._release, ask, request))
        return self._call(ask, must_leave=request.is_completed)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        self._call(self._asks.refund(receipts, cost, now), must_leave=True)

    def reset(self, key: Key | None) -> None:
        self._call(self._asks.reset(key), must_leave=True)

    def _call(
        self, ask: Ask[T], *, must_leave: bool = False, abandoned: Callable[[Any], None] | None = None
    ) -> T:
        request, due = ask.request, monotonic() + self._deadline
        if request is None:
            return ask.read(None)
        reply = self._engine.call(request, due, self._limiter, must_leave, abandoned)
        return read(self._name, ask, reply)

    def _release(self, ask: Ask[Answer], request: Request, reply: Any) -> None:
        """Give back what was held for a caller that has been interrupted meanwhile."""
        with_units = taken(self._asks, ask, request, reply)
        if with_units is not None and with_units.request is not None:
            self._engine.start(with_units.request, monotonic() + self._deadline, self._limiter)


class AsyncRemoteGate:
    """A limiter's rules, for tasks.

    A caller may be cancelled at any time. What it had asked for then counts as charged if it has been sent; a hold is
    released; and what has been used or is given back is sent.
    """

    def __init__(self, name: str, asks: Asks, engine: AsyncEngine, limiter: str, deadline: float) -> None:
        self._name = name
        self._asks = asks
        self._engine = engine
        self._limiter = limiter
        self._deadline = deadline

    async def ask(self, request: Request) -> Answer:
        ask = self._asks.ask(request)
        if ask.request is None:
            return ask.read(None)
        due = monotonic() + self._deadline
        if request.is_given_up:
            abandoned = partial(self._release, ask, request)
            reply = await self._engine.call(ask.request, due, self._limiter, abandoned)
        else:
            reply = await self._engine.start(ask.request, due, self._limiter, must_leave=request.is_completed)
        return read(self._name, ask, reply)

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        await self._call(self._asks.refund(receipts, cost, now))

    async def reset(self, key: Key | None) -> None:
        await self._call(self._asks.reset(key))

    async def _call(self, ask: Ask[None]) -> None:
        if ask.request is not None:
            due = monotonic() + self._deadline
            reply = await self._engine.start(ask.request, due, self._limiter, must_leave=True)
            read(self._name, ask, reply)

    def _release(self, ask: Ask[Answer], request: Request, reply: Any) -> None:
        """Give back what was held for a caller that has been cancelled meanwhile."""
        with_units = taken(self._asks, ask, request, reply)
        if with_units is not None and with_units.request is not None:
            due = monotonic() + self._deadline
            refund = self._engine.start(with_units.request, due, self._limiter, must_leave=True)
            refund.add_done_callback(mention_failure)


def read(name: str, ask: Ask[T], reply: Any) -> T:
    """Return what a reply says.

    Raises:
        HeadgateError: What the reply means if it is no answer; StoreConflict if it means nothing to us.
    """
    try:
        return ask.read(reply)
    except HeadgateError:  # some of which are a ValueError
        raise
    except FAILURES as error:
        raise StoreConflict(f"{name} has answered something that cannot be read: {reply!r:.80}") from error


def taken(asks: Asks, ask: Ask[Answer], request: Request, reply: Any) -> Ask[None] | None:
    """Return what gives back the units that the reply to a hold says were taken; `None` if there were none."""
    try:
        _, receipts = ask.read(reply)
        return None if receipts is None else asks.refund(receipts, request.cost, request.now)
    except Exception as error:  # noqa: BLE001  # nobody waits for this, so there is nobody to tell
        logger.warning("a hold whose caller has gone could not be released: %r", error)
        return None


def mention_failure(refund: asyncio.Future[Any]) -> None:
    """Log that units could not be given back for a caller that has gone: they count until they expire."""
    if not refund.cancelled() and (error := refund.exception()) is not None:
        logger.warning("a hold whose caller has gone could not be released: %s", error)
