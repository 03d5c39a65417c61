"""Bodies of refusals, and their media types."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import CostTooHigh, Decision, Limiter, sliding_window
from headgate.decision import UNLIMITED
from headgate.http.headers import Writer, wire_name
from headgate.http.problems import JSON, PROBLEM_JSON, TEXT, Answer, preferred, refusal, too_costly

QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"


def refused(*rules: object) -> tuple[Decision, tuple[str, ...]]:
    limiter = Limiter(*rules)  # type: ignore[arg-type]
    while decision := limiter.hit("a"):
        pass
    return decision, Writer(limiter.rules).names


def members(answer: Answer) -> dict[str, object]:
    body: dict[str, object] = json.loads(answer.body)
    assert dict(answer.fields)[b"content-length"] == b"%d" % len(answer.body)
    return body


def test_refusal_body_is_the_registered_problem_type() -> None:
    decision, names = refused("1/minute", "1/s", "50/hour")
    answer = refusal(decision, names)
    body = members(answer)
    assert answer.status == body["status"] == 429
    assert dict(answer.fields)[b"content-type"] == b"application/problem+json"
    assert body["type"] == QUOTA_EXCEEDED
    assert body["violated-policies"] == ["per-minute", "per-second"]
    assert body["detail"] == f"Too many requests. Try again in {body['retry_after']} s."
    assert body["retry_after"] in (60, 61)


def test_permanent_refusal_has_no_retry_after() -> None:
    body = members(refusal(*refused("0/minute")))
    assert "retry_after" not in body
    assert "Waiting does not help" in str(body["detail"])


@given(st.text(min_size=1), st.sampled_from([None, b"application/json"]))
def test_any_name_makes_a_valid_body(name: str, accept: bytes | None) -> None:
    decision, names = refused(sliding_window("1/minute", name=name))
    assert members(refusal(decision, names, accept))["violated-policies"] == [wire_name(name)]


def test_degraded_refusal_is_a_server_error() -> None:
    decision, names = refused("1/minute")
    answer = refusal(decision.as_degraded(), names)
    assert answer.status == members(answer)["status"] == 503
    assert str(members(answer)["type"]).endswith("#temporary-reduced-capacity")


def test_refusal_without_rules_lists_no_policies() -> None:
    body = members(refusal(UNLIMITED.as_refused(2_000_000).as_degraded(), ()))
    assert body["violated-policies"] == []
    assert body["detail"] == "Requests cannot be counted at the moment. Try again in 2 s."


def test_cost_above_capacity_is_a_client_error() -> None:
    answer = too_costly(CostTooHigh(7, 5, "burst"))
    body = members(answer)
    assert answer.status == body["status"] == 413
    assert body["violated-policies"] == ["burst"]
    assert "costs 7 units; at most 5" in str(body["detail"])
    assert b"at most 5" in too_costly(CostTooHigh(7, 5, "burst"), b"text/plain").body


def test_client_can_request_plain_text() -> None:
    decision, names = refused(sliding_window("1/minute", name="100%"))
    answer = refusal(decision, names, b"text/plain")
    assert dict(answer.fields)[b"content-type"] == TEXT
    assert answer.body.startswith(b"Too many requests. Try again in 6")
    assert answer.body.endswith(b" s.\n")


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        (None, PROBLEM_JSON),
        (b"", PROBLEM_JSON),
        (b"*/*", PROBLEM_JSON),
        (b"application/json", JSON),
        (b"application/*", PROBLEM_JSON),
        (b"APPLICATION/JSON", JSON),
        (b"application/problem+json, application/json", PROBLEM_JSON),
        (b"application/problem+json;q=0.1, application/json", JSON),
        (b"text/plain", TEXT),
        (b"text/*;q=0.5, application/json;q=0.4", TEXT),
        (b"text/html, text/plain;q=0.9, */*;q=0.1", TEXT),
        (b"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", PROBLEM_JSON),
        (b"*/*, application/problem+json;q=0", JSON),
        (b"image/png", PROBLEM_JSON),
        (b"application/json;q=0", PROBLEM_JSON),
        (b"text/plain;q=2", TEXT),
        (b"text/plain;q=nan, application/json;q=0.001", JSON),
        (b"text/plain ; q = 0.5 , application/json ; q=0.6", JSON),
        (b"nonsense,,;;q=1", PROBLEM_JSON),
        (b"text/plain," * 1000, PROBLEM_JSON),
    ],
)
def test_accept_is_negotiated(accept: bytes | None, media_type: bytes) -> None:
    assert preferred(accept) == media_type


@given(
    st.binary(max_size=2000) | st.text(alphabet="*/;q=.,01 textplainjsoapcu+", max_size=60).map(str.encode)
)
def test_any_accept_header_gets_a_supported_media_type(accept: bytes) -> None:
    assert preferred(accept) in (PROBLEM_JSON, JSON, TEXT)
