"""Tests of the kit itself: it finds broken stores, and imports its dependencies only when it is used."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import Phase, settings

from headgate import CostTooHigh, MemoryStore, Rule
from headgate.costs import Costs
from headgate.keys import Key
from headgate.stores.base import Answer, Gate, Receipts
from headgate.stores.request import Request
from headgate.testing import AsyncStoreContract, FakeClock, ReferenceStore, StoreContract
from headgate.testing.contract.traces import START_US


class Bound(NamedTuple):
    """The arguments of `bind` of a reference gate."""

    store: ReferenceStore
    limiter: str
    rules: tuple[Rule, ...]


class Defect:
    """A correct gate; each subclass has one defect."""

    def __init__(self, gate: Gate, bound: Bound) -> None:
        self.gate = gate
        self.bound = bound

    def decide(self, request: Request) -> Answer:
        return self.gate.decide(request)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        self.gate.refund(receipts, cost, now)

    def reset(self, key: Key | None) -> None:
        self.gate.reset(key)


def broken_contract(defect: type[Defect], folder: Path) -> StoreContract:
    """Return the contract of a store with one defect."""

    class BrokenStore(ReferenceStore):
        def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
            return defect(super().bind(limiter, rules), Bound(self, limiter, rules))

    class Broken(StoreContract):
        def make_store(self) -> ReferenceStore:
            return BrokenStore()

    contract = Broken()
    contract.clock, contract.folder = FakeClock(START_US / 1_000_000), folder
    return contract


def test_the_fake_clock_needs_neither_pytest_nor_hypothesis() -> None:
    code = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "from headgate.testing import FakeClock; FakeClock().advance(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_raises_attribute_error() -> None:
    import headgate.testing

    with pytest.raises(AttributeError, match="StoreKontract"):
        headgate.testing.StoreKontract  # noqa: B018


# --- Broken stores ----------------------------------------------------------------------------------------------------


class ChargesRefusals(Defect):
    def decide(self, request: Request) -> Answer:
        answer = super().decide(request)
        if request.operation == "hit" and not answer[0]:
            self.gate.decide(recording(request))
        return answer


class ChargesOneRuleOfSeveral(Defect):
    def decide(self, request: Request) -> Answer:
        answer = super().decide(request)
        if request.operation == "hit" and not answer[0]:
            first = ReferenceStore.bind(self.bound.store, self.bound.limiter, self.bound.rules[:1])
            first.decide(recording(request))
        return answer


class AdmitsAMicrosecondEarly(Defect):
    def decide(self, request: Request) -> Answer:
        if request.operation == "hit" and request.now:
            request = Request(request.operation, request.key, request.cost, request.tier, request.now + 1)
        return super().decide(request)


class TakesBytesForText(Defect):
    def decide(self, request: Request) -> Answer:
        if request.operation == "record" and isinstance(request.key, bytes):
            request = request.for_key(request.key.decode("latin-1"), request.tier)
        return super().decide(request)


class GivesBackWhatWasReset(Defect):
    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        states = self.bound.store.states
        for place, (birth, *_) in receipts:
            state, fresh_at = states[place]
            states[place] = (birth, *state[1:]), fresh_at
        super().refund(receipts, cost, now)


class ForgetsAMicrosecondEarly(Defect):
    def decide(self, request: Request) -> Answer:
        states = self.bound.store.states
        for place, (_, fresh_at) in list(states.items()):
            if request.operation == "peek" and fresh_at - 1 <= (request.now or 0):
                del states[place]
        return super().decide(request)


class WritesWhenLooking(Defect):
    def decide(self, request: Request) -> Answer:
        if request.operation == "peek":
            request = Request("hit", request.key, request.cost, request.tier, request.now)
        return super().decide(request)


class ChargesEveryRuleTheFirstCost(Defect):
    def decide(self, request: Request) -> Answer:
        cost = request.cost[0] if isinstance(request.cost, tuple) else request.cost
        return super().decide(Request(request.operation, request.key, cost, request.tier, request.now))


class GivesBackTheSameOfEveryRule(Defect):
    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        super().refund(receipts, max(cost) if isinstance(cost, tuple) else cost, now)


class MovesWithoutGivingBack(Defect):
    def decide(self, request: Request) -> Answer:
        return super().decide(request.replacing(None))


class GivesBackBeforeItKnows(Defect):
    def decide(self, request: Request) -> Answer:
        if request.replaces is not None:
            super().refund(request.replaces, 2**53 - 1, request.now)
        return super().decide(request.replacing(None))


class IgnoresQuotas(Defect):
    def decide(self, request: Request) -> Answer:
        return super().decide(
            Request(
                request.operation,
                request.key,
                request.cost,
                request.tier,
                request.now,
                replaces=request.replaces,
            )
        )


class CountsNoRefusals(Defect):
    def decide(self, request: Request) -> Answer:
        return super().decide(request.as_attempt())


class CountsAttempts(Defect):
    def decide(self, request: Request) -> Answer:
        return super().decide(
            Request(request.operation, request.key, request.cost, request.tier, request.now, request.quotas)
        )


def recording(request: Request) -> Request:
    """Return a request that records the cost of another request."""
    return Request("record", request.key, request.cost, request.tier, request.now)


@pytest.mark.parametrize(
    ("defect", "test"),
    [
        (ChargesRefusals, "test_a_refusal_consumes_nothing"),
        (ChargesOneRuleOfSeveral, "test_several_rules_are_charged_together_or_not_at_all"),
        (
            AdmitsAMicrosecondEarly,
            "test_a_refused_call_is_admitted_at_retry_after_and_not_a_microsecond_before",
        ),
        (TakesBytesForText, "test_every_key_is_counted_separately"),
        (GivesBackWhatWasReset, "test_a_release_after_a_reset_returns_nothing"),
        (ForgetsAMicrosecondEarly, "test_live_counts_are_never_forgotten"),
        (WritesWhenLooking, "test_check_answers_like_hit_and_charges_nothing"),
    ],
)
@pytest.mark.parametrize("kind", ["fixed_window", "sliding_window", "sliding_log", "token_bucket"])
def test_a_broken_store_fails_the_kit(defect: type[Defect], test: str, kind: str, tmp_path: Path) -> None:
    contract = broken_contract(defect, tmp_path)
    arguments = {"before": 0} if "reset" in test else {}
    with pytest.raises(AssertionError):
        getattr(contract, test)(kind, **arguments)


@pytest.mark.parametrize(
    ("defect", "test"),
    [
        (ChargesEveryRuleTheFirstCost, "test_each_rule_is_charged_the_cost_of_its_unit"),
        (GivesBackTheSameOfEveryRule, "test_a_hold_is_settled_by_unit"),
        (MovesWithoutGivingBack, "test_an_immediate_confirmation_counts_like_a_hit_with_the_final_cost"),
        (GivesBackBeforeItKnows, "test_a_refused_confirmation_returns_nothing"),
        (GivesBackBeforeItKnows, "test_several_rules_move_together_or_not_at_all"),
        (IgnoresQuotas, "test_a_quota_of_the_call_is_used_and_keeps_the_counts"),
    ],
)
@pytest.mark.parametrize("kind", ["fixed_window", "sliding_window", "sliding_log", "token_bucket"])
def test_a_store_without_a_feature_fails_the_kit(
    defect: type[Defect], test: str, kind: str, tmp_path: Path
) -> None:
    contract = broken_contract(defect, tmp_path)
    with pytest.raises((AssertionError, CostTooHigh)):
        getattr(contract, test)(kind)


@pytest.fixture
def _first_failure() -> Iterator[None]:
    """Search a fixed set of examples, independent of HEADGATE_TEST_EXAMPLES, up to the first failure."""
    before = settings.get_current_profile_name()
    settings.register_profile(
        "first failure",
        settings.get_profile(before),
        phases=[Phase.generate],
        derandomize=True,
        max_examples=1_000,
    )
    settings.load_profile("first failure")
    yield
    settings.load_profile(before)


@pytest.mark.parametrize(
    ("defect", "test"),
    [
        (CountsNoRefusals, "test_an_open_hold_settles_as_usual"),
        (CountsAttempts, "test_only_hits_and_holds_count"),
    ],
)
def test_a_store_with_broken_penalties_fails_the_kit(defect: type[Defect], test: str, tmp_path: Path) -> None:
    contract = broken_contract(defect, tmp_path)
    with pytest.raises(AssertionError):
        getattr(contract, test)()


@pytest.mark.usefixtures("_first_failure")
def test_a_store_with_broken_penalties_fails_random_traces(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        broken_contract(
            CountsNoRefusals, tmp_path
        ).test_random_traces_with_a_penalty_are_answered_like_the_pure_functions()


@pytest.mark.usefixtures("_first_failure")
@pytest.mark.parametrize(
    "test",
    [
        "test_random_traces_are_answered_like_the_pure_functions",
        "test_random_traces_of_one_rule_are_answered_like_the_pure_functions",
        "test_retry_after_is_exact_in_random_traces",
    ],
)
def test_a_broken_store_fails_random_traces(test: str, tmp_path: Path) -> None:
    contract = broken_contract(AdmitsAMicrosecondEarly, tmp_path)
    with pytest.raises(AssertionError):
        getattr(contract, test)()


class LastNoteStands(MemoryStore):
    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        self._notes.clear()
        return await super().note(name, text, seconds, replaces=replaces)


class LooksThenNotes(MemoryStore):
    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        kept = await self.get_note(name)
        await asyncio.sleep(0)
        if kept is None:
            self._notes.clear()
            kept = await super().note(name, text, seconds, replaces=replaces)
        return kept


class NotesForgetEarly(MemoryStore):
    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        return await super().note(name, text, seconds - 0.000001, replaces=replaces)


class ReplacesAnyNote(MemoryStore):
    async def note(self, name: str, text: str, seconds: float, *, replaces: str | None = None) -> str:
        if replaces is not None:
            replaces = await self.get_note(name)
        return await super().note(name, text, seconds, replaces=replaces)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (ReplacesAnyNote, "test_only_the_named_text_is_replaced"),
        (ReplacesAnyNote, "test_one_of_many_concurrent_replacements_succeeds"),
        (LastNoteStands, "test_the_first_note_is_kept"),
        (LooksThenNotes, "test_tasks_that_race_all_get_the_same_note"),
        (NotesForgetEarly, "test_a_note_is_kept_for_its_lifetime"),
    ],
)
def test_broken_notes_fail_the_kit(broken: type[MemoryStore], test: str, tmp_path: Path) -> None:
    class Broken(AsyncStoreContract):
        own_time = True

        def make_store(self) -> MemoryStore:
            return broken(clock=self.clock)

    contract = Broken()
    contract.clock, contract.folder, contract.prefix = FakeClock(), tmp_path, ""
    with pytest.raises(AssertionError):
        getattr(contract, test)()
    contract.store.close()


# --- Outside this project ---------------------------------------------------------------------------------------------

OUTSIDE = """
from headgate import MemoryStore
from headgate.testing import AsyncStoreContract, StoreContract
from headgate.testing.contract.decisions import DecisionTests
from headgate.testing.contract.traces import ALL_FEATURES

class TestMine(StoreContract):
    missing_features = ALL_FEATURES
    effort = 0.05
    def make_store(self):
        return MemoryStore()

class TestMineInTasks(AsyncStoreContract):
    missing_features = ALL_FEATURES
    effort = 0.05
    def make_store(self):
        return MemoryStore()

class TestBroken(DecisionTests):
    def make_store(self):
        return MemoryStore()
    def test_a_burst_of_exactly_the_limit_is_admitted(self):
        self.clock.advance(1)
        self._check_retry_after(self.limiter(self.rule("fixed_window", 5)), "a", 1)
"""


def test_a_third_party_store_can_use_the_kit(tmp_path: Path) -> None:
    """Without this project's settings; and a failure shows the values that differ."""
    (tmp_path / "test_mine.py").write_text(OUTSIDE, encoding="utf-8")
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", "-k", "burst or random_traces_are or racing_t"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    environment = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
    }  # some plugins of our tests load for a second
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed" in run.stdout, run.stdout
    assert "assert not Decision(allowed=True, limit=5, remaining=4" in run.stdout, run.stdout
