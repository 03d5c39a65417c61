"""Calls from threads: each has a connection to itself while it lasts."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from headgate._fork import watch
from headgate.errors import StoreUnavailable
from headgate.stores.postgres.codec import Arguments, Reply, StateCall, many, numbers, one
from headgate.stores.postgres.endpoint import (
    CLEAN,
    FAILURES,
    MANY,
    ONE,
    Endpoint,
    Overdue,
    Wire,
    spares_connection,
)
from headgate.stores.postgres.janitor import Janitor

logger = logging.getLogger("headgate")


class Lines:
    """The connections of this process to one database.

    There are as many as there were calls at once, up to a bound; beyond it calls wait for one another. A connection that
    broke is not put back, and neither is one whose reply was not read: what comes next on it would be taken for the reply
    to another call.
    """

    def __init__(self, endpoint: Endpoint, most: int, durable: bool) -> None:
        self.endpoint = endpoint
        self._most = most
        self._durable = b"t" if durable else b"f"
        self._closed = False
        self._begin()
        watch(self)

    def call(self, request: StateCall, deadline: float) -> Reply:
        """Send a request, once, and return the numbers of the reply.

        Raises:
            StoreUnavailable: The database could not be reached, did not answer in time, or refused.
            StoreConflict: What it holds is not what is needed.
        """
        due = time.monotonic() + deadline
        try:
            wire = self._take(due)
            try:
                if request.is_single:
                    reply = numbers(wire.call(ONE, one(request, self._durable), due))
                else:
                    reply = numbers(wire.call(MANY, many((request,), self._durable), due))
                arguments = self._janitor.next(request.new_states(reply))
                usable = arguments is None or self._clean(wire, arguments, due)
            except BaseException as error:
                self._give_back(wire, spares_connection(error))
                raise
        except FAILURES as cause:
            raise self.endpoint.error(cause) from (None if isinstance(cause, Overdue) else cause)
        self._give_back(wire, usable)
        return reply

    def close(self) -> None:
        """Close all connections; calls that are under way end first."""
        self._closed = True
        for _ in range(self._most):
            with contextlib.suppress(IndexError):
                wire = self._places.pop(0)
                if wire is not None:
                    wire.close()
                self._free(None)

    @property
    def idle(self) -> list[Wire]:
        """The connections that nobody uses at the moment."""
        return [wire for wire in self._places if wire is not None]

    def _take(self, due: float) -> Wire:
        """Take a place, and connect if nobody did so there."""
        if self._closed:
            raise StoreUnavailable(f"{self.endpoint.name}: the store was closed")
        try:
            wire = self._places.pop()
        except IndexError:
            wire = self._wait_for_place(due)
        if wire is not None:
            if not wire.is_over():
                return wire
            wire.close()
        try:
            return self.endpoint.connect(due)
        except BaseException:
            self._free(None)
            raise

    def _wait_for_place(self, due: float) -> Wire | None:
        with self._freed:
            self._waiting += 1
            try:
                while True:
                    with contextlib.suppress(IndexError):
                        return self._places.pop()
                    if not self._freed.wait(max(0, due - time.monotonic())):
                        raise Overdue
            finally:
                self._waiting -= 1

    def _give_back(self, wire: Wire, usable: bool) -> None:
        if usable and not self._closed:
            self._free(wire)
        else:
            wire.close()
            self._free(None)

    def _free(self, place: Wire | None) -> None:
        # Taking and leaving a place are single steps of the interpreter, which need no lock. Who finds none first says
        # that it waits and then looks once more; so a place that is left in between is not missed.
        self._places.append(place)
        if self._waiting:
            with self._freed:
                self._freed.notify()

    def _clean(self, wire: Wire, arguments: Arguments, due: float) -> bool:
        """Clear away what has become fresh; false if the connection is of no use afterwards."""
        try:
            self._janitor.cleaned(wire.call(CLEAN, arguments, due))
        except FAILURES as error:
            # The call that came first has its answer, and another one will clean.
            logger.warning("%s", self.endpoint.error(error))
            return spares_connection(error)
        return True

    def _begin(self) -> None:
        self._places: list[Wire | None] = [None] * self._most
        self._freed = threading.Condition()
        self._waiting = 0
        self._janitor = Janitor()

    def after_fork_in_child(self) -> None:
        """Forget the parent's connections; libpq's wrapper does not close one in a process that did not open it."""
        self._begin()
