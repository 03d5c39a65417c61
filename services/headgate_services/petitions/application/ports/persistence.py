"""What is kept, apart from the counters: petitions, the ledger of events, and whether the system is halted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from headgate_services.petitions.domain.models import CoSign, Draft, Petition, PetitionState


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """Something that happened and must be provable later.

    Attributes:
        type: Three lower-case words: branch, noun and verb.
        actor_id: Who did it.
        trace_id: By what id it can be found in the logs.
        payload: What exactly happened.
    """

    type: str
    actor_id: str
    trace_id: str
    payload: Mapping[str, Any]


class UnitOfWorkPort(Protocol):
    """Makes several writes one."""

    def transaction(self) -> AbstractAsyncContextManager[object]:
        """Open a transaction that everything inside the block takes part in: all of it is kept, or nothing.

        Raises `CommitUnknownError` at the end if it is unknown which of the two it is.
        """


class PetitionRepositoryPort(Protocol):
    """Keeps petitions."""

    async def save(self, draft: Draft) -> Petition:
        """Keep a new petition."""

    async def get(self, petition_id: UUID, *, for_update: bool = False) -> Petition | None:
        """Return a petition; `for_update` locks it until the transaction ends."""

    async def change(self, petition_id: UUID, state: PetitionState, fate_reason: str) -> Petition:
        """Give a petition another state, and say why."""


class CoSignRepositoryPort(Protocol):
    """Keeps co-signs."""

    async def add(self, petition_id: UUID, signer_id: UUID) -> CoSign | None:
        """Keep a co-sign; `None` if this identity has co-signed the petition."""


class EventLedgerPort(Protocol):
    """Keeps events for ever, in order."""

    async def append(self, event: LedgerEvent) -> int:
        """Write an event and return its number."""

    async def append_unless_halted(self, event: LedgerEvent) -> int | None:
        """Write an event and return its number; write nothing and return `None` while the system is halted."""

    async def last_sequence(self) -> int:
        """Return the number of the latest event; 0 if there is none."""


class HaltStatePort(Protocol):
    """Knows whether anything may be written."""

    async def get_reason(self) -> str | None:
        """Return why the system is halted; `None` if it is not."""

    async def halt(self, reason: str) -> None:
        """Let nothing more be written."""

    async def resume(self) -> None:
        """Let things be written again."""
