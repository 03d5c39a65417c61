"""What is noted of a hold comes back as it was, whatever it holds; and what was not noted by us is not believed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import StoreConflict
from headgate.stores.counters import OVERFLOW
from headgate_server.hold_notes import Claim, HoldNote, HoldsUnsupported, hint_of, is_id, new_id

texts = st.text(st.characters(exclude_categories=()), max_size=20)
plain_keys = texts | st.binary(max_size=20)
keys = st.none() | plain_keys | st.dictionaries(texts, plain_keys, max_size=3)
places = plain_keys | st.just(OVERFLOW)
shadow_places = st.tuples(st.just("shadow"), texts, places)
numbers = st.integers(-1, 2**53 - 1)
receipts = st.lists(st.tuples(places | shadow_places, st.lists(numbers, max_size=8).map(tuple))).map(tuple)
entries = st.builds(
    HoldNote,
    limiter=texts,
    key=keys,
    cost=numbers,
    tier=st.none() | texts,
    rules=st.lists(texts, max_size=3).map(tuple),
    receipts=st.none() | receipts,
    kept_for=st.floats(0, 3e9),
    watched_in=st.none() | texts,
)


@given(entries)
def test_an_entry_comes_back_as_it_was(entry: HoldNote) -> None:
    text = entry.text()
    assert HoldNote.read(text) == entry
    assert text.isascii()


@given(st.text(max_size=50) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_anything_else_is_a_conflict(text: str) -> None:
    with pytest.raises(StoreConflict):
        HoldNote.read(text)


def test_a_receipt_of_an_unknown_kind_cannot_be_noted() -> None:
    entry = HoldNote("llm", "alice", 1, None, ("rule",), ((object(), (1, 2, 3)),), 60.0, None)
    with pytest.raises(HoldsUnsupported, match="object"):
        entry.text()


# Units come from a policy file, which is valid UTF-8.
@given(numbers | st.dictionaries(st.text(max_size=20), numbers), st.none() | numbers)
def test_no_two_claims_are_equal_and_each_comes_back_as_it_was(
    cost: int | dict[str, int], moved_at: int | None
) -> None:
    claim = Claim.new(cost, moved_at)
    assert claim != Claim.new(cost, moved_at)
    assert Claim.read(claim.text()) == claim
    assert (claim.cost, claim.moved_at) == (cost, moved_at)


@pytest.mark.parametrize(
    "claim", ["", "7", "[]", "[1]", "{}", '["a", "b"]', "[null, 1]", "[1, 2, 3]", '[1, "a", "b"]']
)
def test_what_is_no_claim_is_a_conflict(claim: str) -> None:
    with pytest.raises(StoreConflict):
        Claim.read(claim)


@given(texts)
def test_ids_fit_into_a_path_and_tell_where_to_look(limiter: str) -> None:
    hold_id = new_id(limiter)
    assert is_id(hold_id)
    assert hold_id.endswith(hint_of(limiter))
