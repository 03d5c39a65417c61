"""What stores over a network have in common."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from headgate.keys import note_key
from headgate.rules import Rule
from headgate.stores.base import (
    AsyncGate,
    AsyncNotes,
    Closing,
    Gate,
    check_deadline,
    check_note,
    note_bytes,
    note_text,
)
from headgate.stores.remote._async.gate import AsyncRemoteGate
from headgate.stores.remote._sync.gate import RemoteGate
from headgate.stores.remote.encoding import RequestEncoder


class RemoteStore(Closing):
    """A network store: its engines for threads and for tasks.

    Attributes:
        is_closed: Whether it was closed.
        deadline: Seconds after which a call fails with `StoreUnavailable`.
    """

    remote = True
    has_rules = False
    is_closed = False
    deadline: float

    endpoint: Any
    _threads: Any
    _tasks: Any

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        """Return the gate of these rules; its calls fail after `deadline` seconds."""
        seconds = self.deadline if deadline is None else check_deadline(deadline)
        return RemoteGate(self.endpoint.name, self._encoder(limiter, rules), self._thread_engine(), seconds)

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        """Return the gate of these rules; its calls fail after `deadline` seconds."""
        seconds = self.deadline if deadline is None else check_deadline(deadline)
        return AsyncRemoteGate(
            self.endpoint.name, self._encoder(limiter, rules), self._task_engine(), seconds
        )

    def close(self) -> None:
        """Close all connections; those of event loops as soon as these run."""
        self.is_closed = True
        self._threads.close()
        self._tasks.close()

    async def aclose(self) -> None:
        """Close all connections; those of other event loops as soon as these run."""
        self.is_closed = True
        await self._tasks.aclose()
        self._threads.close()

    @abstractmethod
    def _encoder(self, limiter: str, rules: tuple[Rule, ...]) -> RequestEncoder:
        """Return the encoder of a limiter's calls."""

    def _thread_engine(self) -> Any:
        """Return the engine of a gate for threads.

        Raises:
            ConfigError: The store cannot be used by threads.
        """
        return self._threads

    def _task_engine(self) -> Any:
        """Like `_thread_engine`, for coroutines."""
        return self._tasks

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.endpoint.name}>"


class RemoteNoteStore(RemoteStore):
    """A network store that keeps notes; see `AsyncNotes`.

    Attributes:
        namespace: Separates the states and notes of several applications.
    """

    namespace: str

    @property
    def notes(self) -> AsyncNotes:
        """The store itself keeps notes."""
        return self

    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        """See `AsyncNotes.note`. The server's clock is used, even if the store has a `clock`."""
        lasting = check_note(name, text, seconds, replaces)
        replaced = None if replaces is None else note_bytes(replaces)
        return note_text(await self._send_note(name, note_bytes(text), lasting, replaced))

    async def get_note(self, name: str) -> str | None:
        """See `AsyncNotes.get_note`."""
        kept = await self._send_note(name)
        return None if kept is None else note_text(kept)

    async def _send_note(
        self, name: str, text: bytes | None = None, lasting_us: int = 0, replaced: bytes | None = None
    ) -> Any:
        """Store a note, or read it if the text is `None`; return the stored one."""
        request = self._note_request(note_key(self.namespace, name), text, lasting_us, replaced)
        return await self._task_engine().call(request, time.monotonic() + self.deadline)

    @abstractmethod
    def _note_request(self, key: bytes, text: bytes | None, lasting_us: int, replaced: bytes | None) -> Any:
        """Return the request that stores or reads a note."""
