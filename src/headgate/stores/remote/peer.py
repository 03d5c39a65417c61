"""What a store brings to the engine: how to connect, what to send for some calls, and how to read what comes back."""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headgate.errors import StoreError

if TYPE_CHECKING:
    from headgate.stores.remote.batching import RemoteCall

Talk = Generator[Any, Any, Sequence["RemoteCall"]]
"""One batch on one connection. It yields a message, is sent the reply, and so on; it answers the calls itself, as soon as
their replies are there; and it returns those that are to leave once more, each alone, because nothing of them was done.

A reply with which the server refuses is sent in as an exception. What the talk raises makes the connection be given up.
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
"""What using a connection may raise for whatever reason, besides the exceptions of the peer's own library. Anything else
that is raised in a thread comes from a signal handler, and is for the code that it has interrupted."""

WRONG_TLS = (
    "certificate|private.key|pem.lib|unknown.ca|wrong.version.number|protocol.version|unsupported.protocol|"
    "alert.handshake.failure|application.protocol|without.alpn"
)
"""How TLS says that waiting does not help: certificates or their files do not fit, the server speaks another version, or
none. A pattern, because libraries write it in capitals with underscores or in plain words."""

INVALID_REPLY = "sent an invalid reply; check the scheme, host and port of the URL"
"""What to say when a server of another kind seems to listen there."""

PENDING: Any = object()
"""What `Wire.receive` returns while the reply is not there."""


class Wire(Protocol):
    """A connection for threads. Nothing waits here but `wait`."""

    def is_over(self) -> bool:
        """Tell whether the server has closed the connection, on which nothing is under way.

        To notice that before something is sent is not to send twice.
        """

    def send(self, message: Any) -> None:
        """Send a message; what the network does not take at once is sent by `receive`."""

    def wait(self, seconds: float) -> bool:
        """Wait until there is something to do for `receive`; false if nothing has come by then."""

    def receive(self) -> Any:
        """Return the reply, or `PENDING` if it has not come yet."""

    def close(self) -> None:
        """Hang up."""


class AsyncWire(Protocol):
    """A connection for tasks."""

    async def is_over(self) -> bool:
        """As `Wire.is_over`."""

    def send(self, message: Any) -> None:
        """Send a message; if the peer says so, also before the last one is answered."""

    async def receive(self) -> Any:
        """Return the next reply, in the order of the messages, however long it takes."""

    async def close(self) -> None:
        """Hang up, at once."""


class Peer(Protocol):
    """A server, as the engine sees it.

    Attributes:
        name: What it is called in messages; without credentials.
        lanes: How many connections there may be, per event loop and for all threads together.
        most: How many calls may leave together.
        failures: The exceptions of the library that it is reached by.
        most_bytes: How large they may be together, by `size`; `None` if that does not matter.
        follows: Whether tasks may send on a connection before the last batch is answered.
    """

    @property
    def name(self) -> str: ...
    @property
    def lanes(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def most_bytes(self) -> int | None: ...
    @property
    def follows(self) -> bool: ...
    @property
    def failures(self) -> tuple[type[Exception], ...]: ...

    def size(self, request: Any) -> int:
        """Return how many bytes a request is worth."""

    def talk(self, calls: Sequence[RemoteCall]) -> Talk:
        """Return what to send for some calls."""

    def connect(self, seconds: float) -> Wire:
        """Return a new connection for threads. It is called in a thread of its own.

        After so many seconds no caller waits for it any more, and it should end soon.
        """

    async def connect_async(self, seconds: float) -> AsyncWire:
        """Return a new connection for tasks. After so many seconds it is cancelled."""

    def failure(self, cause: BaseException) -> StoreError:
        """Return what it means to a caller that there is no reply; one for each caller. `TimeoutError` is silence."""

    def may_repeat(self, request: Any, cause: BaseException) -> bool:
        """Tell whether a request may be sent again after a connection was lost."""
