"""Figures of all workers together, second by second.

A `Board` is a hook: each worker's counts what its limiters decide. Once a second a worker takes a `Snapshot` of its board.
If there are several workers, each writes its own into a folder that they share and reads those of the others; the sum of
them is a `Tick`. What a worker has counted stays when it is gone: whoever replaces it renames its file, and the totals never
go backwards.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from headgate.decision import Decision
from headgate.hooks import Call, Hook
from headgate.keys import Key
from headgate.observe import TopKeys
from headgate.policy import AsyncLivePolicy, in_words
from headgate.server.describe import store_shown
from headgate.server.wire import (
    DemoFigures,
    DemoService,
    Figures,
    History,
    RefusedKey,
    ShadowFigures,
    StoreShown,
    Tick,
)

TICKS_KEPT = 300
_FOLLOWED_PER_SHOWN = 20
_LONGEST_KEY = 128
_SAVE_EVERY = 10
"""Ticks after which the history is saved for a worker that is yet to start."""


class Demo(Protocol):
    """What the demo shows and lets be switched."""

    traffic: bool
    """Whether its callers are busy."""

    def services(self) -> list[dict[str, object]]:
        """Return name, url, sent and refused of each service."""


class Snapshot(Struct):
    """What one worker has to say: counts since its start, and how things are now."""

    totals: dict[str, Figures]
    stores: list[StoreShown] = []
    shadow: list[ShadowFigures] = []
    top: list[RefusedKey] | None = None
    policy_error: str | None = None


class Board(Hook):
    """Counts decisions, and adds up what all workers have counted.

    Args:
        exchange: Where workers show each other what they have counted; `None` if there is just this process.
    """

    def __init__(self, exchange: Exchange | None = None) -> None:
        self.history: deque[Tick] = deque(maxlen=TICKS_KEPT)
        self.demo: Demo | None = None
        self._exchange = exchange
        self._counts: dict[str, list[int]] = {}
        self._refused: TopKeys[tuple[str, str]] | None = None
        self._shown = 0
        self._before: dict[str, Figures] = {}
        self._is_first = True
        self._own = Snapshot({})
        if exchange is not None:
            self.history.extend(exchange.saved_history())
            if self.history:
                self._before = self.history[-1].totals

    # What a hook is told

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        if call.operation == "check":
            return
        counts = self._counts.get(call.limiter)
        if counts is None:
            counts = self._counts.setdefault(call.limiter, [0, 0, 0])
        allowed = decision.allowed
        counts[0 if allowed else 1] += 1
        if decision.degraded:
            counts[2] += 1
        if self._refused is not None and not allowed:
            self._refused.add((call.limiter, shown_key(call.key)))

    # What is made of it

    @property
    def is_shared(self) -> bool:
        """Whether there are other workers to hear of."""
        return self._exchange is not None

    def tick(self, live: AsyncLivePolicy, at: int) -> Tick:
        """Take note of the second that has passed, and return it; `at` is in seconds since the epoch."""
        self.show(live)
        return self.add_up(at)

    def show(self, live: AsyncLivePolicy) -> None:
        """Show the other workers what this one has counted."""
        self._follow(live.policy.server.top_keys)
        self._own = self._snapshot(live)
        if self._exchange is not None:
            self._exchange.write(self._own)

    def add_up(self, at: int) -> Tick:
        """Return what all have shown."""
        present, gone = ([self._own], []) if self._exchange is None else self._exchange.read()
        tick = merged(at, present, gone, self._shown, self._before)
        if self._is_first:  # what the others had counted before is not of this second
            self._is_first = False
            tick.limiters = self._own.totals
        tick.demo = self._demo_figures()
        self._before = tick.totals
        self.history.append(tick)
        if self._exchange is not None and at % _SAVE_EVERY == 0:
            self._exchange.save_history(self.history)
        return tick

    def _follow(self, shown: int) -> None:
        """Follow as many refused keys as the policy now says."""
        if shown != self._shown:
            self._shown = shown
            self._refused = TopKeys(shown * _FOLLOWED_PER_SHOWN) if shown else None

    def _snapshot(self, live: AsyncLivePolicy) -> Snapshot:
        limiters = dict(live)
        return Snapshot(
            totals={name: Figures(*self._counts.get(name, ())) for name in {**limiters, **self._counts}},
            stores=[store_shown(limiter, limiter.policy) for limiter in limiters.values()],
            shadow=[
                ShadowFigures(
                    name,
                    rule.name,
                    in_words(rule),
                    (count := counts[rule.name]).asked,
                    count.refused,
                    count.failed,
                )
                for name, limiter in limiters.items()
                if (counts := limiter.shadow_report())
                for rule in limiter.policy.shadow
                if rule.name in counts
            ],
            top=None if self._refused is None else self._most_refused(),
            policy_error=live.last_error,
        )

    def _most_refused(self) -> list[RefusedKey]:
        # A few more than are shown: what comes second everywhere may come first in the sum.
        assert self._refused is not None
        top = self._refused.top(self._shown * 2)
        return [RefusedKey(limiter, key, count) for (limiter, key), count in top]

    def _demo_figures(self) -> DemoFigures | None:
        if self.demo is None:
            return None
        services = msgspec.convert(self.demo.services(), list[DemoService])
        return DemoFigures(traffic=self.demo.traffic, services=services)


class Exchange:
    """A folder in which workers show each other what they have counted.

    Files are replaced whole, so nobody reads half of one. That of a worker that is gone ends in `.gone`.

    Args:
        folder: The folder; private, because it may name keys.
        worker: A name that no other worker ever has.
    """

    def __init__(self, folder: Path, worker: str) -> None:
        self._folder = folder
        self._own = folder / f"{worker}.worker"
        self._history = folder / "history"
        self._decoder = msgspec.json.Decoder(Snapshot)
        self._gone: dict[str, Snapshot] = {}

    @staticmethod
    def retire(folder: Path, worker: str) -> None:
        """Let the figures of a worker that is gone count on, but no longer as those of one that is there."""
        with suppress(FileNotFoundError):
            (folder / f"{worker}.worker").rename(folder / f"{worker}.gone")

    def write(self, snapshot: Snapshot) -> None:
        """Show what this worker has counted."""
        _replace(self._own, msgspec.json.encode(snapshot))

    def read(self) -> tuple[list[Snapshot], list[Snapshot]]:
        """Return what the workers that are there have counted, and those that are gone."""
        present = []
        for path in sorted(self._folder.iterdir()):
            if path.suffix == ".gone" and path.name not in self._gone:
                self._gone[path.name] = self._decoder.decode(path.read_bytes())
            elif path.suffix == ".worker":
                with suppress(FileNotFoundError):  # just renamed; it counts again from the next tick on
                    present.append(self._decoder.decode(path.read_bytes()))
        return present, list(self._gone.values())

    def save_history(self, history: Iterable[Tick]) -> None:
        """Keep the ticks for a worker that is yet to start."""
        _replace(self._history, msgspec.json.encode(History(list(history))))

    def saved_history(self) -> list[Tick]:
        """Return the ticks that another worker has kept."""
        try:
            return msgspec.json.decode(self._history.read_bytes(), type=History).ticks
        except FileNotFoundError:
            return []


def merged(
    at: int, present: list[Snapshot], gone: list[Snapshot], top: int, before: Mapping[str, Figures]
) -> Tick:
    """Return what several workers have to say as one.

    Args:
        at: Seconds since the epoch.
        present: Of workers that are there.
        gone: Of those that were; only their counts matter.
        top: How many of the most refused keys to show.
        before: The totals one tick ago.
    """
    totals = {name: Figures() for snapshot in present for name in snapshot.totals}
    for snapshot in (*present, *gone):
        for name, figures in snapshot.totals.items():
            totals[name] = _sum(totals.get(name, Figures()), figures)
    # A file that was being renamed is missing for once; what was counted does not become less.
    totals = {name: _most(figures, before.get(name, Figures())) for name, figures in totals.items()}
    return Tick(
        time=at,
        limiters={name: _difference(figures, before.get(name)) for name, figures in totals.items()},
        totals=totals,
        stores=_stores(present),
        shadow=_shadow(present, gone),
        top=_top(present, top) if top else None,
        policy_error=next((s.policy_error for s in present if s.policy_error), None),
        workers=len(present),
    )


def shown_key(key: Key | None) -> str:
    """Return a key as text that can be shown: short, and such that every encoding can carry it."""
    if isinstance(key, Mapping):
        text = ", ".join(f"{scope}: {shown_key(part)}" for scope, part in key.items())
    else:
        text = "" if key is None else key if isinstance(key, str) else repr(key)
    return text[:_LONGEST_KEY].encode("utf-8", "backslashreplace").decode()


def _sum(one: Figures, other: Figures) -> Figures:
    return Figures(one.admitted + other.admitted, one.refused + other.refused, one.degraded + other.degraded)


def _most(one: Figures, other: Figures) -> Figures:
    return Figures(
        max(one.admitted, other.admitted), max(one.refused, other.refused), max(one.degraded, other.degraded)
    )


def _difference(after: Figures, before: Figures | None) -> Figures:
    if before is None:
        return after
    return Figures(
        after.admitted - before.admitted, after.refused - before.refused, after.degraded - before.degraded
    )


def _stores(present: list[Snapshot]) -> list[StoreShown]:
    """Return each limiter's store; down if any worker cannot reach it."""
    found: dict[str, StoreShown] = {}
    for store in (store for snapshot in present for store in snapshot.stores):
        known = found.get(store.limiter)
        if known is None:
            found[store.limiter] = store
        else:
            is_up = known.up and store.up
            breaker = known.breaker if known.breaker == "open" else store.breaker
            found[store.limiter] = StoreShown(
                store.limiter,
                store.store,
                is_up,
                breaker,
                known.failures + store.failures,
                known.reason or store.reason,
            )
    return list(found.values())


def _shadow(present: list[Snapshot], gone: list[Snapshot]) -> list[ShadowFigures]:
    """Return what shadow rules have counted, of the rules that there are now."""
    found: dict[tuple[str, str], ShadowFigures] = {}
    for snapshot in present:
        for figures in snapshot.shadow:
            place = figures.limiter, figures.rule
            found.setdefault(place, ShadowFigures(*place, figures.words, 0, 0, 0))
    for snapshot in (*present, *gone):
        for figures in snapshot.shadow:
            known = found.get((figures.limiter, figures.rule))
            if known is not None:
                known.asked += figures.asked
                known.refused += figures.refused
                known.failed += figures.failed
    return list(found.values())


def _top(present: list[Snapshot], number: int) -> list[RefusedKey]:
    counts: Counter[tuple[str, str]] = Counter()
    for snapshot in present:
        for entry in snapshot.top or ():
            counts[entry.limiter, entry.key] += entry.refused
    return [RefusedKey(limiter, key, count) for (limiter, key), count in counts.most_common(number)]


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that whoever reads it sees the old or the new one, never a part."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_bytes(content)
    new.replace(path)
