"""The parts of the kit in which a variant of a store can differ from the variant that runs all of it.

A variant has the same script, statements or functions, so it makes the same decisions; random traces detect arguments and
answers that it loses. It has its own races, notes and event loops.
"""

from __future__ import annotations

from headgate.testing.contract.features import FeatureRaceTests
from headgate.testing.contract.notes import NoteTests
from headgate.testing.contract.races import ProcessRaceTests, ThreadRaceTests
from headgate.testing.contract.replay import ReplayTests


class BlockingVariant(ReplayTests, ThreadRaceTests, FeatureRaceTests, ProcessRaceTests):
    """Another clock, server or way to connect, for threads and processes."""

    test_a_full_log_is_answered_like_the_pure_functions = None


class TaskVariant(NoteTests, ReplayTests, ProcessRaceTests):
    """The asynchronous side of a store, for tasks and processes."""

    test_vectors_are_answered_to_the_microsecond = None
    test_a_full_log_is_answered_like_the_pure_functions = None
