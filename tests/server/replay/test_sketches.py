"""Figures in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate_server.replay.sketches import Histogram, KeySample, Timeline


@given(st.lists(st.integers(0, 2**50), min_size=1), st.integers(0, 100))
def test_a_histogram_is_never_too_low_and_hardly_too_high(values: list[int], percent: int) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    left = int(len(values) * (100 - percent) / 100)
    exact = sorted(values)[max(0, len(values) - left - 1)]
    assert exact <= histogram.percentile(percent) <= exact * 1.0003 + 1
    assert histogram.highest == histogram.percentile(100) == max(values)


def test_a_histogram_of_very_many_values_stays_small() -> None:
    histogram = Histogram()
    for value in range(0, 10**8, 997):
        histogram.add(value)
    assert len(histogram._counts) < 70_000


def counter() -> list[int]:
    return [0]


def count(sample: KeySample[list[int]], key: str) -> None:
    kept = sample.get(key) or sample.add(key)
    if kept is not None:
        kept[0] += 1


def test_few_keys_are_all_kept() -> None:
    sample = KeySample(10, counter)
    for number in range(50):
        count(sample, f"k{number % 10}")
    assert sample.is_complete
    assert sample.keys == 10
    assert sorted(sample.values()) == [[5]] * 10


def test_of_many_keys_a_fair_and_complete_sample_is_kept() -> None:
    sample = KeySample(1_000, counter)
    for _ in range(3):
        for number in range(100_000):
            count(sample, f"k{number}")
    assert not sample.is_complete
    assert len(list(sample.values())) <= 1_000
    assert set(map(tuple, sample.values())) == {(3,)}
    assert 85_000 < sample.keys < 115_000


def test_a_timeline_is_as_fine_as_it_can_be() -> None:
    timeline = Timeline(1)
    for second in range(100_000):
        timeline.at(second * 1_000_000)[0] += 1
    assert timeline.seconds == 300
    assert len(timeline.bins) <= Timeline.MOST_BINS
    assert sum(counts[0] for _, counts in timeline.coarser(0)) == 100_000
    assert timeline.coarser(3600)[0] == (0, [3600])


@given(st.lists(st.integers(0, 2**53 - 1), max_size=50))
def test_a_timeline_keeps_every_count_whatever_the_times(times: list[int]) -> None:
    timeline = Timeline(1)
    timeline.MOST_BINS = 5  # type: ignore[misc]
    for at in times:
        timeline.at(at)[0] += 1
    assert len(timeline.bins) <= 5 or timeline.seconds == 315_360_000
    assert sum(counts[0] for _, counts in timeline.coarser(0)) == len(times)
