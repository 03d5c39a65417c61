"""The interface between a store and the engine: connections, messages and replies."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headgate.errors import StoreError

if TYPE_CHECKING:
    from headgate.stores.remote.batching import RemoteCall

Conversation = Generator[Any, Any, Sequence["RemoteCall"]]
"""The messages about one batch on one connection. A generator without I/O: it yields a message and is sent the reply, until
it returns. It answers the calls itself, as soon as their replies are there, and returns those to send again, each alone,
because the server did nothing for them.

An error reply of the server is sent in as an exception object. An exception that the generator raises closes the
connection.
"""

FAILURES = (
    OSError,
    EOFError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""Exceptions that using a connection may raise, besides those of the peer's library. Any other exception in a thread comes
from a signal handler, and belongs to the code that it interrupted."""

WRONG_TLS = (
    "certificate|private.key|pem.lib|unknown.ca|wrong.version.number|protocol.version|unsupported.protocol|"
    "alert.handshake.failure|application.protocol|without.alpn"
)
"""TLS errors for which waiting does not help: certificates or their files do not fit, or the server uses another
version or no TLS. A pattern, because libraries write them in capitals with underscores or in plain words."""

INVALID_REPLY = "sent an invalid reply; check the scheme, host and port of the URL"
"""The message if a server of another kind seems to listen there."""

ALONE = float("inf")
"""The share of a request that is sent alone."""

PENDING: Any = object()
"""The result of `Wire.receive` while the reply has not arrived."""


class Wire(Protocol):
    """A connection for threads. Only `wait` blocks."""

    def is_over(self) -> bool:
        """Return whether the server closed the idle connection; called before sending, so that nothing is sent twice."""

    def send(self, message: Any) -> None:
        """Send a message; `receive` sends the part that the network does not accept at once."""

    def wait(self, seconds: float) -> bool:
        """Wait until `receive` has something to do; return false if nothing arrived within `seconds`."""

    def receive(self) -> Any:
        """Return the reply, or `PENDING` if it has not arrived completely."""

    def close(self) -> None:
        """Close the connection."""


class Receiver(Protocol):
    """Receives the events of a connection for tasks; called in the event loop."""

    def receive(self, reply: Any) -> None:
        """Process the next reply, in the order of the messages."""

    def lose(self, cause: BaseException) -> None:
        """Close the connection, which failed or was closed by the server."""


class AsyncWire(Protocol):
    """A connection for tasks. It calls its `Receiver` until it is closed."""

    def is_over(self) -> bool:
        """Like `Wire.is_over`."""

    def send(self, message: Any) -> None:
        """Send a message; if the peer `follows`, also before the previous one is answered."""

    def close(self) -> None:
        """Close the connection, without waiting for the server."""

    async def wait_closed(self) -> None:
        """Wait until a closed connection has freed its resources in this process."""

    def abandon(self) -> None:
        """Stop the tasks of the connection, whose event loop was closed: nothing will run them again."""


def abandon_task(task: asyncio.Task[Any] | None) -> None:
    """Stop a task whose event loop was closed, without warnings about a pending task or a coroutine never awaited."""
    if task is not None:
        coroutine: Any = task.get_coro()
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # there is no public way to do this
        with contextlib.suppress(RuntimeError):  # it would have to wait
            coroutine.close()


class Peer(Protocol):
    """The engine's interface to a server.

    Attributes:
        name: Its name in messages, without credentials.
        failures: The exceptions of its client library.
        follows: Whether tasks may send a batch before the previous one is answered.
    """

    @property
    def name(self) -> str: ...
    @property
    def follows(self) -> bool: ...
    @property
    def failures(self) -> tuple[type[Exception], ...]: ...

    def share(self, request: Any) -> float:
        """Return the share of a batch that a request takes: 0 if any number of them fits, `ALONE` if it is sent alone."""

    def converse(self, calls: Sequence[RemoteCall]) -> Conversation:
        """Return the conversation about a batch of calls."""

    def connect(self, seconds: float) -> Wire:
        """Return a new connection for threads; called in a dedicated thread. No caller waits for it after `seconds`."""

    async def connect_async(self, seconds: float, receiver: Receiver) -> AsyncWire:
        """Return a new connection for tasks. The caller cancels it soon after `seconds`."""

    def failure(self, cause: BaseException) -> StoreError:
        """Return a new error for a call without a reply. `TimeoutError` means silence."""

    def may_repeat(self, request: Any, cause: BaseException) -> bool:
        """Return whether a request may be sent again after a connection was lost."""
