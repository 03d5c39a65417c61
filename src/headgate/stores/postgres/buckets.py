"""Statements, keys and decisions of bucket tables, for every kind of connection.

Each operation is a generator that yields statements and is sent their rows. The statements are in `sql/queries.sql`; this
module fills in the names and types of the table.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypeVar
from uuid import UUID

from headgate._checks import check_count, check_kind, check_text
from headgate.algorithms import SlidingWindow, algorithm_for
from headgate.costs import check_whole
from headgate.decision import Decision, Verdict
from headgate.errors import ConfigError, CostTooHigh, StoreConflict, listed
from headgate.quota import MAX_UNITS
from headgate.rules import SHARED, Rule, rules_from
from headgate.stores.postgres.sql import query

logger = logging.getLogger("headgate")

KeyType = Literal["uuid", "text", "bigint"]
PlainBucketKey = UUID | str | int
BucketKey = PlainBucketKey | Mapping[str, PlainBucketKey]

Row = tuple[Any, ...]
Statement = tuple[str, Sequence[Any]]
T = TypeVar("T")
Flow = Generator[Statement, Sequence[Row], T]

_MARK = "@"
_DERIVED_VERSION = 8  # of UUIDs: "for experimental or vendor-specific use" (RFC 9562)
_READ_COMMITTED = "read committed"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Usage:
    """The count of one rule for a key, by the database's clock.

    Attributes:
        limit: The maximum number of units in a period.
        count: Units counted before this call.
        allowed: Whether this rule alone admits the call.
    """

    __slots__ = ("_row", "_window", "allowed", "count", "limit")

    def __init__(self, window: Window, limit: int, cost: int, row: Row) -> None:
        self._window = window
        self._row = row
        self.limit = limit
        self.count: int = row[2]
        self.allowed = not cost or self.count + cost <= limit

    @property
    def name(self) -> str:
        """The rule's name."""
        return self._window.rule.name

    @property
    def remaining(self) -> int:
        """Units left before this call."""
        return max(0, self.limit - self.count)

    @property
    def next_allowed(self) -> datetime | None:
        """The first instant at which the same call is admitted if there are no other calls.

        The time of this call if it is admitted; `None` if waiting does not help.
        """
        return _utc(self._row[1]) if self.allowed else self._expiry(self._row[5])

    @property
    def oldest_expiry(self) -> datetime | None:
        """The time at which the oldest live bucket stops counting; `None` without live buckets."""
        return self._expiry(self._row[3])

    @property
    def newest_expiry(self) -> datetime | None:
        """The time at which the newest live bucket stops counting; `None` without live buckets."""
        return self._expiry(self._row[4])

    @property
    def own_expiry(self) -> datetime:
        """The time at which the units of this call stop counting."""
        at = _utc(self._row[1])
        return at - (at - _EPOCH) % self._window.width + self._window.lifetime

    def _expiry(self, bucket: datetime | None) -> datetime | None:
        return None if bucket is None else _utc(bucket) + self._window.lifetime

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.count} of {self.limit}>"


class BucketDecision:
    """The decision of all rules of a bucket table; true if all admit.

    Attributes:
        cost: The cost of the call.
        usages: The count of each rule, in the order of the rules.
    """

    __slots__ = ("_at", "cost", "usages")

    def __init__(self, at: datetime, cost: int, usages: tuple[Usage, ...]) -> None:
        self._at = at
        self.cost = cost
        self.usages = usages

    @property
    def at(self) -> datetime:
        """The time of the decision, by the database's clock."""
        return _utc(self._at)

    @property
    def allowed(self) -> bool:
        """Whether all rules admit."""
        return all(usage.allowed for usage in self.usages)

    def __bool__(self) -> bool:
        return self.allowed

    @property
    def binding(self) -> Usage:
        """The usage of the binding rule: the one with the longest wait, or without a refusal the least remaining."""
        names = [usage.name for usage in self.usages]
        return self.usages[names.index(str(self.decision.rule))]

    @property
    def next_allowed(self) -> datetime | None:
        """The first instant at which all rules admit the same call if there are no other calls; `None` if never."""
        return self.binding.next_allowed

    @property
    def decision(self) -> Decision:
        """The decision as a limiter returns it, with durations and the units remaining after this call."""
        verdicts = [self._verdict(usage) for usage in self.usages]
        return Decision.make(tuple(usage.name for usage in self.usages), verdicts)

    def _verdict(self, usage: Usage) -> Verdict:
        left, expiries = usage.remaining, [usage.newest_expiry or self.at]
        if self.allowed and self.cost:
            left -= self.cost
            expiries.append(usage.own_expiry)
        wait = None if usage.allowed or usage.next_allowed is None else _us(usage.next_allowed - self.at)
        return Verdict(usage.allowed, usage.limit, left, wait, _us(max(expiries) - self.at))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.decision}>"


@dataclass(frozen=True, slots=True)
class Cleanup:
    """The result of a cleanup.

    Attributes:
        deleted: Number of removed buckets.
        batches: Number of steps.
        cutoff: Buckets that began before this time were removed.
        ran: False if another instance was cleaning up, so that nothing was done.
    """

    deleted: int
    batches: int
    cutoff: datetime
    ran: bool


class Window(NamedTuple):
    """A rule with the durations of its buckets."""

    rule: Rule
    width: timedelta
    """The width of a bucket."""
    lifetime: timedelta
    """The time for which a bucket counts, from its start."""


class BucketPlan(NamedTuple):
    """The limits of one tier, the highest possible cost, and the statements."""

    limits: list[int]
    most: int
    check: str
    hold: str
    record: str
    lock: str
    cleanup: str


class Buckets:
    """The base of bucket tables, for every kind of connection.

    Args:
        rules: Sliding windows, or text like `"10/hour"`, all with buckets of one width.
        table: The table, or a pair of its schema and its name.
        key: Name of the column of keys.
        bucket: Name of the column of bucket starts, a `timestamptz`.
        count: Name of the column of counts.
        key_type: The type of the key column.
        plain: The scope whose keys are stored unchanged in the key column. Keys of other scopes are encoded.

    Columns other than these three must have defaults, and key and bucket must be unique together.

    Encoding of keys: the keys of rules without a scope, and of the scope `plain`, are stored unchanged. The value v of
    another scope s is stored in the same column as the text `@s:v` (`@*` for the shared scope); in a column of UUIDs, as a
    UUID of version 8 from the BLAKE2 digest of that text. To prevent callers from choosing a key of another scope, such a
    table refuses plain keys that begin with `@` or have version 8. A column of numbers supports one scope only; use a
    separate table for other scopes.
    """

    def __init__(
        self,
        *rules: str | Rule,
        table: str | tuple[str, str],
        key: str = "key",
        bucket: str = "bucket",
        count: str = "count",
        key_type: KeyType = "text",
        plain: str | None = None,
    ) -> None:
        self.rules = rules_from(rules)
        self._windows = _windows(self.rules)
        self._scopes = {rule.scope for rule in self.rules} - {SHARED}
        if key_type not in ("uuid", "text", "bigint"):
            raise ConfigError(f"key_type must be 'uuid', 'text' or 'bigint', not {key_type!r}")
        self.key_type: KeyType = key_type
        self._plain = plain
        self._encodes = any(rule.scope not in (None, plain) for rule in self.rules)
        if self._encodes and key_type == "bigint":
            raise ConfigError(
                "a column of numbers supports one scope only; use a separate table for the rules of other scopes"
            )
        self.table = _quoted(table)
        self._names = {
            "table": self.table,
            "key": _quoted(key),
            "bucket": _quoted(bucket),
            "count": _quoted(count),
        }
        self._own = self._plan(None)
        self._by_tier = {tier: self._plan(tier) for rule in self.rules for tier in rule.tiers}

    @property
    def lifetime(self) -> timedelta:
        """The longest time for which a bucket counts, from its start."""
        return max(window.lifetime for window in self._windows)

    def _checking(
        self, key: BucketKey | None, cost: int, tier: str | None, now: datetime | None
    ) -> Flow[BucketDecision]:
        plan, parameters = self._asked(key, cost, tier, now)
        rows = yield plan.check, parameters
        return self._decision(rows, plan.limits, cost)

    def _holding(
        self, key: BucketKey | None, cost: int, tier: str | None, now: datetime | None
    ) -> Flow[BucketDecision]:
        plan, parameters = self._asked(key, cost, tier, now)
        if cost:
            yield from self._lock(parameters[2:])
        rows = yield plan.hold if cost else plan.check, parameters
        return self._decision(rows, plan.limits, cost)

    def _recording(self, key: BucketKey | None, cost: int, now: datetime | None) -> Flow[None]:
        check_whole(cost)
        keys = self._keys(key)
        if cost:
            yield from self._lock(keys)
            yield self._own.record, (_aware(now), cost, keys)

    def _lock(self, keys: Sequence[PlainBucketKey]) -> Flow[None]:
        rows = yield self._own.lock, (list(keys),)
        isolation = str(rows[0][0])
        if isolation != _READ_COMMITTED:
            raise StoreConflict(
                f"hold and record need the isolation level READ COMMITTED, not {isolation.upper()}, under which the "
                f"count would be as old as the transaction"
            )

    def _cleaning(self, older_than: timedelta | None, batch: int, now: datetime | None) -> Flow[Cleanup]:
        """Yield the same statement until nothing is left to remove, or another instance is cleaning up."""
        age = self.lifetime if older_than is None else older_than
        check_kind("older_than", age, timedelta, "a timedelta")
        if age < self.lifetime:
            raise ConfigError(
                f"older_than must be at least {self.lifetime}, the time for which buckets count, not {age}"
            )
        check_count("batch", batch, 1, MAX_UNITS)
        deleted = batches = 0
        while True:
            rows = yield self._own.cleanup, (age.total_seconds(), batch, _aware(now))
            is_ours, cutoff, count = rows[0]
            deleted += count
            batches += is_ours
            if count < batch:
                break
        done = Cleanup(deleted, batches, cutoff.astimezone(UTC), batches > 0)
        _log(self.table, done)
        return done

    def _asked(
        self, key: BucketKey | None, cost: int, tier: str | None, now: datetime | None
    ) -> tuple[BucketPlan, list[Any]]:
        """Return the plan of a tier, and the parameters of check and hold: time, cost, and the key of each rule."""
        check_whole(cost)
        plan = self._own if tier is None else self._by_tier.get(check_text("a tier", tier, 0), self._own)
        if cost > plan.most:
            index = plan.limits.index(plan.most)
            raise CostTooHigh(cost, plan.most, self.rules[index].name)
        return plan, [_aware(now), cost, *self._keys(key)]

    def _keys(self, key: BucketKey | None) -> list[PlainBucketKey]:
        """Return the value of the key column for each rule."""
        scopes = self._scopes
        if None in scopes or not scopes:
            return [self._encoded(rule.scope, key) for rule in self.rules]
        if not isinstance(key, Mapping) or key.keys() != scopes:
            raise ConfigError(
                f"the rules count by {listed(scopes)}, so the key must be a mapping with these scopes, not {key!r}"
            )
        return [self._encoded(rule.scope, key.get(str(rule.scope))) for rule in self.rules]

    def _encoded(self, scope: str | None, value: Any) -> PlainBucketKey:
        if scope in (None, self._plain):
            return self._checked(value)
        text = _MARK + scope if scope == SHARED else f"{_MARK}{scope}:{value}"
        if self.key_type == "text":
            return text
        digest = bytearray(blake2b(text.encode(), digest_size=16).digest())
        digest[6] = digest[6] & 0x0F | _DERIVED_VERSION << 4
        digest[8] = digest[8] & 0x3F | 0x80
        return UUID(bytes=bytes(digest))

    def _checked(self, value: Any) -> PlainBucketKey:
        """Return a plain key in the type of the key column."""
        if self.key_type == "uuid":
            uuid = _uuid(value)
            if self._encodes and uuid.version == _DERIVED_VERSION:
                raise ConfigError(f"{uuid} has version 8, which this table reserves for other scopes")
            return uuid
        if self.key_type == "bigint":
            if type(value) is not int or not -(2**63) <= value < 2**63:
                raise ConfigError(f"a key must be a 64-bit integer, not {value!r}")
            return value
        if not isinstance(value, str):
            raise ConfigError(f"a key must be text, not {value!r}")
        if self._encodes and value.startswith(_MARK):
            raise ConfigError(
                f"the key {value!r} begins with '{_MARK}', which this table reserves for other scopes"
            )
        return value

    def _decision(self, rows: Sequence[Row], limits: Sequence[int], cost: int) -> BucketDecision:
        usages = [
            Usage(window, limit, cost, row)
            for window, limit, row in zip(self._windows, limits, rows, strict=True)
        ]
        return BucketDecision(rows[0][1], cost, tuple(usages))

    def _plan(self, tier: str | None) -> BucketPlan:
        """Return the limits of a tier, and the statements with this table's names and types."""
        limits = [rule.quota_for(tier).limit for rule in self.rules]
        names = {
            **self._names,
            "type": self.key_type,
            "table_text": self.table.replace("'", "''"),
            "width": _interval(self._windows[0].width),
            "time": query("buckets_time"),
            "keys": ", ".join(f"${3 + place}" for place in range(len(limits))),
            "limits": " ".join(f"WHEN {place} THEN {limit}" for place, limit in enumerate(limits)),
        }
        usages = [
            query("buckets_usage").format(
                **names, place=place, key_value=3 + place, limit=limit, lifetime=_interval(window.lifetime)
            )
            for place, (limit, window) in enumerate(zip(limits, self._windows, strict=True))
        ]
        names["usage"] = "\nUNION ALL\n".join(usages) + ("\nORDER BY place" if len(usages) > 1 else "")
        return BucketPlan(
            limits,
            min((limit for limit in limits if limit), default=MAX_UNITS),
            *(query(f"buckets_{kind}").format(**names) for kind in BucketPlan._fields[2:]),
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.table}: {', '.join(map(str, self.rules))}>"


def _windows(rules: tuple[Rule, ...]) -> list[Window]:
    """Return the durations of each rule's buckets."""
    windows, widths = [], {}
    for rule in rules:
        algorithm = algorithm_for(rule)
        if rule.kind != "sliding_window" or not isinstance(algorithm, SlidingWindow):
            raise ConfigError(
                f"the rules of a bucket table must be sliding windows; rule {rule.name!r} is a {rule.kind}"
            )
        if rule.scope is not None and ":" in rule.scope:
            raise ConfigError(
                f"the scope {rule.scope!r} must not contain ':', which separates scope and key in this table"
            )
        width, lifetime = (timedelta(microseconds=us) for us in (algorithm.width, algorithm.lifetime))
        windows.append(Window(rule, width, lifetime))
        widths[width] = rule
    if not windows:
        raise ConfigError("a bucket table needs a rule, such as '10/hour'")
    units = {rule.unit for rule in rules}
    if len(units) > 1:
        raise ConfigError(
            f"the rules of a bucket table share one count, so they must have one unit, not {listed(units)}; "
            f"use a separate table for each"
        )
    if len(widths) > 1:
        each = ", ".join(f"{width.total_seconds():g} s for {rule.name!r}" for width, rule in widths.items())
        raise ConfigError(
            f"the rules of a bucket table must have buckets of one width, not {each}; set buckets="
        )
    return windows


def _quoted(name: str | tuple[str, str]) -> str:
    """Return a quoted SQL name, with a schema if it is a pair."""
    parts = name if isinstance(name, tuple) else (name,)
    for part in parts:
        if not isinstance(part, str) or not part or "\0" in part:
            raise ConfigError(
                f"the name of a table or column must be non-empty text without NUL, not {part!r}"
            )
    return ".".join('"{}"'.format(part.replace('"', '""')) for part in parts)


def _uuid(value: Any) -> UUID:
    try:
        return value if isinstance(value, UUID) else UUID(value)
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"a key must be a UUID, not {value!r}") from None


def _aware(now: datetime | None) -> datetime | None:
    if now is not None and now.tzinfo is None:
        raise ConfigError(f"now= must be a datetime with a time zone, not {now!r}")
    return now


def _utc(instant: datetime) -> datetime:
    return instant.astimezone(UTC)


def _interval(duration: timedelta) -> str:
    """Return a duration in SQL: in microseconds, because days may differ in length."""
    return f"interval '{duration // timedelta(microseconds=1)} microseconds'"


def _us(duration: timedelta) -> int:
    return duration // timedelta(microseconds=1)


def _log(table: str, done: Cleanup) -> None:
    if done.ran:
        logger.info(
            "cleanup of %s: %d buckets from before %s removed, in %d batches",
            table,
            done.deleted,
            done.cutoff.isoformat(),
            done.batches,
        )
    else:
        logger.debug("cleanup of %s: another instance is cleaning up", table)
