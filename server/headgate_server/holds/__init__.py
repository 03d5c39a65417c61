"""Holds of the HTTP API: they outlive the request that took them, and any worker can settle them.

A hold is one record in the store that counts its units, under its id (`HoldRecord`). Every change of its state is one
atomic step: a worker replaces the record that it has read (`AsyncNotes.note` with `replaces=`). Of all workers that try,
also after a restart, one succeeds.

    open -> final                 settle or release: only the worker that replaced the record gives back or records
    open -> confirming -> final   confirm, admitted
    open -> confirming -> open    confirm, refused; or without a result after `CONFIRMING_US`, because its worker died

Renewing extends the leases and the lifetime of the record; it can be repeated.

A failure leaves units counted until they expire, and never gives back twice: a worker that is killed between two steps, a
store that fails there, a reply that gets lost. After a lost confirmation, the next one takes units in addition, because
nobody knows whether those of the hold were moved.

A hold that the failure policy admitted while the store was down has no record. Only the worker that took it knows it.
"""

from headgate_server.holds.book import (
    HoldBook,
    HoldResult,
    SettleResult,
    TooManyHolds,
    UnknownHold,
    UnknownLimiter,
)
from headgate_server.holds.record import HoldBusy, HoldsUnsupported

__all__ = [
    "HoldBook",
    "HoldBusy",
    "HoldResult",
    "HoldsUnsupported",
    "SettleResult",
    "TooManyHolds",
    "UnknownHold",
    "UnknownLimiter",
]
