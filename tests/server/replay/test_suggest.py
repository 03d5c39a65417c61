"""Proposals from traffic with known smallest limits."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.policy import parse_policy
from headgate_server.replay import LogCounts, LoggedRequest, ReplayError, Simulation, run
from headgate_server.replay.report import log_figures
from headgate_server.replay.suggest import profile, suggestion, suggestion_text

SECOND = 1_000_000
START = 1_714_564_800 * SECOND


def log(uses: Iterable[tuple[float, str]]) -> list[LoggedRequest]:
    return [
        LoggedRequest(START + round(time * SECOND), order, key, key, 1, None, None, False)
        for order, (time, key) in enumerate(sorted(uses))
    ]


def steady(keys: int, per_minute: int, minutes: int) -> list[tuple[float, str]]:
    return [
        (minute * 60 + number * 60 / per_minute, f"k{key}")
        for key in range(keys)
        for minute in range(minutes)
        for number in range(per_minute)
    ]


def suggested(requests: list[LoggedRequest], share: float, name: str = "api") -> Any:
    report = suggestion(iter(requests), share, name, lambda doing: None)
    if report["requests"]:
        counts = LogCounts(lines=len(requests), formats={"access.log": "combined"})
        report["log"] = log_figures(counts, requests[0].at, requests[-1].at)
    return report


def refused(requests: list[LoggedRequest], rule: str) -> int:
    limiter = parse_policy(f'[limiters.api]\nrules = ["{rule}"]').limiters["api"]
    simulation = Simulation(limiter)
    run(requests, [simulation], LogCounts())
    return simulation.tally.counts[1]


def test_steady_traffic_needs_its_rate_and_no_burst() -> None:
    requests = log(steady(5, 6, 60))
    report = suggested(requests, 0.0)
    minute = next(row for row in report["windows"] if row["window"] == "minute")
    # A strict window counts a bucket of a second longer, so the seventh request is just inside.
    assert minute["peaks"] == {"p50": 7, "p90": 7, "p99": 7, "most": 7}
    assert minute["limit"] == 7
    assert minute["burst"] == 1
    assert report["refused"] == 0
    assert refused(requests, report["rule"]) == 0


def test_the_limit_is_the_smallest() -> None:
    chance = random.Random(7)
    uses = steady(8, 1, 190) + [(chance.uniform(0, 11_400), f"k{chance.randrange(4)}") for _ in range(1_500)]
    requests = log(uses)
    allowed = int(len(requests) * 0.01)
    for row in suggested(requests, 0.01)["windows"]:
        if not row["covered"]:
            assert row["limit"] is None
            continue
        name, limit = row["window"], row["limit"]
        assert refused(requests, f"{limit}/{name}") == row["refused"] <= allowed
        lower = limit - max(1, limit // 50)
        assert lower == 0 or refused(requests, f"{lower}/{name}") > allowed
        if row["burst"] is not None:
            burst = row["burst"]
            assert refused(requests, f"{limit}/{name} burst {burst}") == row["bucket_refused"] <= allowed
            fewer = burst - max(1, burst // 50)
            assert fewer == 0 or refused(requests, f"{limit}/{name} burst {fewer}") > allowed


def test_the_share_allows_refusals_of_one_heavy_caller() -> None:
    requests = log(steady(30, 4, 20) + [(number * 0.9, "greedy") for number in range(60)])
    strict, lenient = suggested(requests, 0.0), suggested(requests, 0.02)
    assert refused(requests, strict["rule"]) == 0
    assert lenient["refused_keys"] == 1
    assert 0 < lenient["refused"] <= len(requests) * 0.02
    assert lenient["windows"][1]["limit"] < strict["windows"][1]["limit"]


def test_the_text_is_a_policy_file_with_its_evidence() -> None:
    requests = log(steady(25, 1, 190))
    report = suggested(requests, 0.01, 'odd "name"')
    text = suggestion_text(report)
    limiters = tomllib.loads(text)["limiters"]
    assert limiters == {'odd "name"': {"rules": [report["rule"]]}}
    parse_policy(text)
    assert "# 4,750 requests of 25 keys" in text
    assert "THIN DATA" not in text
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize(
    ("uses", "share", "words"),
    [
        (steady(25, 6, 20), 0.001, "the log covers only 19 min"),
        (steady(3, 60, 20), 0.01, "there are only 3 keys"),
        (steady(20, 2, 10), 0.01, "there are only 400 requests"),
        (steady(25, 6, 40), 0.001, "0.10 % of 6,000 requests are 6, too few for"),
    ],
)
def test_thin_data_is_reported(uses: list[tuple[float, str]], share: float, words: str) -> None:
    report = suggested(log(uses), share)
    text = suggestion_text(report)
    assert "THIN DATA" in text
    assert words in text


def test_a_log_that_is_too_short_is_an_error() -> None:
    with pytest.raises(ReplayError, match="the log covers 2 s, which is too short for a proposal"):
        suggested(log([(0, "a"), (2, "a")]), 0.001)
    assert suggested([], 0.001) == {"requests": 0}


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 200), st.sampled_from("ab")), min_size=1, max_size=40))
def test_a_peak_is_the_smallest_limit_without_refusals(uses: list[tuple[int, str]]) -> None:
    requests = log([(float(time), key) for time, key in uses])
    found = profile(requests, lambda doing: None)
    for key in {key for _, key in uses}:
        own = [request for request in requests if request.caller == key]
        peak = found.peaks[key][1]
        assert refused(own, f"{peak}/minute") == 0
        assert peak == 1 or refused(own, f"{peak - 1}/minute") > 0
