"""What a decision looks like in HTTP: header fields, status and body. Pure: no framework, no clock, no I/O.

    RateLimit-Policy: "burst";q=100;w=60           what is allowed: stays the same from response to response
    RateLimit: "burst";r=50;t=30                   what is left, and for how many seconds that is all there is
    X-RateLimit-Limit, -Remaining, -Reset          the same of the rule that binds, as most clients know it
    Retry-After: 30                                on refusals that end

The first two are structured fields (RFC 9651) of draft-ietf-httpapi-ratelimit-headers. The draft still moves, so its
revision is a setting: 11 as above (8 to 10 look the same), 7 `RateLimit: limit=100, remaining=50, reset=30`, 6
`RateLimit-Limit: 100` and so on.

Seconds are whole and rounded up: whoever waits as told is not refused for a fraction. On a refusal no window ends after
`Retry-After`, as the draft asks for; a shorter window is as true, since no more than what is left can be used in it either.

`Writer` holds what can be prepared for a limiter's rules, because fields are written for every response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from headgate.clock import MICROSECONDS
from headgate.decision import Decision, Verdict
from headgate.errors import ConfigError
from headgate.quota import Quota
from headgate.rules import Rule

Field = tuple[bytes, bytes]
"""Name in lower case and value, as ASGI has them."""

LARGEST_INTEGER = 999_999_999_999_999
"""Of a structured field."""

ROUND_UP = MICROSECONDS - 1

_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


@dataclass(frozen=True, slots=True)
class Fields:
    """Which fields to write.

    Attributes:
        x_ratelimit: Whether `X-RateLimit-Reset` is seconds since the epoch or seconds from now; `None` leaves all
            `X-RateLimit-*` fields out.
        ratelimit: Revision of the IETF draft; `None` leaves its fields out.
    """

    x_ratelimit: Literal["epoch", "seconds"] | None = "epoch"
    ratelimit: Literal[6, 7, 11] | None = 11

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields that a response may carry, but for `Retry-After`."""
        names: tuple[str, ...] = ()
        if self.ratelimit is not None:
            names += ("RateLimit-Policy",)
            names += (
                ("RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset")
                if self.ratelimit == 6
                else ("RateLimit",)
            )
        if self.x_ratelimit is not None:
            names += ("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset")
        return names

    def __post_init__(self) -> None:
        if self.x_ratelimit not in ("epoch", "seconds", None):
            raise ConfigError(f"x_ratelimit is 'epoch', 'seconds' or None, not {self.x_ratelimit!r}")
        if self.ratelimit not in (6, 7, 11, None):
            raise ConfigError(
                f"ratelimit is 6, 7, 11 (revisions of the draft) or None, not {self.ratelimit!r}"
            )


class Writer:
    """Writes the fields of decisions by the same rules.

    Args:
        rules: The rules of the limiter that decides, in order.
        fields: Which fields to write.
    """

    def __init__(self, rules: Sequence[Rule], fields: Fields | None = None) -> None:
        self.names = tuple(wire_name(rule.name) for rule in rules)
        """What the rules are called in fields and bodies."""
        self.style = fields or Fields()
        """Which fields are written."""
        self._rules = tuple(rules)
        self._strings = tuple(map(_string, self.names))
        tiers = {tier for rule in rules for tier in rule.tiers}
        self._own_policy = self._policy(None, self._strings)
        self._policy_of_tier: dict[str | None, Field] = {
            tier: self._policy(tier, self._strings) for tier in tiers
        }

    def fields(self, decision: Decision, now: int, tier: str | None = None) -> list[Field]:
        """Return all fields of a response to a call that was decided like this.

        Args:
            decision: The answer of the limiter.
            now: The time of the decision, in microseconds since the epoch.
            tier: The tier that the call was decided under.
        """
        written: list[Field] = []
        wait = retry_seconds(decision)
        limit = decision.limit
        if limit is not None:
            style = self.style
            if style.ratelimit is not None:
                if len(decision.names) == len(self._rules):
                    written.append(self._policy_of_tier.get(tier, self._own_policy))
                if style.ratelimit == 11:
                    written.append((b"ratelimit", self._left(decision, wait, self._strings)))
                else:
                    written += self._earlier_draft(decision, wait)
            if style.x_ratelimit is not None:
                written.append((b"x-ratelimit-limit", b"%d" % limit))
                written.append((b"x-ratelimit-remaining", b"%d" % (decision.remaining or 0)))
                reset_us = _reset_us(decision)
                if reset_us is not None:
                    until = reset_us if style.x_ratelimit == "seconds" else now + reset_us
                    written.append((b"x-ratelimit-reset", b"%d" % ((until + ROUND_UP) // MICROSECONDS)))
        if wait is not None:
            written.append((b"retry-after", b"%d" % wait))
        return written

    def _policy(self, tier: str | None, strings: Sequence[bytes]) -> Field:
        items = (
            _policy_item(string if self.style.ratelimit == 11 else b"", rule.quota_for(tier))
            for string, rule in zip(strings, self._rules, strict=True)
        )
        return b"ratelimit-policy", b", ".join(items)

    def _left(self, decision: Decision, wait: int | None, strings: Sequence[bytes]) -> bytes:
        """Return what is left of each rule, as a list of items."""
        if len(decision.names) != len(strings):  # a server decides by its own rules, and they have changed
            strings = [_string(wire_name(name)) for name in decision.names]
        if len(strings) == 1:
            return _left_item(strings[0], decision, wait)
        return b", ".join(
            [
                _left_item(string, verdict, wait)
                for string, verdict in zip(strings, decision.verdicts, strict=True)
            ]
        )

    def _earlier_draft(self, decision: Decision, wait: int | None) -> list[Field]:
        """Return the fields of revisions that show the rule that binds only."""
        figures = {
            b"limit": decision.limit,
            b"remaining": decision.remaining,
            b"reset": _window(decision, wait),
        }
        numbers = {
            name: min(number, LARGEST_INTEGER) for name, number in figures.items() if number is not None
        }
        if self.style.ratelimit == 7:
            return [(b"ratelimit", b", ".join(b"%b=%d" % pair for pair in numbers.items()))]
        return [(b"ratelimit-" + name, b"%d" % number) for name, number in numbers.items()]


Asked = tuple[Writer, Decision, str | None, int]
"""A limiter's part in a response: who writes its fields, what it answered, to which tier, and when (us)."""


def all_fields(asked: Sequence[Asked]) -> list[Field]:
    """Return the fields of a response that several limiters were asked for.

    The policies of all are listed; figures that have room for one are those of the limiter that refused, or else of
    the one with the least left.
    """
    if len(asked) == 1:
        writer, decision, tier, now = asked[0]
        return writer.fields(decision, now, tier)
    named = zip(asked, distinct_names(asked), strict=True)
    limited = [(one, names) for one, names in named if one[1].limit is not None or not one[1].allowed]
    if not limited:
        return []
    writer, binding, tier, now = min((one for one, _ in limited), key=_room)
    merged = dict(writer.fields(binding, now, tier))
    policies, left = [], []
    for (writer, decision, tier, _), names in limited:
        if writer.style.ratelimit == 11 and decision.limit is not None:
            strings = tuple(map(_string, names))
            if len(decision.names) == len(names):
                policies.append(writer._policy(tier, strings)[1])
            left.append(writer._left(decision, retry_seconds(binding), strings))
    if policies:
        merged[b"ratelimit-policy"] = b", ".join(policies)
    if left:
        merged[b"ratelimit"] = b", ".join(left)
    return list(merged.items())


def released(asked: Asked, cost: int) -> Asked:
    """Return the same after the units have been given back: nothing was taken."""
    writer, decision, tier, now = asked
    return writer, _without(decision, cost), tier, now


def _without(decision: Decision, cost: int) -> Decision:
    verdicts = [
        verdict._replace(remaining=min(verdict.limit, verdict.remaining + cost))
        for verdict in decision.verdicts
    ]
    return Decision.make(decision.names, verdicts, degraded=decision.degraded)


def _room(asked: Asked) -> int:
    return (asked[1].remaining or 0) if asked[1].allowed else -1


def distinct_names(asked: Iterable[Asked]) -> list[tuple[str, ...]]:
    """Return what the rules of each limiter are called where all stand together: no two alike."""
    seen: set[str] = set()
    named = []
    for writer, *_ in asked:
        names = []
        for name in writer.names:
            distinct, number = name, 1
            while distinct in seen:
                number += 1
                distinct = f"{name} ({number})"
            seen.add(distinct)
            names.append(distinct)
        named.append(tuple(names))
    return named


def seconds(microseconds: int) -> int:
    """Return whole seconds, rounded up."""
    return (microseconds + ROUND_UP) // MICROSECONDS


def retry_seconds(decision: Decision) -> int | None:
    """Return the value of `Retry-After`: whole seconds, rounded up, at least one; `None` if waiting does not help.

    No window in the fields of a refusal may end later.
    """
    if decision.allowed or (retry_us := decision.retry_after_us) is None:
        return None
    return seconds(retry_us) or 1


def wire_name(name: str) -> str:
    """Return a rule's name for fields and bodies: a structured-field string is printable ASCII.

    Anything else, and the percent sign itself, is percent-encoded, so that different names stay different.
    """
    if name.isascii() and name.isprintable() and "%" not in name:
        return name
    return quote(name, safe=_PRINTABLE, errors="surrogatepass")


def _string(name: str) -> bytes:
    return b'"%b"' % name.encode("ascii").replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def _policy_item(string: bytes, quota: Quota) -> bytes:
    limit = min(quota.limit, LARGEST_INTEGER)
    item = b"%b;q=%d" % (string, limit) if string else b"%d" % limit
    seconds, fraction = divmod(quota.period_us, MICROSECONDS)
    # A window is whole seconds or not mentioned: 1 for 0.1 would promise a tenth of what is allowed.
    return item if fraction else b"%b;w=%d" % (item, seconds)


def _left_item(string: bytes, verdict: Verdict | Decision, wait: int | None) -> bytes:
    remaining = verdict.remaining or 0
    if remaining > LARGEST_INTEGER:
        remaining = LARGEST_INTEGER
    window = _window(verdict, wait)
    if window is None:
        return b"%b;r=%d" % (string, remaining)
    return b"%b;r=%d;t=%d" % (string, remaining, window)


def _window(verdict: Verdict | Decision, wait: int | None) -> int | None:
    """Return for how many seconds what is left is all there is; `None` if that does not end."""
    reset_us = _reset_us(verdict)
    if reset_us is None:
        return None
    window = (reset_us + ROUND_UP) // MICROSECONDS
    return window if wait is None or window < wait else wait


def _reset_us(verdict: Verdict | Decision) -> int | None:
    """Return when counting begins anew; what is refused for ever never does."""
    is_final = not verdict.allowed and verdict.retry_after_us is None
    return None if is_final else verdict.reset_after_us
