"""Notes of a store, read and written through the breaker of the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

from headgate import StoreUnavailable
from headgate.outage import AsyncCircuit, breaker_of
from headgate.stores import AsyncNotes

T = TypeVar("T")

PAUSES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Seconds between attempts to read the result of another call."""


async def write_note(
    notes: AsyncNotes, name: str, text: str, seconds: float, replaces: str | None = None
) -> str:
    """Write a note, like `AsyncNotes.note`; try again once if the outcome is unknown."""

    async def write() -> str:
        try:
            return await notes.note(name, text, seconds, replaces=replaces)
        except StoreUnavailable:
            return await notes.note(name, text, seconds, replaces=replaces)

    return await _call(notes, write, writes=True)


async def read_note(notes: AsyncNotes, name: str) -> str | None:
    """Return the text of a note, like `AsyncNotes.get_note`."""
    return await _call(notes, lambda: notes.get_note(name), writes=False)


async def _call(notes: AsyncNotes, function: Callable[[], Awaitable[T]], *, writes: bool) -> T:
    """Call a store, unless its breaker is open."""
    if not notes.remote:
        return await function()
    return await _circuit_of(notes).call(writes, function)


_circuits: WeakKeyDictionary[AsyncNotes, AsyncCircuit] = WeakKeyDictionary()


def _circuit_of(notes: AsyncNotes) -> AsyncCircuit:
    """Return the circuit of a store; it lives as long as the store, because it sends the probes."""
    circuit = _circuits.get(notes)
    if circuit is None:
        reference = ref(notes)  # a strong reference would keep the store in the dictionary for ever

        async def probe() -> None:
            store = reference()
            if store is not None:
                if getattr(store, "is_closed", False):
                    breaker_of(store).stop()
                await store.get_note("headgate.ping")

        circuit = _circuits[notes] = AsyncCircuit(breaker_of(notes), probe)
    return circuit
