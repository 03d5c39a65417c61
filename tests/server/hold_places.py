"""Types of stores, and a shortcut, for the tests of holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headgate.costs import Cost
from headgate.keys import Key
from headgate.stores.base import AsyncNotes, AsyncStore
from headgate_server.holds import HoldBook

PATIENT = 30.0
"""Deadline in seconds, for a busy machine."""


class NotingStore(AsyncStore, AsyncNotes, Protocol):
    """A store that keeps notes."""


OpenStore = Callable[[], NotingStore]
"""Opens a store; all that it opens count together."""


async def take(book: HoldBook, key: Key | None = "alice", cost: Cost = 800, *more: Any) -> str:
    """Take a hold from the limiter `llm`, and return its id."""
    hold_id = (await book.take("llm", key, cost, *more)).hold
    assert hold_id is not None
    return hold_id
