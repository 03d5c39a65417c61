"""Rules and a limiter over the books: several rules and keys, tiers, holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

from tests.model.books import Book, Charge, Figures, Quota, TokenBook, WindowBook, figures

Key = str | Mapping[str, str]


@dataclass(frozen=True)
class Rule:
    """What a rule of `headgate` says, in the model's own words."""

    kind: str
    quota: Quota
    name: str
    scope: str | None = None
    tiers: Mapping[str, Quota] = field(default_factory=dict)
    buckets: int = 60
    strict: bool = True

    def quota_for(self, tier: str | None) -> Quota:
        return self.quota if tier is None else self.tiers.get(tier, self.quota)

    def key_of(self, key: Key) -> str:
        if self.scope == "*":
            return "everybody"
        return key if isinstance(key, str) else key[str(self.scope)]

    def new_book(self) -> Book:
        period = self.quota.period
        if self.kind == "token_bucket":
            return TokenBook(period)
        if self.kind == "fixed_window":
            return WindowBook(lambda at: (at // period + 1) * period)
        if self.kind == "sliding_log":
            return WindowBook(lambda at: at + period)
        width = (period + self.buckets - 1) // self.buckets
        lifetime = period + width if self.strict else period
        return WindowBook(lambda at: at // width * width + lifetime)


Books = dict[tuple[str, str], Book]


class ModelLimiter:
    """Decides by the books of its rules; limiters that share `books` count together."""

    def __init__(self, rules: Sequence[Rule], books: Books | None = None) -> None:
        self.rules = tuple(rules)
        self.books: Books = {} if books is None else books

    def hit(self, now: int, key: Key, cost: int, tier: str | None = None) -> list[Figures]:
        answers, admitted = self._decide(now, key, cost, tier)
        if not admitted or not cost:
            return answers
        self.record(now, key, cost, tier)
        return self._figures(now, key, cost, tier, [True] * len(self.rules))

    def check(self, now: int, key: Key, cost: int, tier: str | None = None) -> list[Figures]:
        answers, admitted = self._decide(now, key, cost, tier)
        if not admitted or not cost:
            return answers
        shadow = ModelLimiter(self.rules, {place: copy(book) for place, book in self.books.items()})
        return shadow.hit(now, key, cost, tier)

    def hold(self, now: int, key: Key, cost: int, tier: str | None = None) -> tuple[list[Figures], Hold]:
        answers, admitted = self._decide(now, key, cost, tier)
        if not admitted or not cost:
            return answers, Hold(self, cost, [], key, tier, settled=not admitted)
        charges = self.record(now, key, cost, tier)
        answers = self._figures(now, key, cost, tier, [True] * len(self.rules))
        return answers, Hold(self, cost, charges, key, tier, settled=False)

    def record(
        self, now: int, key: Key, cost: int, tier: str | None = None
    ) -> list[tuple[Book, Charge | None]]:
        if not cost:
            return []
        return [
            (book, book.charge(now, cost, rule.quota_for(tier)))
            for rule, book in zip(self.rules, self._books_of(key), strict=True)
        ]

    def reset(self, key: Key) -> None:
        for rule in self.rules:
            self.books.pop((rule.name, rule.key_of(key)), None)

    def _books_of(self, key: Key) -> list[Book]:
        return [self.books.setdefault((rule.name, rule.key_of(key)), rule.new_book()) for rule in self.rules]

    def _decide(self, now: int, key: Key, cost: int, tier: str | None) -> tuple[list[Figures], bool]:
        """Return the answers of a call that is refused or costs nothing, and whether it is to be admitted."""
        admits = []
        for rule, book in zip(self.rules, self._books_of(key), strict=True):
            quota = rule.quota_for(tier)
            if cost > quota.capacity > 0:
                raise ValueError(f"{rule.name} could never admit a cost of {cost}")
            room = quota.limit > 0 and book.used(quota)(now) + cost <= quota.capacity
            admits.append(cost == 0 or room)
        return self._figures(now, key, cost, tier, admits), all(admits)

    def _figures(
        self, now: int, key: Key, cost: int, tier: str | None, admits: Sequence[bool]
    ) -> list[Figures]:
        return [
            figures(
                book,
                rule.quota_for(tier),
                now,
                cost,
                allowed=allowed,
                is_bucket=rule.kind == "token_bucket",
            )
            for rule, book, allowed in zip(self.rules, self._books_of(key), admits, strict=True)
        ]


@dataclass
class Hold:
    """Units that were taken and not settled yet, of the limiter with the limits that were in force then."""

    limiter: ModelLimiter
    cost: int
    charges: list[tuple[Book, Charge | None]]
    key: Key
    tier: str | None
    settled: bool

    def settle(self, now: int, cost: int) -> None:
        if self.settled:
            return
        self.settled = True
        if cost > self.cost:
            self.limiter.record(now, self.key, cost - self.cost, self.tier)
        elif cost < self.cost:
            for book, charge in self.charges:
                if charge is not None:
                    book.give_back(charge, self.cost - cost, now)


def binding(answers: Sequence[Figures]) -> int:
    """Return whose figures stand for the whole: the longest wait of the refusals, or the least that remains."""
    refusals = [i for i, answer in enumerate(answers) if not answer.allowed]
    if not refusals:
        return min(range(len(answers)), key=lambda i: (answers[i].remaining, i))
    waits = {i: float("inf") if (wait := answers[i].retry_after) is None else wait for i in refusals}
    return min(refusals, key=lambda i: (-waits[i], i))
