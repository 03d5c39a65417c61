"""What every part of the conformance kit stands on: a store to test, a clock, limiters over the two."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from headgate import Limiter, Quota, Rule
from headgate.rules import Kind, make_rule
from headgate.stores.base import Guarantees, Store
from headgate.testing.clock import FakeClock
from headgate.testing.contract.traces import ALL_FEATURES, ALL_KINDS, START_US, Feature

each_kind = pytest.mark.parametrize("kind", ALL_KINDS)
"""Run a test once for every kind of rule."""


class Contract:
    """A store under test.

    Attributes:
        own_time: Whether calls leave the time to the store, which `make_store` must then give `self.clock`. By default
            the time goes with every call.
        kinds: The kinds of rates that the store counts.
        missing_features: What else it cannot do yet.
        effort: How many random examples each property tries, as a share of what the loaded Hypothesis profile says.
        clock: The time, in either case.
        folder: An empty folder of each test's own.
    """

    own_time: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = ALL_KINDS
    missing_features: ClassVar[frozenset[Feature]] = frozenset()
    effort: ClassVar[float] = 1.0

    clock: FakeClock

    def make_store(self) -> Any:
        """Return the store to be tested. Within one test, all that are made count together if the store is shared."""
        raise NotImplementedError("return the store to be tested")

    def dump(self) -> object:
        """Return all that the store holds, in any form that can be compared; `None` if that is not possible."""
        return None

    @pytest.fixture(autouse=True)
    def _prepare(self, request: pytest.FixtureRequest) -> Iterator[None]:
        self.clock = FakeClock(START_US / 1_000_000)
        self._request = request
        yield
        if "store" in vars(self):
            self.store.close()

    @cached_property
    def folder(self) -> Path:
        """An empty folder of each test's own, made when it is first asked for."""
        folder: Path = self._request.getfixturevalue("tmp_path")
        return folder

    @cached_property
    def store(self) -> Store:
        """The store under test, made when it is first asked for."""
        return self.open_store()

    def open_store(self) -> Store:
        """Return another store like the one under test; the caller closes it."""
        store: Store = self.make_store()
        return store

    def limiter(self, *rules: Rule, name: str | None = None, store: Store | None = None) -> Limiter:
        """Return a limiter on the store; without a name, one that shares its counts with no other."""
        return Limiter(
            *rules,
            name=name or secrets.token_hex(8),
            store=self.store if store is None else store,
            clock=None if self.own_time else self.clock,
        )

    def rule(
        self, kind: str, limit: int, period_us: int = 60_000_000, *, burst: int | None = None, **options: Any
    ) -> Rule:
        """Return a rule of some kind; a test for all kinds is left out for those that the store does not take."""
        if kind not in self.kinds:
            pytest.skip(f"this store does not take a {kind}")
        return make_rule(kind, Quota(limit, period_us, burst), **options)

    @property
    def features(self) -> frozenset[Feature]:
        """What the store can do besides counting rates."""
        return ALL_FEATURES - self.missing_features

    def need(self, *features: Feature) -> None:
        """Leave the test out if the store cannot do this yet."""
        missing = set(features) & self.missing_features
        if missing:
            pytest.skip(f"this store cannot do this yet: {', '.join(sorted(missing))}")

    def require(self, promise: str) -> None:
        """Leave the test out if the store does not give this guarantee."""
        guarantees: Guarantees = self.store.guarantees
        if not getattr(guarantees, promise):
            pytest.skip(f"not promised by this store: {promise}")

    def for_all(self, examples: SearchStrategy[Any], check: Callable[[Any], None]) -> None:
        """Try a property on random examples.

        Not `@given` on a method: one that several classes inherit would share its search between their stores.
        """
        profile = settings.get_profile(settings.get_current_profile_name())
        wanted = max(1, round(profile.max_examples * self.effort))

        @settings(max_examples=wanted, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(examples)
        def search(example: Any) -> None:
            check(example)

        search()
