"""Rules and a limiter over the books: several rules, keys and units, tiers, holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from tests.model.books import (
    Book,
    Charge,
    Figures,
    LeaseBook,
    PenaltyBook,
    Quota,
    TokenBook,
    WindowBook,
    calendar_end,
    figures,
    used_without,
)

Key = str | Mapping[str, str]
Cost = int | Mapping[str, int]
Quotas = Mapping[str, Quota]
"""Quotas of a call, by the names of rules."""


@dataclass(frozen=True)
class Rule:
    """The model of a rule of `headgate`."""

    kind: str
    quota: Quota
    name: str
    scope: str | None = None
    tiers: Mapping[str, Quota] = field(default_factory=dict)
    buckets: int = 60
    strict: bool = True
    unit: str = "requests"
    span: str = ""
    timezone: str = ""
    growth: int = 1
    longest: int = 0

    def quota_for(self, tier: str | None, quotas: Quotas) -> Quota:
        usual = self.quota if tier is None else self.tiers.get(tier, self.quota)
        return quotas.get(self.name, usual)

    def key_of(self, key: Key) -> str:
        if self.scope == "*":
            return "everybody"
        return key if isinstance(key, str) else key[str(self.scope)]

    def cost_of(self, cost: Cost) -> int:
        if isinstance(cost, int):
            return cost
        return cost.get(self.unit, 1) if self.unit == "requests" else cost[self.unit]

    def new_book(self) -> Book | PenaltyBook:
        period = self.quota.period
        if self.kind == "penalty":
            return PenaltyBook(period, self.growth, self.longest or period)
        if self.kind == "token_bucket":
            return TokenBook(period)
        if self.kind == "concurrent":
            return LeaseBook()
        if self.kind == "calendar":
            return WindowBook(calendar_end(self.span, self.timezone))
        if self.kind == "fixed_window":
            return WindowBook(lambda at: (at // period + 1) * period)
        if self.kind == "sliding_log":
            return WindowBook(lambda at: at + period)
        width = (period + self.buckets - 1) // self.buckets
        lifetime = period + width if self.strict else period
        return WindowBook(lambda at: at // width * width + lifetime)


Books = dict[tuple[str, str], Any]
Charges = list[Charge | None]


@dataclass(frozen=True)
class ModelRequest:
    """Key, cost, time and quotas of a call."""

    now: int
    key: Key
    costs: tuple[int, ...]
    tier: str | None
    quotas: Quotas


class ModelLimiter:
    """Decides with the books of its rules; limiters that share `books` count together."""

    def __init__(self, rules: Sequence[Rule], books: Books | None = None) -> None:
        self.rules = tuple(rules)
        self.books: Books = {} if books is None else books

    def request(
        self, now: int, key: Key, cost: Cost, tier: str | None = None, quotas: Quotas | None = None
    ) -> ModelRequest:
        return ModelRequest(now, key, tuple(rule.cost_of(cost) for rule in self.rules), tier, quotas or {})

    def _with_penalties(self, request: ModelRequest, *, is_move: bool) -> ModelRequest:
        """Return the request with a cost of 1 for penalties if it takes any other units, but 0 if it replaces units."""
        each = list(zip(self.rules, request.costs, strict=True))
        own = int(not is_move and any(cost for rule, cost in each if rule.kind != "penalty"))
        return replace(request, costs=tuple(own if rule.kind == "penalty" else cost for rule, cost in each))

    def hit(
        self, now: int, key: Key, cost: Cost, tier: str | None = None, quotas: Quotas | None = None
    ) -> list[Figures]:
        return self.take(self.request(now, key, cost, tier, quotas))[0]

    def check(
        self, now: int, key: Key, cost: Cost, tier: str | None = None, quotas: Quotas | None = None
    ) -> list[Figures]:
        other = ModelLimiter(self.rules, {place: copy(book) for place, book in self.books.items()})
        return other.take(other.request(now, key, cost, tier, quotas), punishes=False)[0]

    def hold(
        self, now: int, key: Key, cost: Cost, tier: str | None = None, quotas: Quotas | None = None
    ) -> tuple[list[Figures], Hold]:
        request = self.request(now, key, cost, tier, quotas)
        answers, charges = self.take(request)
        admitted = all(answer.allowed for answer in answers)
        return answers, Hold(self, request, charges, settled=not admitted)

    def record(self, request: ModelRequest) -> Charges:
        return [
            book.charge(request.now, cost, rule.quota_for(request.tier, request.quotas))
            if cost and rule.kind != "penalty"
            else None
            for rule, book, cost in zip(self.rules, self._books_of(request.key), request.costs, strict=True)
        ]

    def reset(self, key: Key) -> None:
        for rule in self.rules:
            self.books.pop((rule.name, rule.key_of(key)), None)

    def take(
        self, request: ModelRequest, replaces: Charges | None = None, *, punishes: bool = True
    ) -> tuple[list[Figures], Charges]:
        """Charge all rules or none; if all admit, the replaced charges are returned first."""
        old: Charges = replaces or [None] * len(self.rules)
        is_move = any(old)
        request = self._with_penalties(request, is_move=is_move)
        admits = []
        for rule, book, cost, charge in zip(
            self.rules, self._books_of(request.key), request.costs, old, strict=True
        ):
            quota = rule.quota_for(request.tier, request.quotas)
            if isinstance(book, PenaltyBook):
                admits.append(book.figures(quota.limit, request.now, cost, admitted=False).allowed)
                continue
            if cost > quota.capacity > 0:
                raise ValueError(f"{rule.name} could never admit a cost of {cost}")
            used = used_without(book, charge, quota)(request.now) if cost else 0
            admits.append(cost == 0 or (quota.limit > 0 and used + cost <= quota.capacity))
        if not all(admits):
            answers = self._figures(request, admits, old)
            if punishes and not is_move:
                self._punish(request, answers)
                answers = self._figures(request, admits, old)
            return answers, []
        charges: Charges = []
        for rule, book, cost, charge in zip(
            self.rules, self._books_of(request.key), request.costs, old, strict=True
        ):
            if rule.kind == "penalty":
                charges.append(None)
                continue
            quota, at = rule.quota_for(request.tier, request.quotas), request.now
            if charge is not None and book.can_move(charge, quota):
                at = book.instant(at)  # read with the charge in the book: units never move to an earlier time
                book.give_back(charge, ceil(charge.held), at)
            charges.append(book.charge(at, cost, quota) if cost else None)
        return self._figures(request, admits, old), charges

    def _punish(self, request: ModelRequest, answers: Sequence[Figures]) -> None:
        """Log the refusal for every penalty whose scope has a rule that refuses until a known time."""
        refusing = {
            rule.scope
            for rule, answer in zip(self.rules, answers, strict=True)
            if not answer.allowed
            and answer.retry_after is not None
            and rule.kind not in ("concurrent", "penalty")
        }
        for rule, book, answer in zip(self.rules, self._books_of(request.key), answers, strict=True):
            if isinstance(book, PenaltyBook) and answer.allowed and rule.scope in refusing:
                book.refuse(request.now, rule.quota_for(request.tier, request.quotas).limit)

    def _books_of(self, key: Key) -> list[Any]:
        return [self.books.setdefault((rule.name, rule.key_of(key)), rule.new_book()) for rule in self.rules]

    def _figures(self, request: ModelRequest, admits: Sequence[bool], old: Charges) -> list[Figures]:
        return [
            book.figures(
                rule.quota_for(request.tier, request.quotas).limit, request.now, cost, admitted=all(admits)
            )
            if isinstance(book, PenaltyBook)
            else figures(
                book,
                rule.quota_for(request.tier, request.quotas),
                request.now,
                cost,
                allowed=allowed,
                is_bucket=rule.kind == "token_bucket",
                replaces=charge,
            )
            for rule, book, cost, allowed, charge in zip(
                self.rules, self._books_of(request.key), request.costs, admits, old, strict=True
            )
        ]


@dataclass
class Hold:
    """Units that are not settled yet, and the limiter with the limits at that time."""

    limiter: ModelLimiter
    request: ModelRequest
    charges: Charges
    settled: bool

    @property
    def places(self) -> list[bool]:
        """Per rule, whether its units are free again when the hold ends."""
        return [rule.kind == "concurrent" for rule in self.limiter.rules]

    def final(self, cost: Cost | None) -> list[int]:
        """Return the final cost for each rule; units without a given cost keep the held cost."""
        if isinstance(cost, int):
            return [cost] * len(self.limiter.rules)
        named = cost or {}
        return [
            named.get(rule.unit, held)
            for rule, held in zip(self.limiter.rules, self.request.costs, strict=True)
        ]

    def settle(self, now: int, cost: Cost) -> None:
        if self.settled:
            return
        self.settled = True
        every = list(zip(self.request.costs, self.final(cost), self.places, strict=True))
        more = tuple(0 if is_place else max(0, used - held) for held, used, is_place in every)
        self.limiter.record(replace(self.request, now=now, costs=more))
        for charge, book, (held, used, is_place) in zip(
            self.charges, self.limiter._books_of(self.request.key), every, strict=False
        ):
            back = held if is_place else max(0, held - used)
            if charge is not None and back:  # returning nothing changes nothing and does not read the clock
                book.give_back(charge, back, now)

    def confirm(self, now: int, cost: Cost | None = None) -> list[Figures]:
        costs = tuple(
            0 if is_place else used for used, is_place in zip(self.final(cost), self.places, strict=True)
        )
        answers, _ = self.limiter.take(replace(self.request, now=now, costs=costs), self.charges)
        self.settled = all(answer.allowed for answer in answers)
        return answers

    def renew(self, now: int) -> list[Figures]:
        """Extend all leases, or none if one has expired; other rules are not checked."""
        rules, books = self.limiter.rules, self.limiter._books_of(self.request.key)
        quotas = [rule.quota_for(self.request.tier, self.request.quotas) for rule in rules]
        leases = [
            (book, charge, quota)
            for book, charge, quota in zip(books, self.charges, quotas, strict=True)
            if isinstance(book, LeaseBook) and charge is not None
        ]
        ended = [book for book, charge, _ in leases if not book.is_live(charge, now)]
        if not ended:
            for book, charge, quota in leases:
                book.renew(charge, now, quota)
        return [
            book.figures(quota.limit, now, 0, admitted=False)
            if isinstance(book, PenaltyBook)
            else replace(
                figures(book, quota, now, 0, allowed=True, is_bucket=rule.kind == "token_bucket"),
                allowed=book not in ended,
            )
            for rule, book, quota in zip(rules, books, quotas, strict=True)
        ]


def binding(answers: Sequence[Figures]) -> int:
    """Return the verdict to report: the refusal with the longest wait, or the least remaining units."""
    refusals = [i for i, answer in enumerate(answers) if not answer.allowed]
    if not refusals:
        return min(range(len(answers)), key=lambda i: (answers[i].remaining, i))
    waits = {i: float("inf") if (wait := answers[i].retry_after) is None else wait for i in refusals}
    return min(refusals, key=lambda i: (-waits[i], i))
