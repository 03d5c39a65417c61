"""Figures of all workers together, second by second.

`Statistics` is a hook that counts what the limiters of one worker decide. Once a second each worker takes a `Snapshot`. If
there are several workers, each writes its own into a folder that they share and reads those of the others; the sum is a
`Tick`. The supervisor renames the file of a worker that has ended, so its counts stay and totals never go backwards.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from headgate import ConfigError, Decision, Hook, Rule
from headgate.costs import Cost
from headgate.keys import Key, key_to_data
from headgate.observe import Call, TopKeys
from headgate.policy import AsyncLivePolicy, AsyncPolicyLimiter, LimiterPolicy, ShadowCount, in_words
from headgate.rules import REQUESTS
from headgate.stores import MemoryStore
from headgate_server.candidates import WatchedRules, warm_at
from headgate_server.describe import rule_toml, store_shown
from headgate_server.files import replace_file
from headgate_server.history import SAVE_EVERY, DecisionHistory
from headgate_server.latency import StoreLatency, Times, quantile, total
from headgate_server.wire import (
    DemoFigures,
    DemoService,
    Figures,
    RefusedKey,
    RuleRefusals,
    ShadowFigures,
    StoreShown,
    Tick,
)

logger = logging.getLogger("headgate.server")

NOT_ASKED = ShadowCount(0, 0, 0)
SHADOW_COUNTS = ("asked", "refused", "failed", "admitted", "live_refused")
_FOLLOWED_PER_SHOWN = 20
_LONGEST_SHOWN = 128
_EVERY = "*"


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
    times: dict[str, Times] = {}
    refusals: list[RuleRefusals] = []
    held: dict[str, dict[str, int]] = {}
    started: int = 0


class Statistics(Hook):
    """Counts decisions, and adds up what all workers have counted.

    Args:
        shared_folder: Where workers show each other what they have counted; `None` if there is just this process.

    Attributes:
        history: What was decided before now.
        newest: The last tick; `None` before the first.
        candidates_file: Where workers share the candidates; `None` if there is just this process.
        run: The same text in all workers of a server, and in no other server.
    """

    def __init__(self, shared_folder: SharedFolder | None = None) -> None:
        self.history = DecisionHistory()
        self.newest: Tick | None = None
        self.candidates_file = None if shared_folder is None else shared_folder.candidates
        self.run = secrets.token_hex(8) if shared_folder is None else str(shared_folder.folder)
        self.demo: Demo | None = None
        self._shared_folder = shared_folder
        self._counts: dict[str, list[int]] = {}
        self._refusals: Counter[tuple[str, str, str | None]] = Counter()
        self._policies: dict[str, LimiterPolicy] = {}
        self._held: dict[str, Counter[str]] = {}
        """Units of open holds, by limiter and unit; under `_EVERY` those that count in every unit."""
        self._candidates: WatchedRules = {}
        self._baselines: dict[tuple[str, str, float, bool], tuple[int, ...]] = {}
        """The counts of candidates and their live rules when the candidates began, and when they had warmed up."""
        self._latencies: dict[str, StoreLatency] = {}
        """Of limiters that do not count in memory."""
        self._down_since: dict[str, float] = {}
        self._started = int(time.time())
        self._refused: TopKeys[tuple[str, Hashable]] | None = None
        self._shown = 0
        self._before: dict[str, Figures] = {}
        self._is_first = True
        self._is_failing = False
        self._own = Snapshot({})
        if shared_folder is not None:
            self.history.keep_in(shared_folder.history)

    # Events of a hook

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        degraded = decision.degraded
        if not degraded:
            self._answered(call, seconds)
        if call.operation == "check":
            return
        counts = self._counts.get(call.limiter)
        if counts is None:
            counts = self._counts.setdefault(call.limiter, [0, 0, 0, 0])
        counts[0 if decision.allowed else 1] += 1
        if degraded:
            counts[2] += 1
        if not decision.allowed:
            counts[3] += degraded
            self._note_refusal(call, decision)
        elif call.operation == "hold":
            self._held.setdefault(call.limiter, Counter()).update(_units(call.cost))

    def completed(self, call: Call, seconds: float, degraded: bool) -> None:
        if not degraded:
            self._answered(call, seconds)

    def settled(self, call: Call, cost: Cost | None) -> None:
        self._held.setdefault(call.limiter, Counter()).subtract(_units(call.cost))

    def _answered(self, call: Call, seconds: float) -> None:
        latency = self._latencies.get(call.limiter)
        if latency is not None:
            latency.add(seconds, time.time())

    def _note_refusal(self, call: Call, decision: Decision) -> None:
        # Callers may name any tier, so unknown ones are counted together.
        policy = self._policies.get(call.limiter)
        tier = call.tier if policy is not None and call.tier in policy.tiers else None
        if policy is not None and policy.override_for(call.key):
            tier = "override"
        if not decision.degraded:  # then it was no rule that refused
            self._refusals[call.limiter, decision.denied_by or "", tier] += 1
        if self._refused is not None:
            key = call.key
            self._refused.add((call.limiter, tuple(key.items()) if isinstance(key, Mapping) else key))

    # What is made of it

    @property
    def is_shared(self) -> bool:
        """Whether there are other workers to hear of."""
        return self._shared_folder is not None

    def tick(self, live: AsyncLivePolicy, at: int) -> Tick:
        """Take note of the second that has passed, and return it; `at` is in seconds since the epoch."""
        self.show(live)
        return self.add_up(at)

    def show(self, live: AsyncLivePolicy) -> None:
        """Show the other workers what this one has counted."""
        self._follow(live.policy.server.top_keys)
        self._know(live)
        self._own = self._snapshot(live)
        if self._shared_folder is not None:
            self._write(self._shared_folder)

    def _write(self, shared_folder: SharedFolder) -> None:
        """Write what this worker has counted; that it cannot be written is logged once, until it can."""
        try:
            shared_folder.write(self._own)
        except OSError as error:
            if not self._is_failing:
                logger.warning("figures cannot be shown to other workers: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    def add_up(self, at: int) -> Tick:
        """Return what all have shown."""
        others, gone = ([], []) if self._shared_folder is None else self._shared_folder.read()
        tick = merged(at, [self._own, *others], gone, self._shown, self._before)
        if self._is_first:  # what the others had counted before is not of this second
            self._is_first = False
            tick.limiters = self._own.totals
        tick.demo = self._demo_figures()
        self._before = tick.totals
        # Ticks are missing if this process had no time for them; what was decided meanwhile is in this one.
        tick.seconds = 1 if self.newest is None else max(1, at - self.newest.time)
        self.newest = tick
        self.history.add(tick)
        if at % SAVE_EVERY == 0:
            self.save()
        return tick

    def save(self) -> None:
        """Keep what is known of the last day; of several workers, which all know the same, one does."""
        if self._shared_folder is None or self._shared_folder.is_first:
            self.history.save()

    def _follow(self, shown: int) -> None:
        """Follow as many refused keys as the policy now says."""
        if shown != self._shown:
            self._shown = shown
            self._refused = TopKeys(shown * _FOLLOWED_PER_SHOWN) if shown else None

    def _know(self, live: AsyncLivePolicy) -> None:
        """Know what matters of the limiters that there are now."""
        self._policies = {name: limiter.policy for name, limiter in live.items()}
        self._latencies = {
            name: self._latencies.get(name) or StoreLatency()
            for name, limiter in live.items()
            if not isinstance(limiter.store, MemoryStore)
        }

    def _stores(self, live: AsyncLivePolicy, now: float) -> list[StoreShown]:
        """Return how the stores are doing, and since when those are down that are."""
        shown = [store_shown(limiter, limiter.policy) for limiter in live.values()]
        self._down_since = {
            store.limiter: self._down_since.get(store.limiter, now) for store in shown if not store.up
        }
        for store in shown:
            store.since = self._down_since.get(store.limiter)
            latency = self._latencies.get(store.limiter)
            store.last_contact = None if latency is None else latency.last
        return shown

    def complete(self, stores: list[StoreShown]) -> None:
        """Add what the newest tick says of these stores: latency, last contact, and since when they are down."""
        known = {} if self.newest is None else {store.limiter: store for store in self.newest.stores}
        for store in stores:
            seen = known.get(store.limiter, store)
            store.since = None if store.up else seen.since
            store.last_contact, store.p50, store.p99 = seen.last_contact, seen.p50, seen.p99

    def _snapshot(self, live: AsyncLivePolicy) -> Snapshot:
        limiters, now = dict(live), time.time()
        return Snapshot(
            totals={name: Figures(*self._counts.get(name, ())) for name in {**limiters, **self._counts}},
            started=self._started,
            stores=self._stores(live, now),
            times={name: latency.recent(now) for name, latency in self._latencies.items()},
            refusals=[RuleRefusals(*place, count) for place, count in self._refusals.items()],
            held={name: self._held_by(limiter) for name, limiter in limiters.items() if name in self._held},
            shadow=[
                self._shadow(limiter, shadow)
                for limiter in limiters.values()
                for shadow in limiter.policy.shadow
            ],
            top=None if self._refused is None else self._most_refused(),
            policy_error=live.last_error,
        )

    def _held_by(self, limiter: AsyncPolicyLimiter) -> dict[str, int]:
        """Return the units of a limiter's open holds, by what its rules count."""
        held = self._held[limiter.name]
        return {rule.unit: held[rule.unit] + held[_EVERY] for rule in limiter.policy.rules}

    def follow_candidates(self, live: AsyncLivePolicy, candidates: WatchedRules) -> None:
        """Count what these candidates and their live rules do from now on."""
        self._candidates = candidates
        since = {watched.since for rules in candidates.values() for watched in rules.values()}
        self._baselines = {place: counts for place, counts in self._baselines.items() if place[2] in since}
        for limiter in live.values():
            for rule in limiter.policy.shadow:
                self._shadow(limiter, rule)

    def _shadow(self, limiter: AsyncPolicyLimiter, rule: Rule) -> ShadowFigures:
        count = limiter.shadow_report().get(rule.name, NOT_ASKED)
        figures = ShadowFigures(limiter.name, rule.name, in_words(rule), *count, rule.text_of(rule.quota))
        live = limiter.policy.candidate_for.get(rule.name)
        if live is not None:
            figures.candidate_for = live
            figures.toml = rule_toml(replace(rule, name=live))
            figures.live_refused = sum(
                n for (name, by, _), n in self._refusals.items() if (name, by) == (limiter.name, live)
            )
            self._subtract_baseline(figures, rule, self._candidates[limiter.name][live].since)
        return figures

    def _subtract_baseline(self, figures: ShadowFigures, rule: Rule, since: float) -> None:
        """Leave the counts since the candidate began, or since it has warmed up."""
        until = warm_at(rule, since)
        is_warm = time.time() >= until
        place = figures.limiter, figures.rule, since, is_warm
        counts = tuple(getattr(figures, name) for name in SHADOW_COUNTS)
        before = self._baselines.setdefault(place, counts)
        if counts[0] < before[0]:  # a reload has changed the rule, so that it counts from 0 again
            before = self._baselines[place] = counts
        for name, count, known in zip(SHADOW_COUNTS, counts, before, strict=True):
            setattr(figures, name, count - known)
        figures.warming_up_until = None if is_warm else until

    def _most_refused(self) -> list[RefusedKey]:
        # A few more than are shown: what comes second everywhere may come first in the sum.
        assert self._refused is not None
        top = self._refused.top(self._shown * 2)
        return [_refused_key(limiter, key, count) for (limiter, key), count in top]

    def _demo_figures(self) -> DemoFigures | None:
        if self.demo is None:
            return None
        services = msgspec.convert(self.demo.services(), list[DemoService])
        return DemoFigures(traffic=self.demo.traffic, services=services)


class SharedFolder:
    """A folder in which workers show each other what they have counted.

    Files are replaced whole, so none is read half-written. The file of a worker that has ended has the suffix `.gone`.

    Args:
        folder: The folder; private, because it may name keys.
        worker: A name that no other worker ever has.

    Attributes:
        folder: The folder.
        history: The file in it for what was decided before now.
        candidates: The file in it for the candidates of all workers.
        is_first: Whether this is the worker, of those that are there, that does what one has to do.
    """

    def __init__(self, folder: Path, worker: str) -> None:
        self.folder = folder
        self.history = folder / "history"
        self.candidates = folder / "candidates"
        self.is_first = False
        self._own = folder / f"{worker}.worker"
        self._decoder = msgspec.json.Decoder(Snapshot)
        self._gone: dict[str, Snapshot] = {}

    @staticmethod
    def retire(folder: Path, worker: str) -> None:
        """Let the figures of a worker that is gone count on, but no longer as those of one that is there."""
        with suppress(FileNotFoundError):
            (folder / f"{worker}.worker").rename(folder / f"{worker}.gone")

    def write(self, snapshot: Snapshot) -> None:
        """Show what this worker has counted."""
        replace_file(self._own, msgspec.json.encode(snapshot))

    def read(self) -> tuple[list[Snapshot], list[Snapshot]]:
        """Return what the other workers that are there have counted, and those that are gone."""
        present: list[Snapshot] = []
        paths = sorted(self.folder.iterdir())
        self.is_first = next((path for path in paths if path.suffix == ".worker"), None) == self._own
        for path in paths:
            if path.suffix == ".gone" and path.name not in self._gone:
                self._gone[path.name] = self._decoder.decode(path.read_bytes())
            elif path.suffix == ".worker" and path != self._own:
                with suppress(FileNotFoundError):  # just renamed; it counts again from the next tick on
                    present.append(self._decoder.decode(path.read_bytes()))
        return present, list(self._gone.values())


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
            totals[name] = _combined(int.__add__, totals.get(name, Figures()), figures)
    # A file that was being renamed is missing for once; what was counted does not become less.
    totals = {name: _combined(max, figures, before.get(name, Figures())) for name, figures in totals.items()}
    return Tick(
        time=at,
        limiters={
            name: _combined(int.__sub__, figures, before.get(name, Figures()))
            for name, figures in totals.items()
        },
        totals=totals,
        stores=_stores(present),
        shadow=_shadow(present, gone),
        top=_top(present, top) if top else None,
        policy_error=next((s.policy_error for s in present if s.policy_error), None),
        workers=len(present),
        refusals=_refusals((*present, *gone)),
        held=_held((*present, *gone)),
        started=min((snapshot.started for snapshot in (*present, *gone)), default=at),
    )


def shown_key(key: Key | None) -> str:
    """Return a key as text that can be shown: short, and such that every encoding can carry it."""
    if isinstance(key, Mapping):
        text = ", ".join(f"{scope}: {shown_key(part)}" for scope, part in key.items())
    else:
        text = "" if key is None else key if isinstance(key, str) else repr(key)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def _refused_key(limiter: str, key: Hashable, refused: int) -> RefusedKey:
    """Return a key that was refused so often, to show and to inspect."""
    found: Key | None = dict(key) if isinstance(key, tuple) else key  # type: ignore[assignment]
    try:
        wire = key_to_data(found)
        msgspec.json.encode(wire)
    except (ConfigError, UnicodeEncodeError):  # a scope that reads like bytes, or half of a character
        wire = None
    return RefusedKey(limiter, shown_key(found), refused, wire)


def _combined(combine: Callable[[int, int], int], one: Figures, other: Figures) -> Figures:
    pairs = zip(msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True)
    return Figures(*(combine(*pair) for pair in pairs))


def _stores(present: list[Snapshot]) -> list[StoreShown]:
    """Return each limiter's store; down if any worker cannot reach it."""
    found: dict[str, list[StoreShown]] = {}
    for store in (store for snapshot in present for store in snapshot.stores):
        found.setdefault(store.limiter, []).append(store)
    return [_one_store(stores, present) for stores in found.values()]


def _one_store(stores: list[StoreShown], present: list[Snapshot]) -> StoreShown:
    """Return the store of one limiter as several workers see it."""
    limiter = stores[0].limiter
    times = total(snapshot.times.get(limiter, {}) for snapshot in present)
    return StoreShown(
        limiter=limiter,
        store=stores[-1].store,
        up=all(store.up for store in stores),
        breaker="open" if any(store.breaker == "open" for store in stores) else "closed",
        failures=sum(store.failures for store in stores),
        reason=next((store.reason for store in stores if store.reason is not None), None),
        since=min((store.since for store in stores if store.since is not None), default=None),
        last_contact=max(
            (store.last_contact for store in stores if store.last_contact is not None), default=None
        ),
        p50=quantile(times, 0.5),
        p99=quantile(times, 0.99),
    )


def _refusals(snapshots: Iterable[Snapshot]) -> list[RuleRefusals]:
    counts: Counter[tuple[str, str, str | None]] = Counter()
    for entry in (entry for snapshot in snapshots for entry in snapshot.refusals):
        counts[entry.limiter, entry.rule, entry.tier] += entry.refused
    return [RuleRefusals(*place, count) for place, count in counts.items()]


def _units(cost: Cost) -> dict[str, int]:
    """Return a cost by unit; a request is 1 unless the cost says otherwise."""
    return {_EVERY: cost} if isinstance(cost, int) else {REQUESTS: 1, **cost}


def _held(snapshots: Iterable[Snapshot]) -> dict[str, dict[str, int]]:
    """Return the units of open holds; one worker may settle what another has taken, so only the sum is true."""
    units: dict[str, Counter[str]] = {}
    for snapshot in snapshots:
        for limiter, held in snapshot.held.items():
            units.setdefault(limiter, Counter()).update(held)
    return {limiter: dict(held) for limiter, held in units.items()}


def _shadow(present: list[Snapshot], gone: list[Snapshot]) -> list[ShadowFigures]:
    """Return what shadow rules have counted, of the rules that there are now."""
    found: dict[tuple[str, str], ShadowFigures] = {}
    for snapshot in present:
        for figures in snapshot.shadow:
            none = dict.fromkeys(SHADOW_COUNTS, 0)
            found.setdefault((figures.limiter, figures.rule), msgspec.structs.replace(figures, **none))
    for snapshot in (*present, *gone):
        for figures in snapshot.shadow:
            shown = found.get((figures.limiter, figures.rule))
            if shown is not None and shown.warming_up_until == figures.warming_up_until:
                for name in SHADOW_COUNTS:
                    setattr(shown, name, getattr(shown, name) + getattr(figures, name))
    return list(found.values())


def _top(present: list[Snapshot], number: int) -> list[RefusedKey]:
    found: dict[tuple[str, str, bytes], RefusedKey] = {}
    for entry in (entry for snapshot in present for entry in snapshot.top or ()):
        place = entry.limiter, entry.key, msgspec.json.encode(entry.inspect, order="sorted")
        known = found.setdefault(place, RefusedKey(entry.limiter, entry.key, 0, entry.inspect))
        known.refused += entry.refused
    return sorted(found.values(), key=lambda entry: -entry.refused)[:number]
