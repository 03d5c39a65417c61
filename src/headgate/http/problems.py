"""Refusals as HTTP responses: status and body, in the form that the client prefers. Pure.

    429  a quota is used up: problem type `quota-exceeded`, with the names of the rules that refused
    503  the store is unreachable and the failure policy refuses: `temporary-reduced-capacity`
    413  the request costs more than a rule ever admits at once; waiting does not help, so there is no `Retry-After`

The body is a problem document (RFC 9457), unless `Accept` prefers plain text. Members beyond the RFC: the draft's
`violated-policies`, and `retry_after`, because a script in a browser often cannot read the header field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple

from headgate.decision import Decision
from headgate.errors import CostTooHigh
from headgate.http.headers import Field, TextField, names_in, retry_seconds, wire_name

QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"
REDUCED_CAPACITY = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"

TOO_MANY_REQUESTS = 429
UNAVAILABLE = 503
TOO_LARGE = 413

PROBLEM_JSON, JSON, TEXT = b"application/problem+json", b"application/json", b"text/plain; charset=utf-8"
_OFFERED = (
    (PROBLEM_JSON, b"application", b"problem+json"),
    (JSON, b"application", b"json"),
    (TEXT, b"text", b"plain"),
)

_LONGEST_ACCEPT = 1024
"""Longer fields are not parsed; the sender gets the default form."""


class Answer(NamedTuple):
    """A refusal as an HTTP response; the `RateLimit` fields are added by `Writer`."""

    status: int
    fields: list[Field]
    body: bytes

    @property
    def headers(self) -> list[TextField]:
        """The fields as text, the form that most frameworks use."""
        return [(name.decode().title(), value.decode()) for name, value in self.fields]


def refusal(decision: Decision, names: tuple[str, ...], accept: bytes | None = None) -> Answer:
    """Return the response to a refused request.

    Args:
        decision: The refusal.
        names: The names of its rules in fields, in order.
        accept: The request's `Accept` field.
    """
    media_type = preferred(accept)
    wait = retry_seconds(decision)
    body = _template(_violated(decision, names), decision.degraded, wait is not None, media_type is TEXT)
    if wait is not None:
        body = body % wait if media_type is TEXT else body % (wait, wait)
    return _answer(UNAVAILABLE if decision.degraded else TOO_MANY_REQUESTS, media_type, body)


def _violated(decision: Decision, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the rules that refuse."""
    names = tuple(names_in(decision, names))
    if len(names) < 2:
        return names
    return tuple([names[index] for index, (allowed, *_) in enumerate(decision.fields) if not allowed])


def too_costly(error: CostTooHigh, accept: bytes | None = None) -> Answer:
    """Return the response to a request whose cost can never be admitted."""
    media_type = preferred(accept)
    detail = f"This request costs {error.cost} units; at most {error.capacity} are admitted at once."
    if media_type is TEXT:
        return _answer(TOO_LARGE, media_type, f"{detail}\n".encode())
    violated = {"violated-policies": [wire_name(error.rule)]}
    return problem(TOO_LARGE, detail, title="Content Too Large", members=violated, media_type=media_type)


def problem(
    status: int,
    detail: str,
    *,
    title: str | None = None,
    kind: str = "about:blank",
    members: Mapping[str, Any] | None = None,
    retry_after: int | None = None,
    media_type: bytes = PROBLEM_JSON,
) -> Answer:
    """Return a problem document as a response.

    Args:
        status: The status.
        detail: A description of the problem for people.
        title: A short title; by default the phrase of the status.
        kind: The document's `type`, a URI.
        members: Additional members of the document.
        retry_after: Whole seconds for the field `Retry-After`.
        media_type: The media type of the document.
    """
    title = HTTPStatus(status).phrase if title is None else title
    document = {"type": kind, "title": title, "status": status, "detail": detail, **(members or {})}
    answer = _answer(status, media_type, json.dumps(document).encode())
    if retry_after is not None:
        answer.fields.append((b"retry-after", b"%d" % retry_after))
    return answer


@lru_cache(maxsize=256)
def _template(violated: tuple[str, ...], degraded: bool, ends: bool, as_text: bool) -> bytes:
    """Return a body, with `%d` in place of the seconds if waiting helps.

    Cached, because encoding JSON takes longer than a decision, and refusals come in floods.
    """
    detail = "Requests cannot be counted at the moment." if degraded else "Too many requests."
    if ends:
        detail += " Try again in %d s."
    elif not degraded:
        detail += " Waiting does not help."
    if as_text:
        return f"{detail}\n".encode()
    title = (
        "due to temporary server capacity constraints" if degraded else "as assigned quota has been exceeded"
    )
    members = {
        "type": REDUCED_CAPACITY if degraded else QUOTA_EXCEEDED,
        "title": f"Request cannot be satisfied {title}",
        "status": UNAVAILABLE if degraded else TOO_MANY_REQUESTS,
        "violated-policies": violated,
    }
    text = json.dumps(members)
    if ends:
        return f'{text[:-1].replace("%", "%%")}, "detail": "{detail}", "retry_after": %d}}'.encode()
    return json.dumps({**members, "detail": detail}).encode()


def _answer(status: int, media_type: bytes, body: bytes) -> Answer:
    return Answer(status, [(b"content-type", media_type), (b"content-length", b"%d" % len(body))], body)


def preferred(accept: bytes | None) -> bytes:
    """Return the form of a body that an `Accept` field prefers; a problem document if it accepts none of them.

    RFC 9110 permits a response in a form that the client does not accept, and a refusal must be answered.
    """
    if not accept or accept == b"*/*" or len(accept) > _LONGEST_ACCEPT:
        return PROBLEM_JSON
    return _negotiate(accept)


@lru_cache(maxsize=256)
def _negotiate(accept: bytes) -> bytes:
    ranges = list(_media_ranges(accept.lower()))
    best, best_quality = PROBLEM_JSON, 0.0
    for media_type, kind, subtype in _OFFERED:
        # The most specific range that covers a type determines its weight.
        for wanted in ((kind, subtype), (kind, b"*"), (b"*", b"*")):
            qualities = [quality for media_range, quality in ranges if media_range == wanted]
            if qualities:
                if max(qualities) > best_quality:
                    best, best_quality = media_type, max(qualities)
                break
    return best


def _media_ranges(accept: bytes) -> Iterator[tuple[tuple[bytes, bytes], float]]:
    for part in accept.split(b","):
        media_range, *parameters = (piece.strip() for piece in part.split(b";"))
        kind, slash, subtype = media_range.partition(b"/")
        quality = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition(b"=")
            if name.strip() == b"q":
                quality = _quality(value.strip())
        if slash:
            yield (kind, subtype), quality


def _quality(value: bytes) -> float:
    """Return a weight; 0 ("not acceptable") if the value is not a valid weight."""
    if not value.replace(b".", b"", 1).isdigit() or not value[:1].isdigit() or len(value) > 5:
        return 0.0
    return min(float(value), 1.0)
