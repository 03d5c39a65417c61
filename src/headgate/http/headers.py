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
        self.style = fields = fields or Fields()
        """Which fields are written."""
        self._rules = tuple(rules)
        self._revision, self._reset = fields.ratelimit, fields.x_ratelimit
        self._strings = tuple(_string(name) for name in self.names)
        tiers = {None, *(tier for rule in rules for tier in rule.tiers)}
        self._policies = {tier: self._policy(tier, self._strings) for tier in tiers}

    @property
    def usual(self) -> tuple[int, Field, Field, bytes] | None:
        """What can be prepared for one rule with its own limit in the usual fields: that limit and constant parts.

        `None` if there are several rules, or other fields.
        """
        if len(self._rules) != 1 or self._revision != 11 or self._reset is None:
            return None
        quota = self._rules[0].quota
        limit = quota.limit if quota.burst is None else quota.burst
        if limit > LARGEST_INTEGER:
            return None
        return limit, self._policies[None], (b"x-ratelimit-limit", b"%d" % limit), self._strings[0]

    def fields(self, decision: Decision, now: int, tier: str | None = None) -> list[Field]:
        """Return all fields of a response to a call that was decided like this.

        Args:
            decision: The answer of the limiter.
            now: The time of the decision, in microseconds since the epoch.
            tier: The tier that the limiter was asked with.
        """
        cap = window_cap(decision)
        retry = [] if cap is None else [(b"retry-after", b"%d" % cap)]
        if decision.limit is None:
            return retry
        written: list[Field] = []
        policy = self._policies.get(tier) or self._policies[None]
        if self._revision == 11:
            written += [policy, (b"ratelimit", self._left(decision, cap, self._strings))]
        elif self._revision is not None:
            written += [policy, *self._earlier_draft(decision, cap)]
        if self._reset is not None:
            written.append((b"x-ratelimit-limit", b"%d" % decision.limit))
            written.append((b"x-ratelimit-remaining", b"%d" % (decision.remaining or 0)))
            reset_us = _reset_us(decision)
            if reset_us is not None:
                until = reset_us if self._reset == "seconds" else now + reset_us
                written.append((b"x-ratelimit-reset", b"%d" % seconds(until)))
        return written + retry

    def _policy(self, tier: str | None, strings: Sequence[bytes]) -> Field:
        items = (
            _policy_item(string if self._revision == 11 else b"", rule.quota_for(tier))
            for string, rule in zip(strings, self._rules, strict=True)
        )
        return b"ratelimit-policy", b", ".join(items)

    def _left(self, decision: Decision, cap: int | None, strings: Sequence[bytes]) -> bytes:
        return b", ".join(
            _left_item(string, verdict, cap)
            for string, verdict in zip(strings, decision.verdicts, strict=True)
        )

    def _earlier_draft(self, decision: Decision, cap: int | None) -> list[Field]:
        """Return the fields of revisions that show the rule that binds only."""
        figures = {
            b"limit": decision.limit,
            b"remaining": decision.remaining,
            b"reset": _window(decision, cap),
        }
        numbers = {
            name: min(number, LARGEST_INTEGER) for name, number in figures.items() if number is not None
        }
        if self._revision == 7:
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
        if writer._revision == 11 and decision.limit is not None:
            strings = tuple(map(_string, names))
            policies.append(writer._policy(tier, strings)[1])
            left.append(writer._left(decision, window_cap(binding), strings))
    if policies:
        merged[b"ratelimit-policy"], merged[b"ratelimit"] = b", ".join(policies), b", ".join(left)
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


def wait_seconds(retry_us: int) -> int:
    """Return the value of `Retry-After`: whole seconds, rounded up, at least one."""
    return seconds(retry_us) or 1


def window_cap(decision: Decision) -> int | None:
    """Return the seconds after which no window of a response may end: those that a refusal tells to wait."""
    retry_us = None if decision.allowed else decision.retry_after_us
    return None if retry_us is None else wait_seconds(retry_us)


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


def _left_item(string: bytes, verdict: Verdict, cap: int | None) -> bytes:
    item = b"%b;r=%d" % (string, min(verdict.remaining, LARGEST_INTEGER))
    window = _window(verdict, cap)
    return item if window is None else b"%b;t=%d" % (item, window)


def _window(verdict: Verdict | Decision, cap: int | None) -> int | None:
    reset_us = _reset_us(verdict)
    if reset_us is None or cap is None:
        return None if reset_us is None else seconds(reset_us)
    return min(seconds(reset_us), cap)


def _reset_us(verdict: Verdict | Decision) -> int | None:
    """Return when counting begins anew; what is refused for ever never does."""
    is_final = not verdict.allowed and verdict.retry_after_us is None
    return None if is_final else verdict.reset_after_us
