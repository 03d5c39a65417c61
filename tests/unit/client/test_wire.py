"""Requests to a server and the meaning of its responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import ConfigError, Decision, StoreUnavailable
from headgate.client.values import WaitHint
from headgate.client.wire import (
    Response,
    batch_answers,
    batch_request,
    failure,
    hold_request,
    limiter_request,
    packed,
    read_decision,
    read_key_states,
    read_limiter,
    read_wait_hint,
    reading,
)
from headgate.decision import UNLIMITED, Verdict
from headgate.errors import StoreMisconfigured
from headgate.usage import RuleUsage
from tests.unit.client.scripted import LIMITER, decision_document

REFUSED = Decision.make(("rule",), [Verdict(False, 5, 0, 12_345_678, 60_000_001)])

# --- Requests ---------------------------------------------------------------------------------------------------------


def test_json_is_compact_and_unescaped() -> None:
    assert packed({"key": "é😀\x00", "cost": 1}) == '{"key":"é😀\\u0000","cost":1}'.encode()


@pytest.mark.parametrize("text", ["\ud83d", "\ud83d\ude00"])
def test_surrogates_are_refused(text: str) -> None:
    """Escaped, two surrogates would become one character, and so another key."""
    with pytest.raises(ConfigError, match="make it bytes"):
        packed({"key": text})


def test_a_limiter_is_named_in_the_path_and_in_a_batch() -> None:
    request = limiter_request("a/b c", "hit", {"key": "x", "cost": 2, "tier": None})
    assert (request.method, request.path) == ("POST", "/v1/limiters/a%2Fb%20c/hit")
    assert json.loads(request.body) == {"key": "x", "cost": 2}
    assert request.entry is not None
    assert json.loads(request.entry) == {"limiter": "a/b c", "operation": "hit", "key": "x", "cost": 2}
    assert not request.may_repeat


def test_settling_may_be_repeated() -> None:
    request = hold_request("id", "settle", {"cost": 3})
    assert (request.path, request.may_repeat) == ("/v1/holds/id/settle", True)
    batch = batch_request([request.entry or b"", request.entry or b""])
    assert json.loads(batch.body) == {"calls": [{"hold": "id", "operation": "settle", "cost": 3}] * 2}
    assert not batch.may_repeat  # it may contain other calls


# --- Responses --------------------------------------------------------------------------------------------------------

_MOST_US = 366 * 24 * 3_600_000_000  # the longest period; times in decisions are not much longer
_waits = st.none() | st.integers(0, 2 * _MOST_US)
_verdicts = st.builds(
    Verdict, st.booleans(), st.integers(0, 2**53 - 1), st.integers(0, 2**53 - 1), _waits, _waits
)


@given(st.lists(_verdicts, max_size=4), st.booleans())
def test_decision_round_trips_exactly(verdicts: list[Verdict], degraded: bool) -> None:
    names = tuple(f"rule {number}" for number in range(len(verdicts)))
    decision = Decision.make(names, verdicts, degraded=degraded)
    read = read_decision(json.loads(json.dumps(decision_document(decision))))
    assert type(read) is Decision
    assert read == decision
    assert (read.results, read.verdicts) == (decision.results, decision.verdicts)


def test_a_decision_without_rules_is_unlimited() -> None:
    assert read_decision(decision_document(UNLIMITED)) == UNLIMITED


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (500, StoreUnavailable),
        (502, StoreUnavailable),
        (503, StoreUnavailable),
        (408, StoreUnavailable),
        (429, StoreUnavailable),
        (301, StoreMisconfigured),
        (400, ConfigError),
        (401, StoreMisconfigured),
        (403, StoreMisconfigured),
        (404, ConfigError),
        (413, ConfigError),
        (415, ConfigError),
        (421, StoreMisconfigured),
        (422, ConfigError),
    ],
)
def test_status_distinguishes_misuse_from_an_outage(status: int, error: type[Exception]) -> None:
    found = failure("http://x", Response(status, {"detail": "because"}))
    assert type(found) is error
    assert "http://x" in str(found)
    assert ("token" if status == 401 else "because") in str(found)


@pytest.mark.parametrize("body", [None, "<html>", [], {"detail": None}, {}])
def test_an_error_needs_no_problem_document(body: Any) -> None:
    assert str(failure("http://x", Response(502, body))) == "http://x answered 502"


@pytest.mark.parametrize(
    "body",
    [
        None,
        "text",
        [],
        {},
        {"results": 5},
        {"results": [{}]},
        {"results": [], "allowed": True},
        {**decision_document(UNLIMITED), "allowed": "false"},
        {**decision_document(UNLIMITED), "allowed": 1},
        {**decision_document(UNLIMITED), "retry_after": float("inf")},
        {**decision_document(UNLIMITED), "retry_after": float("nan")},
        {**decision_document(REFUSED), "allowed": True},
        {**decision_document(REFUSED), "results": [{**REFUSED.results[0]._asdict(), "allowed": "false"}]},
    ],
)
def test_invalid_decision_means_misconfigured(body: Any) -> None:
    with pytest.raises(StoreMisconfigured, match="did not answer as a Headgate server"):
        reading("http://x", read_decision)(Response(200, body))


def test_a_batch_has_an_answer_for_each_call() -> None:
    body = {"answers": [{"status": 200, "body": {"a": 1}}, {"status": 404, "body": None}]}
    assert batch_answers(Response(200, body), 2) == [Response(200, {"a": 1}), Response(404, None)]


def test_unknown_rule_kind_is_refused() -> None:
    rule = {**LIMITER["rules"][0], "kind": "leaky_kettle"}
    with pytest.raises(StoreMisconfigured):
        reading("http://x", read_limiter)(Response(200, {**LIMITER, "rules": [rule]}))


def test_hints_and_states_are_typed() -> None:
    assert read_wait_hint({"allowed": False, "wait": 12.5}) == WaitHint(False, 12.5)
    result = {
        "name": "r",
        "limit": 5,
        "used": 7,
        "remaining": 0,
        "reset_after": 60.0,
        "frees_after": None,
        "scope": "user",
    }
    [good, bad] = read_key_states(
        {
            "limiters": [
                {"name": "login", "results": [result], "error": None},
                {"name": "api", "results": [], "error": "no such scope"},
            ]
        }
    )
    assert good.results == (RuleUsage("r", 5, 7, 0, 60.0, None, "user"),)
    assert (bad.limiter, bad.results, bad.error) == ("api", (), "no such scope")
