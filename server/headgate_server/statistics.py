"""Figures of all workers together, second by second.

`Statistics` is a hook that counts the decisions of one worker. Once a second it takes a `Snapshot`. Several workers share
their snapshots in a folder; the sum is a `Tick`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Protocol

import msgspec

from headgate import ConfigError, Decision, Hook, Rule
from headgate.costs import Cost
from headgate.keys import Key, key_to_data
from headgate.observe import Call, TopKeys
from headgate.policy import AsyncLivePolicy, AsyncPolicyLimiter, LimiterPolicy, ShadowCount, in_words
from headgate.rules import REQUESTS
from headgate.stores import MemoryStore
from headgate_server.candidates import WatchedRules, warm_at
from headgate_server.describe import rule_toml, store_shown
from headgate_server.history import SAVE_EVERY, DecisionHistory
from headgate_server.latency import StoreLatency
from headgate_server.snapshots import SHADOW_COUNTS, SharedFolder, Snapshot, merged
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
_COUNTED_PER_SHOWN = 20
_MAX_SHOWN = 128
_EVERY = "*"


class Demo(Protocol):
    """The demo, as the dashboard shows and controls it."""

    traffic: bool
    """Whether its callers send requests."""

    def services(self) -> list[dict[str, object]]:
        """Return name, url, sent and refused of each service."""


class Statistics(Hook):
    """Counts decisions, and sums the counts of all workers.

    Args:
        shared_folder: The folder in which workers share their figures; `None` for a single process.

    Attributes:
        history: The history of decisions.
        newest: The last tick; `None` before the first.
        candidates_file: The file in which workers share the candidates; `None` for a single process.
        run: An id of this run of the server, the same in all its workers.
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
        """Units of open holds by limiter and unit; under `_EVERY`, costs that count in every unit."""
        self._candidates: WatchedRules = {}
        self._baselines: dict[tuple[str, str, float, bool], tuple[int, ...]] = {}
        """Counts of candidates and their live rules at the start of the candidates and after their warm-up."""
        self._latencies: dict[str, StoreLatency] = {}
        """Latencies by limiter, except for limiters in memory."""
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

    # Hook methods

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
        if not decision.degraded:  # the failure policy refused, not a rule
            self._refusals[call.limiter, decision.denied_by or "", tier] += 1
        if self._refused is not None:
            key = call.key
            self._refused.add((call.limiter, tuple(key.items()) if isinstance(key, Mapping) else key))

    # Ticks

    @property
    def is_shared(self) -> bool:
        """Whether there are several workers."""
        return self._shared_folder is not None

    def publish(self, live: AsyncLivePolicy) -> None:
        """Publish the figures of this worker."""
        self._set_top(live.policy.server.top_keys)
        self._update_limiters(live)
        self._own = self._snapshot(live)
        if self._shared_folder is not None:
            self._write(self._shared_folder)

    def _write(self, shared_folder: SharedFolder) -> None:
        """Write the figures of this worker; failures in a row are logged once."""
        try:
            shared_folder.write(self._own)
        except OSError as error:
            if not self._is_failing:
                logger.warning("cannot share figures with other workers: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    def collect(self, at: int) -> Tick:
        """Return the tick of a second, the sum of the published figures of all workers.

        Args:
            at: The end of the second, in seconds since the epoch.
        """
        others, gone = ([], []) if self._shared_folder is None else self._shared_folder.read()
        tick = merged(at, [self._own, *others], gone, self._shown, self._before)
        if self._is_first:  # earlier counts of other workers do not belong to this second
            self._is_first = False
            tick.limiters = self._own.totals
        tick.demo = self._demo_figures()
        self._before = tick.totals
        # Ticks are missing if this process was too busy; this tick then covers several seconds.
        tick.seconds = 1 if self.newest is None else max(1, at - self.newest.time)
        self.newest = tick
        self.history.add(tick)
        if at % SAVE_EVERY == 0:
            self.save()
        return tick

    def save(self) -> None:
        """Save the history; with several workers, which all have the same history, only one saves it."""
        if self._shared_folder is None or self._shared_folder.is_first:
            self.history.save()

    def _set_top(self, shown: int) -> None:
        """Set how many of the most refused keys are counted; 0 disables it."""
        if shown != self._shown:
            self._shown = shown
            self._refused = TopKeys(shown * _COUNTED_PER_SHOWN) if shown else None

    def _update_limiters(self, live: AsyncLivePolicy) -> None:
        """Update policies and latencies to the current limiters."""
        self._policies = {name: limiter.policy for name, limiter in live.items()}
        self._latencies = {
            name: self._latencies.get(name) or StoreLatency()
            for name, limiter in live.items()
            if not isinstance(limiter.store, MemoryStore)
        }

    def _stores(self, live: AsyncLivePolicy, now: float) -> list[StoreShown]:
        """Return the state of each store, and the start of its outage."""
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
        """Add latency, last contact and start of an outage to these stores, from the newest tick."""
        known = {} if self.newest is None else {store.limiter: store for store in self.newest.stores}
        for store in stores:
            latest = known.get(store.limiter, store)
            store.since = None if store.up else latest.since
            store.last_contact, store.p50, store.p99 = latest.last_contact, latest.p50, latest.p99

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
        """Return the units of a limiter's open holds by unit."""
        held = self._held[limiter.name]
        return {rule.unit: held[rule.unit] + held[_EVERY] for rule in limiter.policy.rules}

    def follow_candidates(self, live: AsyncLivePolicy, candidates: WatchedRules) -> None:
        """Count the decisions of these candidates and their live rules from now on."""
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
        """Subtract the counts before the candidate's start, or before the end of its warm-up."""
        until = warm_at(rule, since)
        is_warm = time.time() >= until
        place = figures.limiter, figures.rule, since, is_warm
        counts = tuple(getattr(figures, name) for name in SHADOW_COUNTS)
        before = self._baselines.setdefault(place, counts)
        if counts[0] < before[0]:  # a reload changed the rule, which restarted its counts
            before = self._baselines[place] = counts
        for name, count, known in zip(SHADOW_COUNTS, counts, before, strict=True):
            setattr(figures, name, count - known)
        figures.warming_up_until = None if is_warm else until

    def _most_refused(self) -> list[RefusedKey]:
        # Count more keys than are shown: a key that is second in every worker may be first in the sum.
        assert self._refused is not None
        top = self._refused.top(self._shown * 2)
        return [_refused_key(limiter, key, count) for (limiter, key), count in top]

    def _demo_figures(self) -> DemoFigures | None:
        if self.demo is None:
            return None
        services = msgspec.convert(self.demo.services(), list[DemoService])
        return DemoFigures(traffic=self.demo.traffic, services=services)


def shown_key(key: Key | None) -> str:
    """Return a key as short printable text."""
    if isinstance(key, Mapping):
        text = ", ".join(f"{scope}: {shown_key(part)}" for scope, part in key.items())
    else:
        text = "" if key is None else key if isinstance(key, str) else repr(key)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def _refused_key(limiter: str, key: Hashable, refused: int) -> RefusedKey:
    """Return a refused key to show and to inspect."""
    found: Key | None = dict(key) if isinstance(key, tuple) else key  # type: ignore[assignment]
    try:
        wire = key_to_data(found)
        msgspec.json.encode(wire)
    except (ConfigError, UnicodeEncodeError):  # the key cannot be written as JSON
        wire = None
    return RefusedKey(limiter, shown_key(found), refused, wire)


def _units(cost: Cost) -> dict[str, int]:
    """Return a cost by unit; requests default to 1."""
    return {_EVERY: cost} if isinstance(cost, int) else {REQUESTS: 1, **cost}
