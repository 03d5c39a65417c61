"""Records of holds and their ids."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import StoreConflict
from headgate.stores.counters import OVERFLOW
from headgate_server.hold_record import (
    HoldRecord,
    HoldsUnsupported,
    is_id,
    limiter_hint,
    new_id,
)

texts = st.text(st.characters(exclude_categories=()), max_size=20)
plain_keys = texts | st.binary(max_size=20)
keys = st.none() | plain_keys | st.dictionaries(texts, plain_keys, max_size=3)
places = plain_keys | st.just(OVERFLOW)
shadow_places = st.tuples(st.just("shadow"), texts, places)
numbers = st.integers(-1, 2**53 - 1)
receipts = st.lists(st.tuples(places | shadow_places, st.lists(numbers, max_size=8).map(tuple))).map(tuple)
# Units come from a policy file, which is valid UTF-8.
costs = numbers | st.dictionaries(st.text(max_size=20), numbers)
records = st.builds(
    HoldRecord,
    limiter=texts,
    key=keys,
    cost=costs,
    tier=st.none() | texts,
    rules=st.lists(texts, max_size=3).map(tuple),
    receipts=st.none() | receipts,
    kept_for=st.floats(0, 3e9),
    watched_in=st.none() | texts,
    quota=st.none() | texts | st.dictionaries(texts, texts, max_size=2),
    final=st.none() | costs,
    confirming_since=st.none() | numbers,
    nonce=texts,
    lost=st.booleans(),
)


@given(records)
def test_record_survives_a_round_trip(record: HoldRecord) -> None:
    text = record.text()
    assert HoldRecord.from_text(text) == record
    assert HoldRecord.from_text(text).text() == text  # the text that `replaces=` names
    assert text.isascii()


@given(st.text(max_size=50) | st.lists(st.integers() | st.text()).map(json.dumps))
def test_other_text_is_a_conflict(text: str) -> None:
    with pytest.raises(StoreConflict):
        HoldRecord.from_text(text)


def test_receipt_of_unknown_type_is_unsupported() -> None:
    with pytest.raises(HoldsUnsupported, match="object"):
        HoldRecord(
            limiter="llm",
            key="alice",
            cost=1,
            tier=None,
            rules=("rule",),
            receipts=((object(), (1, 2, 3)),),
            kept_for=60.0,
            watched_in=None,
        ).text()


@given(texts)
def test_ids_are_unique_fit_into_a_path_and_hint_at_the_limiter(limiter: str) -> None:
    hold_id = new_id(limiter)
    assert is_id(hold_id)
    assert hold_id != new_id(limiter)
    assert hold_id.endswith(limiter_hint(limiter))
