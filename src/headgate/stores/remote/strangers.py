"""Which kind of server answers where a store looks for its own; asked while that one has never answered.

A server of another kind may hang up without a word, or wait for ever for the rest of what it was sent. Both look like an
outage, and are none: waiting does not help. So what fails, or takes half of its time, before the store has ever worked is
followed by a few questions, each on a connection of its own: a line of text, the first bytes of PostgreSQL's protocol, and
those of TLS. Nearly every server says something to one of them, and that is enough to know it. One that should speak TLS,
and does, is asked the line of text once more within TLS.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from _thread import start_new_thread
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import TypeVar

from headgate.errors import StoreMisconfigured
from headgate.stores.remote.baton import Baton
from headgate.stores.remote.connecting import event_and_setter

T = TypeVar("T")

Address = tuple[str, int]

REDIS, WEB = "a Redis server without TLS", "a web server without TLS"
REDIS_TLS, WEB_TLS = "a Redis server with TLS", "a web server with TLS"
POSTGRES, PLAIN_POSTGRES = "a PostgreSQL server", "a PostgreSQL server without TLS"
TLS = "a server that speaks TLS"

_ANSWERS = {
    REDIS: rb"\+PONG|-[A-Z]",
    POSTGRES: rb"S\Z|E(?!RROR)",  # that it speaks TLS, or an error; not that of memcached
    PLAIN_POSTGRES: rb"N\Z",
    WEB: rb"HTTP/|<",
    TLS: rb"[\x15\x16]\x03",
    "an SSH server": rb"SSH-",
    "a mail server": rb"220[ -]",
}


_WITHIN_TLS = {REDIS: REDIS_TLS, WEB: WEB_TLS}
_LINE = b"PING\r\n\r\n"

ENOUGH = 8
"""How many bytes are enough to know each of them, or that it is none of them. A slow server may say less at first."""

PATIENT_SHARE = 0.5
"""How much of its time an attempt has before anybody doubts."""


class Doubt:
    """Whether a server is of the kind that its URL says, as long as it has not proved that.

    Args:
        address: Where it is; `None` if it cannot be asked.
        own: The kinds that it may be.
    """

    def __init__(self, address: Address | None, *own: str) -> None:
        self.is_settled = address is None
        self.address = address or ("", 0)
        self.own = own
        self.stranger: str | None = None

    def settle(self, attempt: Callable[[], T], seconds: float) -> T:
        """Return what an attempt to reach the server brings; if it fails, not before it is known who answers there."""
        if self.is_settled:
            return attempt()
        over = Baton()
        inquiry = _Inquiry(self, seconds, over.set)
        try:
            result = attempt()
        except BaseException:
            inquiry.hurry()
            over.wait(seconds)
            raise
        inquiry.cancel()
        return result

    async def settle_async(self, attempt: Awaitable[T], seconds: float) -> T:
        """As `settle`, for coroutines."""
        if self.is_settled:
            return await attempt
        over, set_over = event_and_setter()
        inquiry = _Inquiry(self, seconds, set_over)
        try:
            result = await attempt
        except Exception:  # not if it is cancelled: then no caller waits to know why
            inquiry.hurry()
            await over.wait()
            raise
        inquiry.cancel()
        return result

    def explain(self, name: str) -> StoreMisconfigured | None:
        """Return what a failure means if another kind of server is to blame."""
        if self.is_settled or self.stranger is None:
            return None
        return StoreMisconfigured(
            f"{name}: {self.stranger} answers there; check the scheme, host and port of the URL"
        )


class _Inquiry:
    """A thread that asks who is there when an attempt has failed, or when half of its time is over."""

    def __init__(self, doubt: Doubt, seconds: float, on_over: Callable[[], object]) -> None:
        self._doubt = doubt
        self._due = monotonic() + seconds
        self._pause = PATIENT_SHARE * seconds
        self._needed = Baton()
        self._on_over = on_over
        try:
            start_new_thread(self._run, ())
        except RuntimeError:  # there can be no more threads
            on_over()

    def hurry(self) -> None:
        """Have it ask at once."""
        self._needed.set()

    def cancel(self) -> None:
        """Take note that the server is the right one."""
        self._doubt.is_settled = True
        self._needed.set()

    def _run(self) -> None:
        self._needed.wait(self._pause)
        try:
            if not self._doubt.is_settled:
                self._doubt.stranger = stranger_at(self._doubt.address, self._doubt.own, self._due)
        finally:
            self._on_over()


def stranger_at(address: Address, own: Sequence[str], due: float) -> str | None:
    """Return what answers at an address until then if it is none of these kinds; `None` if nothing else does."""
    questions = {REDIS: _LINE, POSTGRES: b"\0\0\0\x08\x04\xd2\x16\x2f", TLS: _client_hello()}
    # The right server may just be slow: it should not have to log that somebody talks nonsense.
    ordered = sorted(questions, key=lambda kind: kind not in own)
    for left, kind in zip(range(len(ordered), 0, -1), ordered, strict=True):
        answer = _answer(address, questions[kind], (due - monotonic()) / left)
        if answer:
            found = _named(answer)
            if found == TLS and TLS in own:
                # Half of the time is left to say why the attempt itself has failed, as with a wrong certificate.
                answer = _answer(address, _LINE, (due - monotonic()) / 2, within_tls=True)
                if answer:
                    found = _named(answer)
                    found = _WITHIN_TLS.get(found, found)
            return None if found in own else found
    return None


def _named(answer: bytes) -> str:
    return _kind_of(answer) or f"something that says {answer[:40]!r}"


def _kind_of(answer: bytes) -> str | None:
    return next((kind for kind, pattern in _ANSWERS.items() if re.match(pattern, answer)), None)


def _answer(address: Address, question: bytes, seconds: float, *, within_tls: bool = False) -> bytes:
    """Return the beginning of what a server says to a question; nothing if it says nothing, or too little to know it."""
    with (
        contextlib.suppress(OSError, UnicodeError),  # the latter for a host that cannot have a name
        socket.create_connection(address, timeout=max(seconds, 0.001)) as plain,
        _unverified().wrap_socket(plain, server_hostname=address[0]) if within_tls else plain as asked,
    ):
        asked.sendall(question)
        answer = b""
        while more := asked.recv(64):
            answer += more
            if _kind_of(answer) or b"\n" in answer or len(answer) >= ENOUGH:
                break
        return answer
    return b""


def _client_hello() -> bytes:
    """Return the first bytes of a client that speaks TLS."""
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        _unverified().wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def _unverified() -> ssl.SSLContext:
    """Return how to speak TLS with anyone; nothing is sent that a stranger may not read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
