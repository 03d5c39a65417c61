"""Snapshots of the figures of workers, shared in a folder, and their sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from headgate_server.files import replace_file
from headgate_server.latency import Times, quantile, total
from headgate_server.wire import Figures, RefusedKey, RuleRefusals, ShadowFigures, StoreShown, Tick

SHADOW_COUNTS = ("asked", "refused", "failed", "admitted", "live_refused")
"""The counts among the fields of `ShadowFigures`."""


class Snapshot(Struct):
    """The figures of one worker: counts since its start, and current states."""

    totals: dict[str, Figures]
    stores: list[StoreShown] = []
    shadow: list[ShadowFigures] = []
    top: list[RefusedKey] | None = None
    policy_error: str | None = None
    times: dict[str, Times] = {}
    refusals: list[RuleRefusals] = []
    held: dict[str, dict[str, int]] = {}
    started: int = 0


class SharedFolder:
    """The folder in which workers share their snapshots.

    Files are replaced atomically. The file of a terminated worker gets the suffix `.gone`; its counts stay in the sum,
    so totals never go backwards.

    Args:
        folder: The folder; private, because figures may contain keys.
        worker: The unique name of this worker.

    Attributes:
        folder: The folder.
        history: The file for the history.
        candidates: The file for the candidates.
        is_first: Whether this worker does the work that only one of them does.
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
        """Mark the snapshot of a terminated worker."""
        with suppress(FileNotFoundError):
            (folder / f"{worker}.worker").rename(folder / f"{worker}.gone")

    def write(self, snapshot: Snapshot) -> None:
        """Write the snapshot of this worker."""
        replace_file(self._own, msgspec.json.encode(snapshot))

    def read(self) -> tuple[list[Snapshot], list[Snapshot]]:
        """Return the snapshots of the other workers, and of terminated workers."""
        present: list[Snapshot] = []
        paths = sorted(self.folder.iterdir())
        self.is_first = next((path for path in paths if path.suffix == ".worker"), None) == self._own
        for path in paths:
            if path.suffix == ".gone" and path.name not in self._gone:
                self._gone[path.name] = self._decoder.decode(path.read_bytes())
            elif path.suffix == ".worker" and path != self._own:
                with suppress(FileNotFoundError):  # just renamed; it is read at the next tick
                    present.append(self._decoder.decode(path.read_bytes()))
        return present, list(self._gone.values())


def merged(
    at: int, present: list[Snapshot], gone: list[Snapshot], top: int, before: Mapping[str, Figures]
) -> Tick:
    """Return the sum of several snapshots.

    Args:
        at: Seconds since the epoch.
        present: Snapshots of running workers.
        gone: Snapshots of terminated workers; only their counts are used.
        top: The number of most refused keys to show.
        before: The totals one tick ago.
    """
    totals = {name: Figures() for snapshot in present for name in snapshot.totals}
    for snapshot in (*present, *gone):
        for name, figures in snapshot.totals.items():
            totals[name] = _combined(int.__add__, totals.get(name, Figures()), figures)
    # A file that is being renamed may be missing once; totals never decrease.
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


def _combined(combine: Callable[[int, int], int], one: Figures, other: Figures) -> Figures:
    pairs = zip(msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True)
    return Figures(*(combine(*pair) for pair in pairs))


def _stores(present: list[Snapshot]) -> list[StoreShown]:
    """Return the store of each limiter; it is down if any worker cannot reach it."""
    found: dict[str, list[StoreShown]] = {}
    for store in (store for snapshot in present for store in snapshot.stores):
        found.setdefault(store.limiter, []).append(store)
    return [_one_store(stores, present) for stores in found.values()]


def _one_store(stores: list[StoreShown], present: list[Snapshot]) -> StoreShown:
    """Return the store of one limiter, from the states in several workers."""
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


def _held(snapshots: Iterable[Snapshot]) -> dict[str, dict[str, int]]:
    """Return the units of open holds; one worker may settle the hold of another, so only the sum is meaningful."""
    units: dict[str, Counter[str]] = {}
    for snapshot in snapshots:
        for limiter, held in snapshot.held.items():
            units.setdefault(limiter, Counter()).update(held)
    return {limiter: dict(held) for limiter, held in units.items()}


def _shadow(present: list[Snapshot], gone: list[Snapshot]) -> list[ShadowFigures]:
    """Return the figures of the current shadow rules."""
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
