"""Tests of the schedule of cleanups, also after a fork."""

from __future__ import annotations

from headgate.stores.postgres.janitor import Janitor
from tests.unit.processes import forking, in_child


@forking
def test_a_fork_during_counting_releases_the_lock_in_the_child() -> None:
    janitor = Janitor()
    with janitor._lock:
        assert in_child(lambda: janitor.next(1) is None)
