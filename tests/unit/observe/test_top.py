"""The most frequent keys, in bounded memory."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headgate.observe import TopKeys


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=200),
    st.integers(1, 10),
    st.integers(1, 12),
)
def test_counts_are_never_too_high_and_their_error_is_bounded(
    additions: list[tuple[int, int]], capacity: int, number: int
) -> None:
    top, truth = TopKeys[int](capacity), Counter[int]()
    for key, count in additions:
        top.add(key, count)
        truth[key] += count
    found = dict(top.top(100))
    most_lost = truth.total() // (capacity + 1)
    assert len(found) <= capacity
    for key, count in truth.items():
        assert count - most_lost <= found.get(key, 0) <= count
    counts = [count for _, count in top.top(number)]
    assert counts == sorted(counts, reverse=True)
    assert len(counts) <= number


def test_many_rare_keys_do_not_hide_a_frequent_key() -> None:
    top = TopKeys[str](20)
    for number in range(10_000):
        top.add(f"once-{number}")
        if number % 4 == 0:
            top.add("busy")
    assert top.top(1)[0][0] == "busy"
