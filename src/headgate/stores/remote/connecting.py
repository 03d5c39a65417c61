"""Connecting in a dedicated thread: there is no other way to limit the time of a host lookup or a handshake."""

from __future__ import annotations

import asyncio
import contextlib
from _thread import start_new_thread
from collections.abc import Callable
from typing import Generic, TypeVar

from headgate.stores.remote.peer import Wire

W = TypeVar("W", bound=Wire)


class Connecting(Generic[W]):
    """A connection attempt in progress.

    Args:
        connect: Opens the connection.
        on_over: Called in that thread after success or failure.

    Attributes:
        wire: The connection.
        error: The reason of a failure.

    Raises:
        RuntimeError: No thread can be started.
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
        """Close the connection, now or as soon as it exists."""
        self._is_wanted = False
        if self.wire is not None:
            self.wire.close()

    def _run(self) -> None:
        try:
            self.wire = self._connect()
        except BaseException as error:  # noqa: BLE001  # waiting calls receive it
            self.error = error
        self._on_over()
        if not self._is_wanted and self.wire is not None:
            self.wire.close()


async def in_thread(connect: Callable[[], W]) -> W:
    """Connect in a dedicated thread and return the connection; close it if the caller is cancelled."""
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
