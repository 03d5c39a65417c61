"""The conformance kit: what every store must do, as tests that any store can run.

    class TestMyStore(StoreContract):
        def make_store(self) -> MyStore:
            return MyStore(self.folder / "counts")

A store that reads a clock which can be given to it is tested a second time with `own_time = True`, and is then made with
`clock=self.clock`. What the store's `guarantees` exclude is left out, and nothing else is.

The clock of the contract is a fake one, so the tests never wait. Nothing in here is for one store only.
"""

from __future__ import annotations

from headgate.testing.contract.features import FeatureRaceTests, FeatureTests
from headgate.testing.contract.holds import HoldTests
from headgate.testing.contract.keys import KeyTests
from headgate.testing.contract.notes import NoteTests
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
    ThreadRaceTests,
    FeatureRaceTests,
    ProcessRaceTests,
):
    """The conformance tests of a store. Subclass it and write `make_store`."""


class AsyncStoreContract(
    NoteTests, ReplayTests, TimeTests, HoldTests, KeyTests, FeatureTests, ProcessRaceTests
):
    """The conformance tests of an asynchronous store. Subclass it and write `make_store`, which returns an `AsyncStore`.

    It is the same contract: every call is awaited on an event loop, and the races are between tasks. A store that keeps
    notes (`AsyncNotes`) is held to these too.
    """
