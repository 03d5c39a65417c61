"""The conformance kit: the requirements on every store, as tests that any store can run.

    class TestMyStore(StoreContract):
        def make_store(self) -> MyStore:
            return MyStore(self.folder / "counts")

If the store accepts a clock, test it a second time with `own_time = True`, and create it with `clock=self.clock`. Tests of
guarantees that the store does not declare are skipped; all others run.

The kit uses a fake clock, so the tests never wait. It contains nothing specific to one store.
"""

from __future__ import annotations

from headgate.testing.contract.features import FeatureRaceTests, FeatureTests
from headgate.testing.contract.holds import HoldTests
from headgate.testing.contract.keys import KeyTests
from headgate.testing.contract.notes import NoteTests
from headgate.testing.contract.penalties import PenaltyRaceTests, PenaltyTests
from headgate.testing.contract.races import ProcessRaceTests, ThreadRaceTests
from headgate.testing.contract.replay import ReplayTests
from headgate.testing.contract.times import TimeTests

__all__ = ["AsyncStoreContract", "StoreContract"]


class StoreContract(
    ReplayTests,
    TimeTests,
    HoldTests,
    KeyTests,
    FeatureTests,
    PenaltyTests,
    ThreadRaceTests,
    FeatureRaceTests,
    PenaltyRaceTests,
    ProcessRaceTests,
):
    """The conformance tests of a store. Subclass it and define `make_store`."""


class AsyncStoreContract(
    NoteTests, ReplayTests, TimeTests, HoldTests, KeyTests, FeatureTests, PenaltyTests, ProcessRaceTests
):
    """The conformance tests of an asynchronous store. Subclass it and define `make_store`, which returns an `AsyncStore`.

    The contract is the same: every call is awaited on an event loop, and the races are between tasks. If the store keeps
    notes (`AsyncNotes`), they are tested too.
    """
