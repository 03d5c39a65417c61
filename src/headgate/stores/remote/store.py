"""The base of stores over a network."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from headgate.keys import PlainKey, note_key, storage_key
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
from headgate.stores.queues import AsyncQueues, QueueNames, Queues
from headgate.stores.remote._async.gate import AsyncRemoteGate
from headgate.stores.remote._async.queues import AsyncRemoteQueues
from headgate.stores.remote._sync.gate import RemoteGate
from headgate.stores.remote._sync.queues import RemoteQueues
from headgate.stores.remote.encoding import RequestEncoder
from headgate.stores.remote.listener import WakeListener


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


class RemoteStateStore(RemoteStore):
    """A network store with states of its own, and with notes (see `AsyncNotes`) and queues (see `Queues`).

    Attributes:
        namespace: Separates the states, notes and queues of several applications.
    """

    namespace: str
    _wake_ups: WakeListener

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

    def bind_queues(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Queues:
        """Return the queues of a limiter's waiting calls; their calls fail after `deadline` seconds."""
        parts = self._queue_parts(limiter, rules)
        return RemoteQueues(*parts, self._thread_engine(), deadline or self.deadline)

    def bind_queues_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncQueues:
        """Return the queues of a limiter's waiting calls; their calls fail after `deadline` seconds."""
        parts = self._queue_parts(limiter, rules)
        return AsyncRemoteQueues(*parts, self._task_engine(), deadline or self.deadline)

    def _queue_parts(self, limiter: str, rules: tuple[Rule, ...]) -> tuple[QueueNames, WakeListener, Any]:
        names = QueueNames(self.namespace, limiter, rules, self._name_state(limiter))
        return names, self._wake_ups, self._queue_request

    def close(self) -> None:
        """Close all connections; those of event loops as soon as these run."""
        super().close()
        self._wake_ups.close()

    async def aclose(self) -> None:
        """Close all connections; those of other event loops as soon as these run."""
        await super().aclose()
        self._wake_ups.close()

    def _name_state(self, limiter: str) -> Callable[[bytes, PlainKey], bytes]:
        """Return a function from the prefix of a rule and a key to the name of the state."""
        return storage_key

    @abstractmethod
    def _queue_request(self, queue: bytes, ticket: str, priority: int, lasting_us: int) -> Any:
        """Return the request that enters a queue or stays in it; with a lifetime of 0, it leaves.

        The reply is 1 if the ticket is first.
        """

    @abstractmethod
    def _note_request(self, key: bytes, text: bytes | None, lasting_us: int, replaced: bytes | None) -> Any:
        """Return the request that stores or reads a note."""
