"""What a bucket table does, whatever the connection: its statements, its keys, its answers.

Each operation is a generator that yields statements and is sent their rows, so that it serves all kinds of connections.
The statements are in `sql/queries.sql`; here the table's names and types are filled in.
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
    """What one rule counted for a key, by the database's clock.

    Attributes:
        limit: The most units in a period.
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
        """The first instant at which the same call is admitted if no other call comes.

        That of the call if it is admitted, `None` if no waiting helps.
        """
        return _utc(self._row[1]) if self.allowed else self._expiry(self._row[5])

    @property
    def oldest_expiry(self) -> datetime | None:
        """When the oldest bucket that counts stops counting; `None` if none counts."""
        return self._expiry(self._row[3])

    @property
    def newest_expiry(self) -> datetime | None:
        """When the newest bucket that counts stops counting; `None` if none counts."""
        return self._expiry(self._row[4])

    @property
    def own_expiry(self) -> datetime:
        """When units that are counted by this call stop counting."""
        at = _utc(self._row[1])
        return at - (at - _EPOCH) % self._window.width + self._window.lifetime

    def _expiry(self, bucket: datetime | None) -> datetime | None:
        return None if bucket is None else _utc(bucket) + self._window.lifetime

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.count} of {self.limit}>"


class BucketDecision:
    """The answer of all rules of a bucket table; true if all admit.

    Attributes:
        cost: What was asked for.
        usages: What each rule counted, in the order of the rules.
    """

    __slots__ = ("_at", "cost", "usages")

    def __init__(self, at: datetime, cost: int, usages: tuple[Usage, ...]) -> None:
        self._at = at
        self.cost = cost
        self.usages = usages

    @property
    def at(self) -> datetime:
        """When it was decided, by the database's clock."""
        return _utc(self._at)

    @property
    def allowed(self) -> bool:
        """Whether all rules admit."""
        return all(usage.allowed for usage in self.usages)

    def __bool__(self) -> bool:
        return self.allowed

    @property
    def binding(self) -> Usage:
        """What the rule counted that binds: of a refusal the one to wait longest for, else the one with the least left."""
        names = [usage.name for usage in self.usages]
        return self.usages[names.index(str(self.decision.rule))]

    @property
    def next_allowed(self) -> datetime | None:
        """The first instant at which all rules admit the same call if no other call comes; `None` if none ever does."""
        return self.binding.next_allowed

    @property
    def decision(self) -> Decision:
        """The same as any limiter would put it, with waits instead of instants and what is left after this call."""
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
    """What a cleanup did.

    Attributes:
        deleted: How many buckets it removed.
        batches: In how many steps.
        cutoff: Buckets that began before this were removed.
        ran: False if another instance was at it, so that this one left off.
    """

    deleted: int
    batches: int
    cutoff: datetime
    ran: bool


class Window(NamedTuple):
    """A rule, ready to be asked."""

    rule: Rule
    width: timedelta
    """Of a bucket."""
    lifetime: timedelta
    """How long after its beginning a bucket counts."""


class BucketPlan(NamedTuple):
    """The limits of one tier, the highest cost that can be asked for, and the statements."""

    limits: list[int]
    most: int
    check: str
    hold: str
    record: str
    lock: str
    cleanup: str


class Buckets:
    """What bucket tables are for every kind of connection.

    Args:
        rules: Sliding windows, or text like `"10/hour"`, all with buckets of one width.
        table: The table, or a pair of its schema and its name.
        key: Name of the column that says whose units.
        bucket: Name of the column that says when the bucket began: a `timestamptz`.
        count: Name of the column that says how many.
        key_type: The type of the key's column.
        plain: The scope whose keys stand in the key's column as they are. Those of all other scopes are encoded.

    Columns other than these three must have defaults, and key and bucket must be unique together.

    How keys are encoded. A rule without a scope counts by the plain key, as it is. Of rules with scopes, those of the scope
    `plain` do so. The value v of another scope s stands in the same column as the text `@s:v` (`@*` for the shared one), and
    in a column of UUIDs as a UUID of version 8 that is made of the BLAKE2 digest of that text. So that no caller can choose
    a key that is another scope's, plain keys that begin with `@` or have version 8 are refused in such a table. In a column
    of numbers there is no room for more scopes: give them a table of their own.
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
            raise ConfigError(f"key_type is 'uuid', 'text' or 'bigint', not {key_type!r}")
        self.key_type: KeyType = key_type
        self._plain = plain
        self._encodes = any(rule.scope not in (None, plain) for rule in self.rules)
        if self._encodes and key_type == "bigint":
            raise ConfigError(
                "a column of numbers has room for one scope only; give the rules of others a table of their own"
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
        """How long after its beginning a bucket counts at most."""
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
                f"units can be held and recorded under READ COMMITTED only, not {isolation.upper()}: there the count "
                f"would be as old as the transaction"
            )

    def _cleaning(self, older_than: timedelta | None, batch: int, now: datetime | None) -> Flow[Cleanup]:
        """Yield the same statement until there is nothing left to remove, or somebody else is at it."""
        age = self.lifetime if older_than is None else older_than
        check_kind("older_than", age, timedelta, "a timedelta")
        if age < self.lifetime:
            raise ConfigError(f"buckets count for {self.lifetime}, so they cannot be removed after {age}")
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
        """Return the statements for a tier, and the parameters of check and hold: time, cost, and the key of each rule."""
        check_whole(cost)
        plan = self._own if tier is None else self._by_tier.get(check_text("a tier", tier, 0), self._own)
        if cost > plan.most:
            index = plan.limits.index(plan.most)
            raise CostTooHigh(cost, plan.most, self.rules[index].name)
        return plan, [_aware(now), cost, *self._keys(key)]

    def _keys(self, key: BucketKey | None) -> list[PlainBucketKey]:
        """Return what stands in the key's column for each rule."""
        scopes = self._scopes
        if None in scopes or not scopes:
            return [self._encoded(rule.scope, key) for rule in self.rules]
        if not isinstance(key, Mapping) or key.keys() != scopes:
            raise ConfigError(
                f"the rules count by {listed(scopes)}, so the key is a mapping with these, not {key!r}"
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
        """Return a plain key as the column's type has it."""
        if self.key_type == "uuid":
            uuid = _uuid(value)
            if self._encodes and uuid.version == _DERIVED_VERSION:
                raise ConfigError(f"{uuid} has version 8, which this table keeps for other scopes")
            return uuid
        if self.key_type == "bigint":
            if type(value) is not int or not -(2**63) <= value < 2**63:
                raise ConfigError(f"a key is a whole number of 64 bits, not {value!r}")
            return value
        if not isinstance(value, str):
            raise ConfigError(f"a key is text, not {value!r}")
        if self._encodes and value.startswith(_MARK):
            raise ConfigError(
                f"the key {value!r} begins with '{_MARK}', which this table keeps for other scopes"
            )
        return value

    def _decision(self, rows: Sequence[Row], limits: Sequence[int], cost: int) -> BucketDecision:
        usages = [
            Usage(window, limit, cost, row)
            for window, limit, row in zip(self._windows, limits, rows, strict=True)
        ]
        return BucketDecision(rows[0][1], cost, tuple(usages))

    def _plan(self, tier: str | None) -> BucketPlan:
        """Return the statements with this table's names and types, and a tier's limits."""
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
    """Return the rules ready to be asked."""
    windows, widths = [], {}
    for rule in rules:
        algorithm = algorithm_for(rule)
        if rule.kind != "sliding_window" or not isinstance(algorithm, SlidingWindow):
            raise ConfigError(
                f"a bucket table counts in sliding windows; rule {rule.name!r} is a {rule.kind}"
            )
        if rule.scope is not None and ":" in rule.scope:
            raise ConfigError(
                f"the scope {rule.scope!r} has a ':' in it, which stands between scope and key here"
            )
        width, lifetime = (timedelta(microseconds=us) for us in (algorithm.width, algorithm.lifetime))
        windows.append(Window(rule, width, lifetime))
        widths[width] = rule
    if not windows:
        raise ConfigError("a bucket table needs a rule, such as '10/hour'")
    units = {rule.unit for rule in rules}
    if len(units) > 1:
        raise ConfigError(
            f"a bucket table has one count for all of its rules, so they count one unit, not {listed(units)}; "
            f"use a table for each"
        )
    if len(widths) > 1:
        each = ", ".join(f"{width.total_seconds():g} s for {rule.name!r}" for width, rule in widths.items())
        raise ConfigError(f"the rules of one table need buckets of one width, not {each}; set buckets=")
    return windows


def _quoted(name: str | tuple[str, str]) -> str:
    """Return a name, or a schema and a name, as SQL has it."""
    parts = name if isinstance(name, tuple) else (name,)
    for part in parts:
        if not isinstance(part, str) or not part or "\0" in part:
            raise ConfigError(f"a table or column has a name, not {part!r}")
    return ".".join('"{}"'.format(part.replace('"', '""')) for part in parts)


def _uuid(value: Any) -> UUID:
    try:
        return value if isinstance(value, UUID) else UUID(value)
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"a key is a UUID, not {value!r}") from None


def _aware(now: datetime | None) -> datetime | None:
    if now is not None and now.tzinfo is None:
        raise ConfigError(f"now= is an instant with a time zone, not {now!r}")
    return now


def _utc(instant: datetime) -> datetime:
    return instant.astimezone(UTC)


def _interval(duration: timedelta) -> str:
    """Return a duration as SQL has it: in seconds, for days are not all of one length there."""
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
        logger.debug("cleanup of %s: another instance is at it", table)
