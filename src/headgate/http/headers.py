"""Decisions as HTTP header fields. Pure: no framework, no clock, no I/O.

    RateLimit-Policy: "burst";q=100;w=60           the quota; the same in every response
    RateLimit: "burst";r=50;t=30                   the remaining units, and the seconds until the reset
    X-RateLimit-Limit, -Remaining, -Reset          the same for the most restrictive rule, in the widely known format
    Retry-After: 30                                on refusals, if waiting helps

The first two are structured fields (RFC 9651) of draft-ietf-httpapi-ratelimit-headers. The draft still changes, so its
revision is a setting: 11 as above (8 to 10 look the same), 7 `RateLimit: limit=100, remaining=50, reset=30`, 6
`RateLimit-Limit: 100` and so on.

Seconds are rounded up to whole numbers, so a client that waits for them is not refused because of a fraction. On a refusal
no window ends after `Retry-After`, as the draft requires. A shorter window is still correct: the remaining units are the
most that can be used in it.

Fields are written for every response. `Writer` therefore prepares the constant parts for a limiter's rules, and this file is
also compiled, with the types in `headers.pxd`. Fields are written as text, the form that most frameworks use; `encoded`
converts them for ASGI.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import quote

from headgate._checks import check_kind
from headgate._limiting import HeaderStyle
from headgate.clock import MICROSECONDS
from headgate.costs import Cost
from headgate.decision import Decision
from headgate.errors import ConfigError
from headgate.quota import Quota, Quotas
from headgate.rules import REQUESTS, Rule

Field = tuple[bytes, bytes]
"""Lower-case name and value, the form that ASGI uses."""
TextField = tuple[str, str]
"""Name in its usual spelling, and value."""
Header = TypeVar("Header", Field, TextField)

LARGEST_INTEGER = 999_999_999_999_999
"""The largest integer in a structured field."""

Terms = str | Quotas | None
"""The quotas that applied to a call: a tier, or the quota of each rule."""

ROUND_UP = MICROSECONDS - 1

_LEGACY = frozenset({b"x-ratelimit-", "x-ratelimit-"})
"""Prefixes of the widely known fields."""

_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


@dataclass(frozen=True, slots=True)
class Headers:
    """The fields to write, for settings that the `headers=` words do not cover.

    Attributes:
        x_ratelimit: Whether `X-RateLimit-Reset` is seconds since the epoch or seconds from now; `None` leaves all
            `X-RateLimit-*` fields out.
        ratelimit: Revision of the IETF draft; `None` leaves its fields out.
    """

    x_ratelimit: Literal["epoch", "seconds"] | None = "epoch"
    ratelimit: Literal[6, 7, 11] | None = 11

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields that a response may carry, except `Retry-After`."""
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


STYLES: dict[str, Headers] = {
    "both": Headers(),
    "ietf": Headers(x_ratelimit=None),
    "x-ratelimit": Headers(ratelimit=None),
    "none": Headers(x_ratelimit=None, ratelimit=None),
}
"""The fields for each word of `headers=` and of policy files."""


def headers_of(headers: Headers | HeaderStyle) -> Headers:
    """Return the `Headers` for a word; a `Headers` object is returned unchanged. Other values raise `ConfigError`."""
    if isinstance(headers, str) and headers in STYLES:
        return STYLES[headers]
    expected = f"{', '.join(map(repr, STYLES))} or Headers(…)"
    return check_kind("headers=", headers, Headers, expected)  # type: ignore[return-value]


class Writer:
    """Writes the fields for decisions of one limiter.

    Args:
        rules: The rules of the limiter that decides, in order.
        headers: The fields to write, as a word or as `Headers`.
    """

    def __init__(self, rules: Sequence[Rule], headers: Headers | HeaderStyle = "both") -> None:
        self.names = tuple([wire_name(rule.name) for rule in rules])
        """The names of the rules in fields and bodies."""
        self.headers = headers_of(headers)
        """The fields to write."""
        self._revision, self._reset = self.headers.ratelimit, self.headers.x_ratelimit
        self._rules = tuple(rules)
        self._penalties = frozenset([rule.name for rule in rules if rule.kind == "penalty"])
        self._strings = tuple(map(_string, self.names))
        self._own_policy = self.policy(None, self._strings)
        tiers = {tier for rule in rules for tier in rule.tiers}
        self._policy_of_tier = {tier: self.policy(tier, self._strings) for tier in tiers}

    def fields(self, decision: Decision, now: int, tier: Terms = None) -> list[Field]:
        """Return all fields of a response for a decision.

        Args:
            decision: The decision of the limiter.
            now: The time of the decision, in microseconds since the epoch.
            tier: The tier that applied to the call, or the quota of each rule.
        """
        return encoded(self.text_fields(decision, now, tier))

    def text_fields(self, decision: Decision, now: int, tier: Terms = None) -> dict[str, str]:
        """Like `fields`, but return text values by name in the usual spelling."""
        written: dict[str, str] = {}
        self.put(written, decision, now, tier)
        return written

    def put(self, written: MutableMapping[str, str], decision: Decision, now: int, tier: Terms) -> None:
        """Like `text_fields`, but write the fields into a mapping, such as the headers of a response."""
        allowed, limit, reset_us = decision.allowed, decision.limit, decision.reset_after_us
        wait = None if allowed else retry_seconds(decision)
        if wait is not None:
            written["Retry-After"] = f"{wait}"
        if limit is None:
            return
        remaining = decision.remaining or 0
        if not allowed:
            reset_us = self._reset_of(decision, wait)
        if self._revision is not None:
            policy = self._own_policy if tier is None else self._policy_of(tier)
            if policy:  # empty if the rules are unknown
                written["RateLimit-Policy"] = policy
        if self._revision == 11:
            strings = self._strings
            if len(strings) == 1 == len(decision.names):  # one rule: use the values of the decision
                left = _left_item(strings[0], remaining, reset_us, wait)
            else:
                left = _left(decision, wait, strings)
            written["RateLimit"] = left
        elif self._revision is not None:
            self._put_earlier_draft(written, decision, reset_us, wait)
        if self._reset is not None:
            written["X-RateLimit-Limit"] = f"{limit}"
            written["X-RateLimit-Remaining"] = f"{remaining}"
            if reset_us is not None:
                until = reset_us
                if self._reset == "epoch":
                    until += now
                written["X-RateLimit-Reset"] = f"{seconds(until)}"

    def _reset_of(self, decision: Decision, wait: int | None) -> int | None:
        """Return the microseconds until the reset after a refusal, or `None` if waiting never helps."""
        if wait is None:
            return None
        if decision.rule in self._penalties:
            return decision.retry_after_us  # its end; with a growth it is forgotten later
        return decision.reset_after_us

    def policy(self, tier: Terms, strings: Sequence[str]) -> str:
        if len(strings) != len(self._rules):  # a server decided by other rules
            strings = self._strings
        quotas = tier if isinstance(tier, tuple) else tuple(rule.quota_for(tier) for rule in self._rules)
        items = (
            _policy_item(string if self._revision == 11 else "", rule, quota or rule.quota)
            for string, rule, quota in zip(strings, self._rules, quotas, strict=True)
        )
        return ", ".join(items)

    def _policy_of(self, tier: str | Quotas) -> str:
        if isinstance(tier, tuple):
            return self.policy(tier, self._strings)
        return self._policy_of_tier.get(tier, self._own_policy)

    def costs(self, cost: Cost, count: int) -> list[int]:
        """Return the cost of a call for each rule, in the order of the decision."""
        if isinstance(cost, int) or count != len(self._rules):  # a server may decide by other rules
            return [cost if isinstance(cost, int) else 0] * count
        return [cost.get(rule.unit, 0) for rule in self._rules]

    def _put_earlier_draft(
        self,
        written: MutableMapping[str, str],
        decision: Decision,
        reset_us: int | None,
        wait: int | None,
    ) -> None:
        """Write the fields of revisions that show only the most restrictive rule."""
        figures = {
            "Limit": decision.limit,
            "Remaining": decision.remaining,
            "Reset": None if reset_us is None else min(seconds(reset_us), wait or LARGEST_INTEGER),
        }
        numbers = {
            name: min(number, LARGEST_INTEGER) for name, number in figures.items() if number is not None
        }
        if self._revision == 7:
            written["RateLimit"] = ", ".join(f"{name.lower()}={number}" for name, number in numbers.items())
            return
        for name, number in numbers.items():
            written[f"RateLimit-{name}"] = f"{number}"


Asked = tuple[Writer, Decision, Terms, int]
"""The result of one limiter for a response: the writer, the decision, the tier of the call, and the time (us)."""


def all_fields(asked: Sequence[Asked]) -> dict[str, str]:
    """Return the fields of a response after several limiters were checked.

    The policies of all limiters are listed. Fields with room for one limiter show the limiter that refused, or else the
    limiter with the fewest remaining units.
    """
    written: dict[str, str] = {}
    put_fields(written, asked)
    return written


def put_fields(written: MutableMapping[str, str], asked: Sequence[Asked]) -> None:
    """Like `all_fields`, but write the fields into a mapping, such as the headers of a response."""
    if len(asked) == 1:
        writer, decision, tier, now = asked[0]
        writer.put(written, decision, now, tier)
    else:
        for name, value in _merged_fields(asked).items():
            written[name] = value  # not every framework's mapping has `update`


def _merged_fields(asked: Sequence[Asked]) -> dict[str, str]:
    named = zip(asked, distinct_names(asked), strict=True)
    limited = [(one, names) for one, names in named if one[1].limit is not None or not one[1].allowed]
    if not limited:
        return {}
    writer, binding, tier, now = min((one for one, _ in limited), key=_room)
    merged = writer.text_fields(binding, now, tier)
    policies: list[str] = []
    left: list[str] = []
    for (writer, decision, tier, _), names in limited:
        if writer.headers.ratelimit == 11 and decision.limit is not None:
            strings = tuple(map(_string, names))
            policies.append(writer.policy(tier, strings))
            left.append(_left(decision, retry_seconds(binding), strings))
    if any(policies):
        merged["RateLimit-Policy"] = ", ".join(filter(None, policies))
    if left:
        merged["RateLimit"] = ", ".join(left)
    return merged


def replaced(headers: Iterable[Header], fields: Sequence[Header]) -> list[Header]:
    """Return an application's header fields together with ours; our `X-RateLimit-*` fields replace the application's.

    With two of them, clients would join the values or use the first.
    """
    given = list(headers)  # a copy: the application's list is not changed
    kept = [header for header in given if header[0][:12].lower() not in _LEGACY]
    if len(kept) < len(given) and _LEGACY.isdisjoint([name[:12].lower() for name, _ in fields]):
        kept = given
    kept += fields
    return kept


def encoded(fields: dict[str, str]) -> list[Field]:
    """Return fields in the form that ASGI uses."""
    return [(_ENCODED[name], value.encode()) for name, value in fields.items()]


_ENCODED = {
    name: name.lower().encode() for name in (*Headers().names, *Headers(ratelimit=6).names, "Retry-After")
}
"""The names of all fields, in the form that ASGI uses."""


def released(asked: Asked, cost: Cost) -> Asked:
    """Return the result as if nothing had been taken, after the units were returned."""
    writer, decision, tier, now = asked
    return writer, _without(decision, writer.costs(cost, len(decision.names))), tier, now


def _without(decision: Decision, costs: Sequence[int]) -> Decision:
    verdicts = [
        verdict._replace(remaining=max(verdict.remaining, min(verdict.limit, verdict.remaining + cost)))
        for verdict, cost in zip(decision.verdicts, costs, strict=True)
    ]
    return Decision.make(decision.names, verdicts, degraded=decision.degraded)


def _room(asked: Asked) -> int:
    return (asked[1].remaining or 0) if asked[1].allowed else -1


def distinct_names(asked: Iterable[Asked]) -> list[tuple[str, ...]]:
    """Return the rule names of each limiter, numbered where two limiters use the same name."""
    seen: set[str] = set()
    named = []
    for writer, decision, *_ in asked:
        names = []
        for name in names_in(decision, writer.names):
            distinct, number = name, 1
            while distinct in seen:
                number += 1
                distinct = f"{name}-{number}"
            seen.add(distinct)
            names.append(distinct)
        named.append(tuple(names))
    return named


def names_in(decision: Decision, names: Sequence[str]) -> Sequence[str]:
    """Return `names` if they fit the decision; otherwise, as for a server with other rules, the decision's names."""
    return names if len(names) == len(decision.names) else [wire_name(name) for name in decision.names]


def seconds(microseconds: int) -> int:
    """Return whole seconds, rounded up."""
    return (microseconds + ROUND_UP) // MICROSECONDS


def retry_seconds(decision: Decision) -> int | None:
    """Return the value of `Retry-After`: whole seconds, rounded up, at least one; `None` if waiting does not help.

    No window in the fields of a refusal may end later than this.
    """
    retry_us = None if decision.allowed else decision.retry_after_us
    return None if retry_us is None else seconds(retry_us) or 1


def wire_name(name: str) -> str:
    """Return a rule's name for fields and bodies as printable ASCII, as structured-field strings require.

    Other characters, and the percent sign, are percent-encoded, so that different names stay different.
    """
    if name.isascii() and name.isprintable() and "%" not in name:
        return name
    return quote(name, safe=_PRINTABLE, errors="surrogatepass")


def _string(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _policy_item(string: str, rule: Rule, quota: Quota) -> str:
    limit = min(quota.limit, LARGEST_INTEGER)
    item = f"{string};q={limit}" if string else f"{limit}"
    unit = f"concurrent-{rule.unit}" if rule.kind == "concurrent" else rule.unit
    unit = "refusals" if rule.kind == "penalty" else unit
    if string and unit != REQUESTS:
        item = f"{item};qu={_string(wire_name(unit))}"
    seconds, fraction = divmod(quota.period_us, MICROSECONDS)
    # A window is written in whole seconds or left out: rounding 0.1 up to 1 would promise a tenth of the quota.
    # A lease is not a window, and months differ in length.
    has_window = not fraction and rule.kind not in ("concurrent", "calendar")
    return f"{item};w={seconds}" if has_window else item


def _left(decision: Decision, wait: int | None, strings: Sequence[str]) -> str:
    """Return the remaining units of each rule, as a list of items."""
    if len(strings) != len(decision.names):
        strings = [_string(name) for name in names_in(decision, ())]
    items = []
    for index, (allowed, limit, left, retry_us, reset_us) in enumerate(decision.fields):
        if left > limit:
            continue  # a penalty that does not refuse
        is_final = retry_us is None and not allowed
        items.append(_left_item(strings[index], left, None if is_final else reset_us, wait))
    return ", ".join(items)


def _left_item(string: str, left: int, reset_us: int | None, wait: int | None) -> str:
    """Return the remaining units of one rule, and the seconds until its reset."""
    if left > LARGEST_INTEGER:
        left = LARGEST_INTEGER
    if reset_us is None:
        return f"{string};r={left}"
    window = seconds(reset_us)
    if wait is not None and wait < window:
        window = wait
    return f"{string};r={left};t={window}"
