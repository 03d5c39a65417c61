"""Scenarios for optional features: units, moved holds, places, calendars, quotas of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from zoneinfo import ZoneInfo

from tests.model.books import Quota
from tests.model.limiter import Rule
from tests.model.make_vectors import DAY, HOUR, MINUTE, SECOND, Script, rule

RATES = ("fixed_window", "sliding_window", "sliding_log", "token_bucket")
SPANS = {"day": DAY, "week": 7 * DAY, "month": 31 * DAY, "year": 366 * DAY}


# --- Units ------------------------------------------------------------------------------------------------------------


def units() -> Iterator[Script]:
    """Yield limiters whose rules count different things."""
    for kind in RATES:
        rules = [
            rule("sliding_window", 5, MINUTE, name="calls"),
            rule(kind, 200, MINUTE, name="tokens", unit="tokens", tiers={"pro": Quota(1_000, MINUTE)}),
        ]
        yield two_units(Script(f"units: requests and tokens by {kind}", rules))
    scoped = [
        rule("token_bucket", 60, MINUTE, burst=4, name="calls", scope="user"),
        rule("sliding_log", 100, MINUTE, name="tokens", unit="tokens", scope="*"),
        rule("fixed_window", 10, HOUR, name="pages", unit="pages", scope="user"),
    ]
    yield three_units(Script("units: three of them, with a key for each", scoped))


def two_units(script: Script) -> Script:
    script.hit({"tokens": 60})
    first = script.hold({"tokens": 120, "requests": 2})
    script.check({"tokens": 40})
    script.hit({"tokens": 40})
    script.to_retry(-1)
    script.check({"tokens": 40})
    script.settle(first, {"tokens": 30})
    script.hit({"tokens": 40})
    script.hit({"tokens": 0})
    script.hit({"tokens": 1})
    script.wait(20 * SECOND)
    script.hit({"tokens": 200, "requests": 0})
    script.to_retry()
    script.hit({"tokens": 200, "requests": 0})
    script.hit({"tokens": 600}, tier="pro")
    script.record({"tokens": 40, "requests": 0})
    second = script.hold({"tokens": 0, "requests": 1})
    script.settle(second, {"tokens": 70})
    third = script.hold(1, tier="pro")
    script.settle(third, {"requests": 0})
    script.to_reset(-1)
    script.check(0)
    script.to_reset()
    script.hit({"tokens": 199})
    script.hit(1)
    script.hit(1)
    return script


def three_units(script: Script) -> Script:
    ann, bob = {"user": "ann"}, {"user": "bob"}
    for number in range(24):
        key = script.pick(ann, bob)
        cost = {"tokens": script.pick(0, 7, 20, 45), "pages": script.pick(0, 0, 1, 4)}
        if number % 4 == 3:
            held = script.hold(cost, key)
            script.wait(script.pick(1, 2 * SECOND))
            script.settle(held, {"tokens": script.pick(0, 5, 60)})
        elif not script.hit(cost, key):
            script.to_retry(script.pick(-1, 0, 0))
        script.wait(script.pick(0, 1, SECOND, 7 * SECOND))
    return script


# --- Moved holds ------------------------------------------------------------------------------------------------------


def moves() -> Iterator[Script]:
    """Yield holds that are confirmed later than they were taken."""
    for kind in RATES:
        yield confirmed(Script(f"moves: {kind}, confirmed in time and too late", [rule(kind, 10, MINUTE)]))
        yield confirmed_back(Script(f"moves: {kind}, and the clock goes back", [rule(kind, 10, MINUTE)]))
        yield wander(Script(f"moves: {kind}, here and there", [rule(kind, 12, MINUTE)]))
    several = [
        rule("sliding_log", 6, 10 * SECOND, name="seconds"),
        rule("token_bucket", 60, MINUTE, burst=9, name="steady"),
        rule("fixed_window", 400, MINUTE, name="tokens", unit="tokens"),
    ]
    yield confirmed_units(Script("moves: several rules and units", several))
    bucket = [rule("token_bucket", 60, MINUTE, burst=20, tiers={"pro": Quota(90, MINUTE, 30)})]
    yield faded(Script("moves: token_bucket, where what drains is what would be given back", bucket))
    yield other_shape(Script("moves: token_bucket, by another quota than it was held", bucket))


def confirmed(script: Script) -> Script:
    first = script.taken(6)
    script.wait(15 * SECOND)
    script.hit(3)
    script.confirm(first)
    script.wait(10 * SECOND)
    script.hit(2)
    script.to_retry()
    second = script.taken(4)
    script.to_reset(-1)
    script.to_reset()
    script.hit(8)
    script.confirm(second)  # expired, and no units are free
    script.to_retry(-1)
    script.confirm(second)
    script.wait(1)
    script.confirm(second)
    third = script.taken(1)
    script.wait(SECOND)
    script.to_reset()
    third = script.taken(3)
    script.wait(SECOND)
    script.confirm(third, 5)
    fourth = script.taken(4)
    script.wait(SECOND)
    script.confirm(fourth, 1)
    script.hit(4)
    script.to_reset(-1)
    script.check(10)
    return script


def confirmed_back(script: Script) -> Script:
    """After the clock was set back, units must not move to an earlier time: they would expire too early."""
    script.hit(2)
    script.wait(25 * SECOND)
    held = script.taken(5)
    script.go_back(20 * SECOND)
    script.confirm(held)
    script.wait(20 * SECOND)
    script.check(10)
    script.wait(SECOND)
    other = script.taken(3)
    script.go_back(3 * SECOND)
    script.hit(1)
    script.confirm(other, 4)
    script.to_retry(-1)
    script.confirm(other, 3)
    script.to_reset(-1)
    script.check(0)
    return script


def wander(script: Script) -> Script:
    open_holds: list[int] = []
    for _ in range(36):
        act = script.pick("hold", "hold", "hit", "confirm", "confirm", "settle")
        if act == "hold":
            number = script.hold(script.pick(1, 3, 5))
            if not script.holds[number].settled:
                open_holds.append(number)
        elif act == "hit" or not open_holds:
            script.hit(script.pick(1, 2, 4))
        else:
            number = open_holds.pop(int(script.chance.random() * len(open_holds)))
            if act == "settle":
                script.settle(number, script.pick(0, 1, 6))
            elif not script.confirm(number, script.pick(None, 2, 7)):
                script.to_retry(script.pick(-1, 0))
                open_holds.append(number)
        script.wait(script.pick(0, 1, 3 * SECOND, 20 * SECOND, 41 * SECOND))
    return script


def confirmed_units(script: Script) -> Script:
    held = script.taken({"tokens": 300})
    script.wait(2 * SECOND)
    script.hit({"tokens": 90, "requests": 4})
    script.confirm(held, {"tokens": 310})
    script.confirm(held, {"tokens": 200})
    other = script.taken({"tokens": 50, "requests": 0})
    script.wait(9 * SECOND)
    script.hit({"tokens": 0, "requests": 5})
    script.confirm(other, {"requests": 2})
    script.to_retry(-1)
    script.confirm(other, {"requests": 2})
    script.wait(1)
    script.confirm(other, {"requests": 2})
    return script


def faded(script: Script) -> Script:
    for hits in (5, 9, 10):
        held = script.taken(10)
        script.hit(10)
        script.wait(5 * SECOND)
        script.hit(5)
        script.confirm(held)
        script.to_retry(-1)
        script.confirm(held)
        script.wait(1)
        script.confirm(held)
        script.wait(hits * SECOND)
        late = script.taken(2)
        script.wait(700_001)
        script.hit(script.pick(1, 3))
        script.confirm(late, hits)
        script.to_retry(-1)
        script.confirm(late, hits)
        script.wait(1)
        script.confirm(late, hits)
        script.to_reset()
    return script


def other_shape(script: Script) -> Script:
    """Units of another shape are not returned by a move: they drain."""
    held = script.hold(8, tier="pro", quotas={"token_bucket": Quota(120, MINUTE, 40)})
    script.wait(SECOND)
    script.hit(3)
    script.confirm(held)
    again = script.taken(8)
    script.wait(SECOND)
    script.hit(1, tier="pro")
    script.confirm(again)
    script.to_retry(-1)
    script.confirm(again)
    script.wait(1)
    script.confirm(again)
    return script


# --- Places -----------------------------------------------------------------------------------------------------------


def places() -> Iterator[Script]:
    """Yield limiters of concurrent holds."""

    def of(limit: int, lease: int = MINUTE, **more: object) -> Rule:
        return rule("concurrent", limit, lease, **more)

    yield leased(Script("concurrent: released, settled, expired", [of(5)]))
    yield renewed(Script("concurrent: renewed in time and too late", [of(3)]))
    yield backwards(Script("concurrent: the clock goes back", [of(4)]))
    yield tiered(
        Script(
            "concurrent: tiers and quotas", [of(2, tiers={"pro": Quota(6, MINUTE), "none": Quota(0, MINUTE)})]
        )
    )
    yield leases_change(Script("concurrent: another lease midway", [of(4, MINUTE)], [of(4, 10 * SECOND)]))
    model = [
        rule("sliding_window", 20, MINUTE, name="calls", scope="*"),
        rule("token_bucket", 6_000, MINUTE, burst=900, name="tokens", unit="tokens", scope="user"),
        of(3, 30 * SECOND, name="at once", scope="user"),
        rule("fixed_window", 50, HOUR, name="hour", scope="user"),
    ]
    yield in_flight(Script("concurrent: with rates of other units, all or nothing", model))


def leased(script: Script) -> Script:
    first, second = script.hold(2), script.hold(1)
    script.wait(10 * SECOND)
    third = script.hold(2)
    script.hold(1)
    script.check(1)
    script.settle(second, 1)
    script.hold(1)
    script.settle(third, 9)  # its places are free, regardless of the cost
    script.to_retry(-1)
    script.check(3)
    script.hold(5)
    script.to_retry(-1)
    script.hold(3)
    script.wait(1)
    late = script.hold(3)
    script.settle(first, 0)
    script.wait(10 * SECOND)
    script.reset()
    fourth = script.hold(5)
    script.settle(late, 0)
    script.check(1)
    script.settle(fourth, 3)
    script.hold(4)
    script.to_reset(-1)
    script.check(5)
    script.to_reset()
    script.hold(5)
    return script


def renewed(script: Script) -> Script:
    first, second = script.taken(1), script.taken(2)
    for _ in range(3):
        script.wait(50 * SECOND)
        script.renew(first)
    script.renew(first)
    other = script.hold(2)
    script.renew(second)
    script.wait(MINUTE - 1)
    script.renew(other)
    script.wait(1)
    script.renew(first)
    script.renew(second)
    script.settle(second, 1)
    script.hold(2)
    script.settle(first, 1)
    third = script.taken(1)
    script.wait(MINUTE)
    script.renew(third)
    script.confirm(third)
    script.check(3)
    return script


def backwards(script: Script) -> Script:
    first = script.hold(2)
    script.wait(30 * SECOND)
    second = script.hold(1)
    script.go_back(20 * SECOND)
    third = script.hold(1)
    script.check(1)
    script.renew(first)
    script.wait(55 * SECOND)
    script.check(4)
    script.go_back(40 * SECOND)
    script.check(1)
    script.settle(second, 0)
    script.renew(third)
    script.wait(70 * SECOND)
    script.hold(4)
    script.to_retry(-1)
    script.hold(4)
    script.wait(1)
    script.hold(4)
    return script


def tiered(script: Script) -> Script:
    for tier in ("pro", None, "pro", "none", "unheard of"):
        script.hold(2, tier=tier)
        script.check(1, tier=tier)
        script.wait(5 * SECOND)
    script.hold(1, tier="none", quotas={"concurrent": Quota(9, MINUTE)})
    script.check(1, quotas={"concurrent": Quota(7, MINUTE)})
    script.check(2, quotas={"concurrent": Quota(3, MINUTE)})
    script.to_retry(-1)
    script.check(2, quotas={"concurrent": Quota(3, MINUTE)})
    script.wait(1)
    script.hold(2, quotas={"concurrent": Quota(3, MINUTE)})
    return script


def leases_change(script: Script) -> Script:
    first = script.hold(1)
    script.version = 1
    second = script.hold(2)
    script.hold(2)
    script.to_retry(-1)
    script.check(2)
    script.wait(1)
    script.hold(2)
    script.renew(second)
    script.renew(first)
    script.version = 0
    script.hold(1)
    script.check(3)
    script.to_retry()
    script.hold(3)
    return script


def in_flight(script: Script) -> Script:
    ann, bob = {"user": "ann"}, {"user": "bob"}
    open_holds: list[int] = []
    for _ in range(44):
        act = script.pick("hold", "hold", "settle", "settle", "release", "confirm", "renew")
        if act == "hold" or not open_holds:
            number = script.hold({"tokens": script.pick(50, 200, 500)}, script.pick(ann, ann, bob))
            if not script.holds[number].settled:
                open_holds.append(number)
            elif script.pick(True, False):
                script.to_retry(script.pick(-1, 0))
        elif act == "renew":
            script.renew(script.pick(*open_holds))
        else:
            number = open_holds.pop(0)
            if act == "settle":
                script.settle(number, {"tokens": script.pick(0, 40, 700)})
            elif act == "release":
                script.settle(number, 0)
            elif not script.confirm(number, {"tokens": script.pick(100, 400)}):
                open_holds.append(number)
        script.wait(script.pick(0, SECOND, 3 * SECOND, 11 * SECOND))
    return script


# --- Calendars --------------------------------------------------------------------------------------------------------


def calendars() -> Iterator[Script]:
    """Yield windows of a calendar around its edges: changed clocks, months of every length, leap years."""
    for span, zone, *edges in (
        ("day", "Europe/Berlin", (2024, 3, 31), (2024, 10, 27), (2025, 1, 1)),
        ("day", "America/Havana", (2023, 3, 12), (2023, 11, 5)),
        ("day", "Pacific/Apia", (2011, 12, 31)),
        ("day", "UTC", (2024, 2, 29)),
        ("week", "Europe/Berlin", (2024, 4, 1), (2024, 12, 30)),
        ("month", "America/New_York", (2024, 2, 1), (2024, 3, 1), (2023, 3, 1), (2024, 12, 1)),
        ("year", "Asia/Kolkata", (2024, 1, 1), (2025, 1, 1)),
    ):
        own = rule(
            "calendar", 10, SPANS[span], span=span, timezone=zone, tiers={"pro": Quota(25, SPANS[span])}
        )
        for year, month, day in edges:
            yield around(
                Script(f"calendar: {span} of {zone} at {year}-{month}-{day}", [own]), zone, year, month, day
            )
    both = [
        rule(
            "calendar", 6, SPANS["month"], span="month", timezone="Europe/Berlin", name="month", unit="pages"
        ),
        rule("sliding_window", 3, MINUTE, name="minute"),
    ]
    yield with_others(Script("calendar: with a window and another unit", both))


def around(script: Script, zone: str, year: int, month: int, day: int) -> Script:
    """Count up to the edge, at it and after it."""
    first = datetime(year, month, day, tzinfo=ZoneInfo(zone))
    edge = round(first.timestamp()) * SECOND
    script.now = script.latest = edge - 20 * HOUR
    script.hit(4)
    held = script.hold(3)
    script.hit(4)
    script.check(12, tier="pro")
    script.hit(2, quotas={"calendar": Quota(7, script.limiter.rules[0].quota.period)})
    script.wait(edge - 2 - script.now)
    script.check(4)
    script.hit(4)
    script.to_retry(-1)
    script.settle(held, 2)
    script.hit(5)
    last = script.hold(1)
    script.wait(1)
    script.confirm(last)
    script.hit(10)
    script.go_back(5)
    script.hit(1)
    script.check(0)
    script.to_reset(-1)
    script.check(0)
    script.record(3)
    script.wait(1)
    script.check(10)
    return script


def with_others(script: Script) -> Script:
    for _ in range(9):
        if not script.hit({"pages": script.pick(0, 1, 2)}):
            script.to_retry(script.pick(-1, 0))
        script.wait(script.pick(0, SECOND, 30 * SECOND))
    held = script.hold({"pages": 1})
    script.wait(3 * DAY)
    script.settle(held, {"pages": 0})
    return script


# --- Quotas of a call --------------------------------------------------------------------------------------------------


def quotas() -> Iterator[Script]:
    """Yield callers with a quota per call; all count in one state."""
    for kind in RATES:
        yield alternating(
            Script(f"quotas: {kind}", [rule(kind, 10, MINUTE, tiers={"pro": Quota(30, MINUTE)})])
        )
    large, odd = (
        [rule("token_bucket", limit, HOUR, burst=burst, name="bucket")]
        for limit, burst in ((100, 10_000_000), (7, 40))
    )
    yield uncountable(Script("quotas: token_bucket, a debt that the next limit cannot count", large, odd))


def alternating(script: Script) -> Script:
    (own,) = script.limiter.rules
    for limit in (10, 40, 5, 0, 100, 7):
        given = {own.name: Quota(limit, MINUTE)}
        script.hit(4, quotas=given)
        script.hit(3)
        script.check(2, tier="pro", quotas=given)
        script.wait(script.pick(1, SECOND, 9 * SECOND))
        held = script.hold(2, quotas=given)
        script.wait(SECOND)
        script.settle(held, script.pick(0, 1, 4))
    script.hit(3, quotas={own.name: Quota(6, MINUTE)})
    script.to_retry(-1)
    script.check(3, quotas={own.name: Quota(6, MINUTE)})
    script.wait(1)
    script.hit(3, quotas={own.name: Quota(6, MINUTE)})
    return script


def uncountable(script: Script) -> Script:
    """With seven an hour a unit is 3,600,000,000 parts: ten million units are more than can be counted in these."""
    script.hit(10_000_000)
    for wait in (0, DAY, 1000 * DAY):
        script.wait(wait)
        script.version = 1
        script.hit(1)
        script.version = 0
        script.check(1)
    script.version = 1
    script.check(40)
    script.to_retry(-1)
    script.check(1)
    script.wait(1)
    script.hit(40)
    return script


# --- Penalties --------------------------------------------------------------------------------------------------------


def penalties() -> Iterator[Script]:
    """Yield limiters that refuse everything for a while after some refusals."""
    for kind in RATES:
        rules = [rule(kind, 3, MINUTE), rule("penalty", 3, 10 * MINUTE)]
        yield punished(Script(f"penalty: after refusals by {kind}", rules))
    growing = rule("penalty", 2, MINUTE, growth=3, longest=HOUR)
    at_once = [rule("fixed_window", 1, SECOND), replace(growing, quota=Quota(1, MINUTE))]
    yield repeated(Script("penalty: longer every time", [rule("fixed_window", 1, SECOND), growing], at_once))
    yield set_back(Script("penalty: the clock goes back", [rule("sliding_log", 1, SECOND), growing]))
    scoped = [
        rule("sliding_window", 2, SECOND, name="person", scope="user"),
        rule("sliding_window", 3, SECOND, name="place", scope="realm"),
        rule("concurrent", 2, MINUTE, name="at once", scope="user"),
        rule("fixed_window", 0, SECOND, name="none", scope="user", tiers={"pro": Quota(9, SECOND)}),
        rule("penalty", 2, MINUTE, name="person punished", scope="user"),
        rule("penalty", 1, 5 * SECOND, name="place punished", scope="realm"),
    ]
    yield several(Script("penalty: one per scope, for rates that refuse for a while", scoped))
    units = [
        rule("token_bucket", 100, MINUTE, name="tokens", unit="tokens"),
        rule("sliding_log", 5, MINUTE, name="calls"),
        rule("penalty", 2, MINUTE),
    ]
    yield wandering(Script("penalty: units, holds and records", units))


def punished(script: Script) -> Script:
    script.hit(3)
    held = script.hold(1)
    for _ in range(3):
        script.check(1)
        script.hit(1)
    script.settle(held, 0)
    script.hit(0)
    script.record(1)
    script.to_retry(-1)
    script.hit(1)
    script.to_retry()
    first = script.hold(2)
    script.hit(2)
    script.wait(10 * MINUTE - 1)
    script.record(3)
    script.hit(2)
    script.wait(1)
    script.hit(3)
    script.hit(3)
    script.settle(first, 2)
    script.hit(3)
    script.hit(3)
    script.reset()
    script.hit(3)
    return script


def repeated(script: Script) -> Script:
    for pause in (0, 0, 0, 0, 0, HOUR - 1, HOUR, 0):
        script.hit()
        script.hit()
        script.wait(1)
        script.hit()
        script.hit()
        script.to_retry(-1)
        script.check()
        script.wait(1 + pause)
    script.hit()
    script.hit()
    script.version = 1
    script.wait(1)
    script.hit()
    script.to_reset(-1)
    script.check(0)
    script.to_reset()
    script.check(0)
    return script


def set_back(script: Script) -> Script:
    script.hit()
    script.hit()
    script.go_back(30 * SECOND)
    script.hit()
    script.check()
    script.wait(20 * SECOND)
    script.hit()
    script.to_retry(-1)
    script.check()
    script.to_retry()
    script.hit()
    return script


def several(script: Script) -> Script:
    people = ("ann", "north"), ("bob", "north"), ("ann", "south")
    for number in range(60):
        user, realm = people[number % 3]
        key = {"user": user, "realm": realm}
        tier = script.pick("pro", "pro", "pro", None)
        held = script.hold(script.pick(1, 1, 2), key, tier)
        if script.pick(True, False):
            script.settle(held, 1)
        script.wait(script.pick(0, 1, 100_000, SECOND, 2 * SECOND))
    script.reset({"user": "ann", "realm": "north"})
    return script


def wandering(script: Script) -> Script:
    for number in range(50):
        cost = {"tokens": script.pick(0, 10, 40, 90), "requests": script.pick(0, 1, 1)}
        if number % 4 == 3:
            held = script.hold(cost)
            script.wait(script.pick(1, SECOND))
            script.settle(held, {"tokens": script.pick(0, 20, 95)})
        elif number % 4 == 2:
            held = script.hold(cost)
            script.wait(script.pick(1, SECOND))
            script.confirm(held, {"tokens": script.pick(5, 60, 99)})
        else:
            script.hit(cost)
        script.wait(script.pick(0, 1, SECOND, 20 * SECOND))
    return script
