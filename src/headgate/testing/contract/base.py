"""The base of all conformance tests: a store under test, a clock, and limiters."""

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


@pytest.mark.filterwarnings("ignore:.*limiter .*has no tier:UserWarning")
class Contract:
    """A store under test.

    Attributes:
        own_time: Whether the store reads the time itself; `make_store` must then pass it `self.clock`. By default every
            call carries the time.
        kinds: The kinds of rates that the store counts.
        missing_features: Features that the store does not support yet.
        effort: The number of random examples per property, as a fraction of the active Hypothesis profile's.
        clock: The clock, in either case.
        folder: A separate empty folder for each test.
    """

    own_time: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = ALL_KINDS
    missing_features: ClassVar[frozenset[Feature]] = frozenset()
    effort: ClassVar[float] = 1.0

    clock: FakeClock

    def make_store(self) -> Any:
        """Return the store to test. If the store is shared, all stores created in one test must count together."""
        raise NotImplementedError("return the store to test")

    def dump(self) -> object:
        """Return the complete contents of the store in any comparable form; `None` if that is not possible."""
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
        """A separate empty folder for each test, created on first access."""
        folder: Path = self._request.getfixturevalue("tmp_path")
        return folder

    @cached_property
    def store(self) -> Store:
        """The store under test, created on first access."""
        return self.open_store()

    def open_store(self) -> Store:
        """Return another store like the one under test; the caller closes it."""
        store: Store = self.make_store()
        return store

    def limiter(self, *rules: Rule, name: str | None = None, store: Store | None = None) -> Limiter:
        """Return a limiter on the store; without a name, it gets a unique one and shares no counts."""
        return Limiter(
            *rules,
            name=name or secrets.token_hex(8),
            store=self.store if store is None else store,
            clock=None if self.own_time else self.clock,
        )

    def rule(
        self, kind: str, limit: int, period_us: int = 60_000_000, *, burst: int | None = None, **options: Any
    ) -> Rule:
        """Return a rule of a kind; skip the test if the store does not support this kind."""
        if kind not in self.kinds:
            pytest.skip(f"this store does not support {kind} rules")
        return make_rule(kind, Quota(limit, period_us, burst), **options)

    @property
    def features(self) -> frozenset[Feature]:
        """The features of the store besides counting rates."""
        return ALL_FEATURES - self.missing_features

    def need(self, *features: Feature) -> None:
        """Skip the test if the store does not support these features yet."""
        missing = set(features) & self.missing_features
        if missing:
            pytest.skip(f"not supported by this store yet: {', '.join(sorted(missing))}")

    def require(self, promise: str) -> None:
        """Skip the test if the store does not give this guarantee."""
        guarantees: Guarantees = self.store.guarantees
        if not getattr(guarantees, promise):
            pytest.skip(f"not guaranteed by this store: {promise}")

    def for_all(self, examples: SearchStrategy[Any], check: Callable[[Any], None]) -> None:
        """Check a property on random examples.

        Not `@given` on a method: classes that inherit the method would share one search between their stores.
        """
        profile = settings.get_profile(settings.get_current_profile_name())
        wanted = max(1, round(profile.max_examples * self.effort))

        @settings(max_examples=wanted, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(examples)
        def search(example: Any) -> None:
            check(example)

        search()
