"""Write the vectors of `headgate.testing` from the model: `python -m tests.model.make_vectors`.

The scenarios are scripted, with a seeded source of chance for the long ones, so that the same files come out every time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.model.books import Figures, PenaltyBook, Quota, TokenBook
from tests.model.limiter import Cost, Hold, Key, ModelLimiter, Quotas, Rule, binding

FOLDER = Path(__file__).resolve().parents[2] / "src" / "headgate" / "testing" / "vectors"
START = 1_700_000_000_123_457  # not on the edge of a window
MS, SECOND, MINUTE, HOUR, DAY = 1_000, 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000
MONTH = 30 * DAY


class Script:
    """Logs a scenario while the model runs it.

    Args:
        name: The subject of the scenario.
        versions: The rules, and then the same rules with other limits.
    """

    def __init__(self, name: str, *versions: Sequence[Rule]) -> None:
        self.name = name
        self.versions = versions
        books: dict[tuple[str, str], Any] = {}
        self.limiters = [ModelLimiter(rules, books) for rules in versions]
        self.steps: list[dict[str, Any]] = []
        self.holds: list[Hold] = []
        self.now = self.latest = START
        self.version = 0
        self.last: Figures | None = None
        self.last_at = START
        self.chance = random.Random(name)

    @property
    def limiter(self) -> ModelLimiter:
        return self.limiters[self.version]

    def hit(
        self, cost: Cost = 1, key: Key = "a", tier: str | None = None, quotas: Quotas | None = None
    ) -> bool:
        answers = self.limiter.hit(self.now, key, cost, tier, quotas)
        return self._said("hit", answers, key, cost, tier, quotas=_quotas(quotas))

    def check(
        self, cost: Cost = 1, key: Key = "a", tier: str | None = None, quotas: Quotas | None = None
    ) -> bool:
        answers = self.limiter.check(self.now, key, cost, tier, quotas)
        return self._said("check", answers, key, cost, tier, quotas=_quotas(quotas))

    def hold(
        self, cost: Cost = 1, key: Key = "a", tier: str | None = None, quotas: Quotas | None = None
    ) -> int:
        answers, hold = self.limiter.hold(self.now, key, cost, tier, quotas)
        self.holds.append(hold)
        number = len(self.holds) - 1
        self._said("hold", answers, key, cost, tier, hold=number, quotas=_quotas(quotas))
        return number

    def taken(self, cost: Cost = 1, key: Key = "a", tier: str | None = None) -> int:
        """Hold units, after a wait if necessary."""
        number = self.hold(cost, key, tier)
        while self.holds[number].settled:
            self.to_retry()
            number = self.hold(cost, key, tier)
        return number

    def settle(self, number: int, cost: Cost) -> None:
        hold = self.holds[number]
        hold.settle(self.now, cost)
        self._did("settle", hold.request.key, cost, hold=number)
        self.check(0, hold.request.key, hold.request.tier)

    def confirm(self, number: int, cost: Cost | None = None) -> bool:
        hold = self.holds[number]
        if hold.settled:
            return True  # a second call returns the same answer without the store
        answers = hold.confirm(self.now, cost)
        said = self._said("confirm", answers, hold.request.key, cost or 0, None, hold=number)
        self._look(hold)
        return said

    def renew(self, number: int) -> bool:
        hold = self.holds[number]
        said = self._said("renew", hold.renew(self.now), hold.request.key, 0, None, hold=number)
        self._look(hold)
        return said

    def _look(self, hold: Hold) -> None:
        """Check the state after a call, and keep the answer of the call as the last answer."""
        last, last_at = self.last, self.last_at
        self.check(0, hold.request.key, hold.request.tier)
        self.last, self.last_at = last, last_at

    def record(self, cost: Cost, key: Key = "a", tier: str | None = None) -> None:
        self.limiter.record(self.limiter.request(self.now, key, cost, tier))
        self._did("record", key, cost, tier)
        self.check(0, key, tier)

    def reset(self, key: Key = "a") -> None:
        self.limiter.reset(key)
        self._did("reset", key, 0)
        self.check(0, key)

    def wait(self, microseconds: int) -> None:
        self.now += microseconds
        self.latest = max(self.latest, self.now)

    def go_back(self, microseconds: int) -> None:
        """Set the clock back, but not before a state became fresh: a store may have deleted it."""
        target = self.now - microseconds
        for book in self.limiter.books.values():
            if isinstance(book, PenaltyBook):
                if book.is_fresh(self.latest) and not book.is_fresh(target):
                    return
                continue
            quota = book.events[-1].quota if isinstance(book, TokenBook) and book.events else Quota(1, 1)
            used = book.used(quota)
            if used(self.latest) == 0 and used(target) != 0:
                return
        self.now = target

    def to_retry(self, nudge: int = 0) -> None:
        """Advance to the retry time of the last refusal."""
        if self.last is not None and self.last.retry_after is not None:
            self.wait(max(0, self.last_at + self.last.retry_after + nudge - self.now))

    def to_reset(self, nudge: int = 0) -> None:
        """Advance to the reset time of the last answer."""
        if self.last is not None and self.last.reset_after is not None:
            self.wait(max(0, self.last_at + self.last.reset_after + nudge - self.now))

    def pick(self, *choices: Any) -> Any:
        # Only the sequence of random() is the same in every version of Python.
        return choices[int(self.chance.random() * len(choices))]

    def _said(
        self, op: str, answers: list[Figures], key: Key, cost: Cost, tier: str | None, **more: Any
    ) -> bool:
        binds = binding(answers)
        self.last, self.last_at = answers[binds], self.now
        verdicts = [
            [answer.allowed, answer.limit, answer.remaining, answer.retry_after, answer.reset_after]
            for answer in answers
        ]
        self._did(op, key, cost, tier, **more, binds=binds or None, verdicts=verdicts)
        return self.last.allowed

    def _did(self, op: str, key: Key, cost: Cost, tier: str | None = None, **more: Any) -> None:
        step = {"op": op, "now": self.now, "key": key, "cost": cost or None, "tier": tier}
        step |= {"version": self.version or None, **more}
        self.steps.append({name: value for name, value in step.items() if value is not None})


def _quotas(quotas: Quotas | None) -> dict[str, Any] | None:
    return quotas and {
        name: {"limit": quota.limit} | ({} if quota.burst is None else {"burst": quota.burst})
        for name, quota in quotas.items()
    }


def rule(kind: str, limit: int, period: int, *, burst: int | None = None, **options: Any) -> Rule:
    return Rule(kind, Quota(limit, period, burst), options.pop("name", kind), **options)


Kinds = Callable[..., Rule]


# --- Scenarios for every kind of rule ---------------------------------------------------------------------------------


def scenarios(kind: str, **options: Any) -> Iterator[Script]:
    """Yield the scenarios that every kind of rule has."""
    label = " ".join([kind, *(f"{name}={value}" for name, value in options.items())])

    def of(limit: int, period: int, **more: Any) -> list[Rule]:
        return [rule(kind, limit, period, **options, **more)]

    yield fill_and_wait(Script(f"{label}: a burst of exactly the limit, then waiting", of(5, MINUTE)))
    yield wander(Script(f"{label}: a thousand a second", of(1_000, SECOND)), costs=(1, 140, 500, 1_000))
    yield wander(Script(f"{label}: the shortest period", of(3, MS)), costs=(1, 1, 2, 3))
    yield wander(Script(f"{label}: once a month", of(1, MONTH)), costs=(1,))
    yield wander(Script(f"{label}: a prime limit in a year", of(997, 365 * DAY)), costs=(1, 100, 499, 997))
    yield wander(
        Script(f"{label}: ten a second, in buckets of uneven width", of(10, SECOND)), costs=(1, 3, 10)
    )
    yield whole_capacity(Script(f"{label}: a cost equal to the capacity", of(7, 10 * SECOND)))
    yield lowered(
        Script(f"{label}: the limit lowered and raised midway", of(20, MINUTE), of(6, MINUTE), of(0, MINUTE))
    )
    yield overlapping(Script(f"{label}: overlapping holds with partial settles", of(20, 100 * SECOND)))
    yield reset_between(Script(f"{label}: a reset between hold and settle", of(10, MINUTE)))
    yield beyond(Script(f"{label}: recorded beyond the limit", of(4, MINUTE)))
    yield backwards(Script(f"{label}: the clock going back", of(6, MINUTE)))
    tiers = {"pro": Quota(40, HOUR), "none": Quota(0, HOUR)}
    yield tiered(Script(f"{label}: tiers that count together", of(10, HOUR, tiers=tiers)))
    yield keys(Script(f"{label}: several keys", of(3, 2 * SECOND)))
    yield everything(Script(f"{label}: everything at once", of(9, MINUTE), of(4, MINUTE)), steps=60)


def fill_and_wait(script: Script) -> Script:
    for _ in range(7):
        script.hit()
        script.wait(1)
    script.to_retry(-1)
    script.check()
    script.hit()
    script.wait(1)
    script.hit()
    script.hit()
    script.to_reset(-1)
    script.check(0)
    script.wait(1)
    script.check(0)
    script.hit(5)
    return script


def wander(script: Script, costs: Sequence[int]) -> Script:
    """ModelRequest at chosen and at random instants."""
    period = script.limiter.rules[0].quota.period
    for _ in range(14):
        cost = script.pick(*costs)
        if not script.hit(cost):
            script.to_retry(-1)
            script.check(cost)
            script.wait(script.pick(1, 1, period // 2))
        else:
            script.wait(
                script.pick(0, 1, period // 60 + 1, period // 7, int(script.chance.random() * period))
            )
    return script


def whole_capacity(script: Script) -> Script:
    for _ in range(4):
        script.hit(7)
        script.hit(7)
        script.check(1)
        script.to_retry(-1)
        script.hit(script.pick(1, 7))
        script.check(7)
        script.to_retry()
    return script


def lowered(script: Script) -> Script:
    for _ in range(4):
        script.hit(4)
        script.wait(5 * SECOND)
    for version in (1, 2, 0, 1):
        script.version = version
        script.check(0)
        script.hit(3)
        script.to_retry(-1)
        script.check(3)
        script.wait(1)
        script.hit(3)
        script.wait(7 * SECOND)
    return script


def overlapping(script: Script) -> Script:
    for first, second in ((0, 1), (1, 0)):
        held = [script.hold(10), script.hold(10)]
        script.hit()
        script.wait(50 * SECOND)
        script.settle(held[first], 3)
        script.hit(5)
        script.wait(25 * SECOND)
        script.settle(held[second], 0)
        script.settle(held[first], 0)  # only the first time counts
        script.hit(12)
        script.to_reset(-1)
        script.hit(1)
        script.to_reset()
    short = script.hold(4)
    script.settle(short, 9)
    script.wait(10 * SECOND)
    late = script.hold(6)
    script.to_reset()
    script.hit(2)
    script.settle(late, 0)  # too late: it no longer counts
    script.hit(18)
    return script


def reset_between(script: Script) -> Script:
    script.hit(1)
    held = script.hold(6)
    script.reset()
    script.hit(6)
    script.settle(held, 0)
    script.check(5)
    script.wait(SECOND)
    again = script.hold(4)
    script.settle(again, 2)
    script.reset()
    script.hit(10)
    return script


def beyond(script: Script) -> Script:
    script.record(11)
    script.hit()
    script.wait(MINUTE // 3)
    script.record(2)
    for _ in range(3):
        script.hit(2)
        script.to_retry(-1)
        script.check(2)
        script.wait(1)
    script.hit(2)
    script.record(0)
    return script


def backwards(script: Script) -> Script:
    script.hit(2)
    script.wait(40 * SECOND)
    script.hit(2)
    script.go_back(30 * SECOND)
    script.hit(1)
    script.hit(2)
    script.go_back(30 * SECOND)
    script.check(1)
    script.hit(1)
    script.hit(1)
    script.to_retry(-1)
    script.check(1)
    script.wait(1)
    held = script.hold(1)
    script.go_back(10 * SECOND)
    script.settle(held, 0)
    script.hit(1)
    script.hit(1)
    return script


def tiered(script: Script) -> Script:
    for tier in ("pro", None, "pro", "none", "unheard of", "pro", None):
        script.hit(6, tier=tier)
        script.check(1, tier=tier)
        script.wait(7 * MINUTE + 1)
    held = script.hold(3, tier="pro")
    script.hit(1)
    script.wait(MINUTE)
    script.settle(held, 1)
    script.record(2, tier="none")
    script.check(0)
    script.to_reset(-1)
    script.check(0, tier="pro")
    script.to_reset()
    script.hit(10)
    return script


def keys(script: Script) -> Script:
    for number in range(18):
        script.hit(script.pick(1, 2), key=("a", "b", "A")[number % 3])
        script.wait(script.pick(0, 90_001, 333_333))
    return script


def everything(script: Script, steps: int) -> Script:
    """Run a long sequence of random operations at random times."""
    period = script.limiter.rules[0].quota.period
    for _ in range(steps):
        script.version = script.pick(0, 0, 0, 1)
        cost, key = script.pick(0, 1, 1, 2, 4), script.pick("a", "a", "b")
        act = script.pick("hit", "hit", "hit", "check", "hold", "hold", "settle", "settle", "record", "reset")
        if act == "settle" and script.holds:
            script.settle(script.pick(*range(len(script.holds))), cost)
        elif act in ("record", "hold", "check"):
            getattr(script, act)(cost, key)
        elif act == "reset" and script.pick(True, False, False):
            script.reset(key)
        elif not script.hit(cost, key):
            script.to_retry(script.pick(-1, 0, 0))
        if script.pick(True, False, False, False):
            script.go_back(int(script.chance.random() * period))
        else:
            script.wait(script.pick(0, 1, period // 60, int(script.chance.random() * period / 3)))
    return script


# --- Scenarios for one kind -------------------------------------------------------------------------------------------


def token_bucket_scenarios() -> Iterator[Script]:
    """Yield scenarios of token buckets only: other burst sizes, coarse ticks, levels in another shape."""

    def of(limit: int, period: int, burst: int, **more: Any) -> list[Rule]:
        return [rule("token_bucket", limit, period, burst=burst, **more)]

    name = "token_bucket"
    yield wander(Script(f"{name}: a small burst", of(600, MINUTE, 4)), costs=(1, 2, 4))
    yield wander(Script(f"{name}: a burst above the limit", of(2, SECOND, 50)), costs=(1, 20, 50))
    yield wander(Script(f"{name}: a rate that divides nothing", of(7, 11 * MS, 13)), costs=(1, 5, 13))
    yield wander(Script(f"{name}: the last period in microseconds", of(17, HOUR, 3)), costs=(1, 2, 3))
    yield wander(Script(f"{name}: the first period in milliseconds", of(17, HOUR + MS, 3)), costs=(1, 2, 3))
    yield wander(Script(f"{name}: 30 a month in bursts of 5", of(30, MONTH, 5)), costs=(1, 3, 5))
    yield overlapping_by_design(Script(f"{name}: the overlapping holds of the design", of(1, SECOND, 20)))
    yield released_in_any_order(Script(f"{name}: overlapping holds in any order", of(1, SECOND, 20)))
    yield released_and_set_back(Script(f"{name}: released, then the clock goes back", of(1, SECOND, 20)))
    yield set_back_between(Script(f"{name}: the clock goes back between two releases", of(1, SECOND, 20)))
    alternating = of(60, MINUTE, 20, tiers={"large": Quota(60, MINUTE, 200), "odd": Quota(7, MINUTE, 31)})
    yield alternate(Script(f"{name}: changing between tiers", alternating))
    changing = of(10, MINUTE, 100, tiers={"fast": Quota(100, MINUTE, 100), "odd": Quota(7, MINUTE, 31)})
    yield forgotten_by_one(Script(f"{name}: fresh for one tier is fresh for all", changing))
    yield another_shape(Script(f"{name}: held in one tier, hit in another", changing))
    yield everything(Script(f"{name}: other bursts midway", of(9, MINUTE, 4), of(7, MINUTE, 11)), steps=60)
    yield everything(
        Script(f"{name}: other bursts midway, by milliseconds", of(9, DAY, 4), of(7, DAY, 11)), steps=40
    )


def overlapping_by_design(script: Script) -> Script:
    """Without the total of returned units, the second release would return drained units."""
    first, second = script.hold(10), script.hold(10)
    script.settle(first, 0)
    script.wait(10 * SECOND)
    script.hit(10)
    script.settle(second, 0)
    script.check(20)
    return script


def released_in_any_order(script: Script) -> Script:
    """Three holds, a hit, then all releases: the rest of each hold depends on the others."""
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        held = []
        for cost in (4, 6, 5):
            held.append(script.hold(cost))
            script.wait(SECOND)
        script.hit(3)
        for number in order:
            script.wait(1_500_001)
            script.settle(held[number], 0)
        script.to_reset()
    return script


def released_and_set_back(script: Script) -> Script:
    """A hold released before any other call has no effect, also on the reading of time."""
    script.hit(12)
    script.wait(5 * SECOND)
    outer = script.hold(6)
    script.wait(2 * SECOND)
    inner = script.hold(5)
    script.wait(SECOND)
    script.settle(inner, 0)
    script.go_back(4 * SECOND)
    script.check(1)
    script.wait(4 * SECOND)
    script.settle(outer, 0)
    script.go_back(7 * SECOND)
    script.check(10)
    script.hit(9)
    script.wait(7 * SECOND)
    last = script.hold(4)
    script.hit(1)
    script.settle(last, 0)  # after another call the time of the newest entry is kept
    script.go_back(5 * SECOND)
    script.check(20)
    return script


def set_back_between(script: Script) -> Script:
    """Drained units of a hold are not returned, even if the clock was set back."""
    first, second = script.hold(5), script.hold(5)
    script.wait(5 * SECOND)
    script.hit(5)
    script.settle(second, 0)
    script.go_back(5 * SECOND)
    script.settle(first, 0)
    script.wait(5 * SECOND)
    script.check(16)
    script.hit(15)
    return script


def alternate(script: Script) -> Script:
    """Units taken in one tier count in every tier, also beyond its burst."""
    for _ in range(4):
        for tier, cost in (("large", 150), ("large", 50), (None, 1), ("odd", 1), (None, 20), ("large", 7)):
            if not script.hit(cost, tier=tier):
                script.to_retry(-1)
                script.check(cost, tier=tier)
            script.wait(SECOND + 1)
    return script


def another_shape(script: Script) -> Script:
    """A hold returns nothing if the level was converted to another shape before the release."""
    for tier in ("fast", None, "odd"):
        held = script.hold(7, tier=tier)
        script.wait(SECOND + 1)
        script.hit(1, tier="odd")
        script.wait(SECOND + 1)
        if tier is None:
            script.hit(1)  # the shape of the hold again, but after two conversions
        script.settle(held, 2)
        script.check(1, tier=tier)
        script.wait(11 * SECOND)
    return script


def forgotten_by_one(script: Script) -> Script:
    script.hit(100, tier="fast")
    script.wait(30 * SECOND)
    script.check(50)
    script.check(1, tier="odd")
    script.wait(30 * SECOND - 1)
    script.check(100)
    script.wait(1)
    script.check(100)
    script.hit(31, tier="odd")
    script.hit(1, tier="fast")
    script.wait(SECOND + 1)
    script.record(40, tier="odd")
    script.check(1)
    script.to_reset(-1)
    script.check(0)
    script.to_reset()
    script.hit(100)
    return script


def several_rules() -> Iterator[Script]:
    """Yield limiters with several rules: all are charged, or none."""
    plain = [
        rule("fixed_window", 4, SECOND, name="spike"),
        rule("sliding_window", 10, MINUTE, name="steady"),
        rule("token_bucket", 100, HOUR, burst=8, name="burst"),
    ]
    stricter = [
        rule("fixed_window", 4, SECOND, name="spike"),
        rule("sliding_window", 5, MINUTE, name="steady"),
        rule("token_bucket", 100, HOUR, burst=4, name="burst"),
    ]
    yield everything(Script("several rules: one key", plain, stricter), steps=60)
    scoped = [
        rule("sliding_log", 3, SECOND, name="person", scope="user", tiers={"pro": Quota(6, SECOND)}),
        rule("token_bucket", 20, MINUTE, burst=6, name="place", scope="realm"),
        rule("sliding_window", 12, MINUTE, name="all", scope="*"),
    ]
    yield scopes(Script("several rules: a key for each", scoped))
    never = [rule("sliding_window", 5, MINUTE, name="some"), rule("fixed_window", 0, MINUTE, name="none")]
    yield fill_and_wait(Script("several rules: one of them refuses everything", never))


def scopes(script: Script) -> Script:
    people = ("ann", "north"), ("bob", "north"), ("ann", "south")
    for number in range(45):
        user, realm = people[number % 3]
        key, tier = {"user": user, "realm": realm}, script.pick(None, "pro")
        if number % 5 == 4:
            held = script.hold(2, key, tier)
            script.wait(script.pick(1, 100_000))
            script.settle(held, script.pick(0, 1, 3))
        elif not script.hit(script.pick(1, 2, 3), key, tier):
            script.to_retry(script.pick(-1, 0, 0))
        script.wait(script.pick(0, 1, 200_000, 3 * SECOND))
    script.reset({"user": "ann", "realm": "north"})
    return script


# --- Files ------------------------------------------------------------------------------------------------------------


def make_files() -> dict[str, str]:
    """Return the text of every vector file by its name."""
    from tests.model import feature_scenarios  # imports this module

    files = {
        "fixed_window.json": scenarios("fixed_window"),
        "sliding_window.json": scenarios("sliding_window"),
        "sliding_window_lenient.json": scenarios("sliding_window", strict=False),
        "sliding_window_coarse.json": scenarios("sliding_window", buckets=7),
        "sliding_log.json": scenarios("sliding_log"),
        "token_bucket.json": (*scenarios("token_bucket"), *token_bucket_scenarios()),
        "several_rules.json": several_rules(),
        "units.json": feature_scenarios.units(),
        "moves.json": feature_scenarios.moves(),
        "concurrent.json": feature_scenarios.places(),
        "calendar.json": feature_scenarios.calendars(),
        "quotas.json": feature_scenarios.quotas(),
        "penalty.json": feature_scenarios.penalties(),
    }
    return {name: as_json(scripts) for name, scripts in files.items()}


def as_json(scripts: Iterator[Script] | tuple[Script, ...]) -> str:
    """Return scenarios as text with one step on each line."""
    return "[\n" + ",\n".join(_scenario(script) for script in scripts) + "\n]\n"


def _scenario(script: Script) -> str:
    versions = ",\n".join(_compact([_rule(rule) for rule in rules]) for rules in script.versions)
    steps = ",\n".join(_compact(step) for step in script.steps)
    return f'{{"name":{_compact(script.name)},\n"versions":[\n{versions}\n],\n"steps":[\n{steps}\n]}}'


def _rule(rule: Rule) -> dict[str, Any]:
    fields = {"kind": rule.kind, "limit": rule.quota.limit, "period_us": rule.quota.period, "name": rule.name}
    if rule.quota.burst is not None:
        fields["burst"] = rule.quota.burst
    if rule.scope is not None:
        fields["scope"] = rule.scope
    if rule.kind == "sliding_window":
        fields |= {"buckets": rule.buckets, "strict": rule.strict}
    if rule.kind == "calendar":
        fields |= {"span": rule.span, "timezone": rule.timezone}
    if rule.growth > 1:
        fields |= {"growth": rule.growth, "longest_us": rule.longest}
    if rule.unit != "requests":
        fields["unit"] = rule.unit
    if rule.tiers:
        fields["tiers"] = {
            tier: {"limit": quota.limit} | ({} if quota.burst is None else {"burst": quota.burst})
            for tier, quota in rule.tiers.items()
        }
    return fields


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, text in make_files().items():
        (FOLDER / file_name).write_text(text, encoding="utf-8")
        print(file_name, text.count('"op"'), "steps")
