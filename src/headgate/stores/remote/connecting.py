"""Connecting in a thread of its own: looking up a host, or a handshake, cannot be waited for with a deadline otherwise."""

from __future__ import annotations

import asyncio
import contextlib
from _thread import start_new_thread
from collections.abc import Callable
from typing import Generic, TypeVar

from headgate.stores.remote.peer import Wire

W = TypeVar("W", bound=Wire)


class Connecting(Generic[W]):
    """A connection that is being made.

    Args:
        connect: Makes it.
        on_over: Called, in that thread, when there is a connection or an error.

    Attributes:
        wire: The connection.
        error: Why there is none.

    Raises:
        RuntimeError: There can be no more threads.
    """

    def __init__(self, connect: Callable[[], W], on_over: Callable[[], object]) -> None:
        self.wire: W | None = None
        self.error: BaseException | None = None
        self._connect = connect
        self._on_over = on_over
        self._is_wanted = True
        # One call of the interpreter: a signal handler that raises inside of `Thread.start` leaves `threading` in disorder.
        start_new_thread(self._run, ())

    @property
    def is_over(self) -> bool:
        """Whether there is a connection or an error."""
        return self.wire is not None or self.error is not None

    def give_up(self) -> None:
        """Close the connection, now or when it is there."""
        self._is_wanted = False
        if self.wire is not None:
            self.wire.close()

    def _run(self) -> None:
        try:
            self.wire = self._connect()
        except BaseException as error:  # noqa: BLE001  # it is for those that wait
            self.error = error
        self._on_over()
        if not self._is_wanted and self.wire is not None:
            self.wire.close()


async def in_thread(connect: Callable[[], W]) -> W:
    """Return a connection that is made in a thread of its own; if the caller is cancelled, it is closed."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def set_over() -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(over.set)

    connecting = Connecting(connect, set_over)
    try:
        await over.wait()
    except BaseException:
        connecting.give_up()
        raise
    if connecting.wire is None:
        raise connecting.error or ConnectionAbortedError("there is no connection")
    return connecting.wire
