"""Notes: one of several writers determines the text, and all of them receive that text."""

from __future__ import annotations

import asyncio
import secrets
from itertools import pairwise
from typing import Any

import pytest

from headgate import ConfigError
from headgate.stores.base import AsyncNotes
from headgate.testing.contract.blocking import BlockingStore
from headgate.testing.contract.keys import HOSTILE_KEYS
from headgate.testing.contract.races import PROCESSES, in_processes
from headgate.testing.contract.tasks import TASKS, TaskRaceTests

HOSTILE_TEXTS = tuple(key for key in HOSTILE_KEYS if isinstance(key, str))
BAD_SECONDS = (0, -1, float("nan"), float("inf"), 1e18)
BAD_TEXTS: tuple[Any, ...] = (None, b"a", 7)


class NoteTests(TaskRaceTests):
    """Skipped for a store that does not keep notes."""

    @pytest.fixture(autouse=True)
    def _begin_notes(self) -> None:
        self.prefix = secrets.token_hex(8)  # several tests may share one store

    def note(
        self,
        name: str,
        text: str,
        seconds: float = 60,
        store: BlockingStore | None = None,
        replaces: str | None = None,
    ) -> str:
        """Write a note, and return the stored text."""
        blocking = self.blocking if store is None else store
        return blocking.run(self._notes(blocking).note(self.prefix + name, text, seconds, replaces=replaces))

    def get_note(self, name: str, store: BlockingStore | None = None) -> str | None:
        """Return the stored text."""
        blocking = self.blocking if store is None else store
        return blocking.run(self._notes(blocking).get_note(self.prefix + name))

    def _notes(self, blocking: BlockingStore) -> AsyncNotes:
        notes = blocking.store.notes
        if notes is None:
            pytest.skip("this store does not keep notes")
        return notes

    def test_the_first_note_is_kept(self) -> None:
        assert self.get_note("a") is None
        assert self.note("a", "first") == "first"
        assert self.note("a", "second") == "first"
        assert self.get_note("a") == "first"

    def test_the_same_note_can_be_stored_again(self) -> None:
        assert [self.note("a", "same") for _ in range(3)] == ["same"] * 3

    def test_only_the_named_text_is_replaced(self) -> None:
        assert self.note("a", "first") == "first"
        assert self.note("a", "third", replaces="second") == "first"
        assert self.note("a", "second", replaces="first") == "second"
        assert self.note("a", "third", replaces="first") == "second"
        assert self.get_note("a") == "second"

    def test_a_repeated_replacement_succeeds(self) -> None:
        assert self.note("a", "first") == "first"
        assert [self.note("a", "second", replaces="first") for _ in range(3)] == ["second"] * 3

    def test_a_replacement_of_a_missing_note_is_stored(self) -> None:
        assert self.note("a", "second", replaces="first") == "second"
        assert self.get_note("a") == "second"

    def test_any_text_may_be_replaced_by_any_other(self) -> None:
        for number, (old, new) in enumerate(pairwise(("", *HOSTILE_TEXTS, ""))):
            assert self.note(str(number), old) == old
            assert self.note(str(number), new, replaces=old) == new

    def test_a_replaced_note_keeps_the_longer_lifetime(self) -> None:
        if not self.own_time or self.blocking.store.remote:
            pytest.skip("notes of this store do not expire by the clock of this test")
        assert self.note("a", "first", 10) == "first"
        assert self.note("a", "second", 5, replaces="first") == "second"
        self.clock.advance_us(9_999_999)
        assert self.note("a", "third", 10, replaces="second") == "third"
        self.clock.advance_us(9_999_999)
        assert self.get_note("a") == "third"
        self.clock.advance_us(1)
        assert self.get_note("a") is None

    def test_one_of_many_concurrent_replacements_succeeds(self) -> None:
        notes = self._notes(self.blocking)
        assert self.note("race", "first") == "first"

        async def race() -> list[str]:
            name = self.prefix + "race"
            calls = (notes.note(name, str(number), 60, replaces="first") for number in range(TASKS))
            return await asyncio.gather(*calls)

        texts = self.blocking.run(race())
        assert len(set(texts)) == 1
        assert texts[0] != "first"
        assert self.get_note("race") == texts[0]

    def test_storing_the_same_note_again_extends_its_lifetime(self) -> None:
        if not self.own_time or self.blocking.store.remote:
            pytest.skip("notes of this store do not expire by the clock of this test")
        for seconds in (10, 20, 1):
            assert self.note("a", "same", seconds) == "same"
            self.clock.advance_us(5_000_000)
        assert self.note("a", "other", 60) == "same"
        self.clock.advance_us(9_999_999)
        assert self.get_note("a") == "same"
        self.clock.advance_us(1)
        assert self.get_note("a") is None

    def test_every_name_has_a_separate_note(self) -> None:
        for number, name in enumerate(HOSTILE_TEXTS):
            assert self.note(name, str(number)) == str(number)
        assert [self.get_note(name) for name in HOSTILE_TEXTS] == [str(n) for n in range(len(HOSTILE_TEXTS))]

    def test_any_text_is_returned_unchanged(self) -> None:
        for number, text in enumerate(HOSTILE_TEXTS):
            assert self.note(str(number), text) == text
        assert [self.get_note(str(number)) for number in range(len(HOSTILE_TEXTS))] == list(HOSTILE_TEXTS)

    def test_notes_and_counts_are_independent(self) -> None:
        limiter = self.limiter(self.rule(self.kinds[0], 5), name=self.prefix)
        limiter.hit("a", 2)
        assert self.note("a", "kept") == "kept"
        assert limiter.check("a", 0).remaining == 3
        limiter.reset("a")
        assert self.get_note("a") == "kept"

    def test_a_note_is_seen_by_another_store_and_after_a_restart(self) -> None:
        self.require("shared")
        assert self.note("a", "first") == "first"
        other = self.open_store()
        assert isinstance(other, BlockingStore)
        try:
            assert self.get_note("a", store=other) == "first"
            assert self.note("a", "second", store=other) == "first"
        finally:
            other.close()

    def test_a_note_is_seen_from_another_event_loop(self) -> None:
        assert self.note("a", "first") == "first"
        self.blocking.change_loop()
        assert self.note("a", "second") == "first"

    def test_tasks_that_race_all_get_the_same_note(self) -> None:
        notes = self._notes(self.blocking)

        async def race() -> list[str]:
            name = self.prefix + "race"
            return await asyncio.gather(*(notes.note(name, str(number), 60) for number in range(TASKS)))

        texts = self.blocking.run(race())
        assert len(set(texts)) == 1
        assert texts[0] in {str(number) for number in range(TASKS)}
        assert self.get_note("race") == texts[0]

    def test_processes_that_race_all_get_the_same_note(self) -> None:
        """Some processes use a store that was created before they were forked."""
        self.require("shared")
        rounds = 25
        inherited = self.blocking
        self._notes(inherited)

        def race(number: int) -> int:
            store = inherited if number % 2 else self.open_store()
            assert isinstance(store, BlockingStore)
            try:
                texts = [int(self.note(f"race {i}", str(number), store=store)) for i in range(rounds)]
            finally:
                if store is not inherited:
                    store.close()
            return sum(PROCESSES**place * winner for place, winner in enumerate(texts))

        texts = in_processes(PROCESSES, race)
        assert len(set(texts)) == 1
        stands = [int(self.get_note(f"race {i}") or -1) for i in range(rounds)]
        assert sum(PROCESSES**place * winner for place, winner in enumerate(stands)) == texts[0]

    def test_cancelled_callers_leave_one_note(self) -> None:
        notes = self._notes(self.blocking)

        async def race() -> list[str]:
            name = self.prefix + "cancelled"
            racers = [asyncio.ensure_future(notes.note(name, str(number), 60)) for number in range(32)]
            await asyncio.sleep(0)
            for racer in racers[::2]:
                racer.cancel()
            texts = await asyncio.gather(*racers, return_exceptions=True)
            return [answer for answer in texts if isinstance(answer, str)]

        texts = self.blocking.run(race())
        assert set(texts) == {self.note("cancelled", "too late")}

    def test_a_note_is_kept_for_its_lifetime(self) -> None:
        if not self.own_time or self.blocking.store.remote:
            pytest.skip("notes of this store do not expire by the clock of this test")
        assert self.note("a", "first", 10) == "first"
        self.clock.advance_us(9_999_999)
        assert self.note("a", "second", 10) == "first"
        assert self.get_note("a") == "first"
        self.clock.advance_us(1)
        assert self.get_note("a") is None
        assert self.note("a", "second", 10) == "second"
        self.clock.advance_us(9_999_999)
        assert self.get_note("a") == "second"

    def test_invalid_notes_are_refused(self) -> None:
        for seconds in BAD_SECONDS:
            with pytest.raises(ConfigError):
                self.note("a", "text", seconds)
        notes = self._notes(self.blocking)
        for bad in BAD_TEXTS:
            with pytest.raises(ConfigError):
                self.blocking.run(notes.note("a", bad, 60))
            with pytest.raises(ConfigError):
                self.blocking.run(notes.note(bad, "text", 60))
        assert self.get_note("a") is None
