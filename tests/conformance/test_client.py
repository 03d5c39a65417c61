"""A server in front of a memory keeps the promises of a store: it loses nothing of a call and nothing of an answer.

The clock is the server's and the test's; the contract changes limits from one call to the next, which here is a change of
the server's policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, cast

import pytest

from headgate import ConfigError, Rule
from headgate.client import ServerStore
from headgate.keys import PlainKey
from headgate.stores.base import AsyncGate, Gate
from headgate.testing import FakeClock
from headgate.testing.contract import keys
from headgate.testing.contract.base import Contract
from headgate.testing.contract.features import FeatureTests
from tests.conformance.variants import BlockingVariant, TaskVariant
from tests.server.loopback import LONGEST_WAIT, ThreadedServer, limiter_policy, policy_of

MOST_LIMITERS = 8
"""Number of limiters in a policy; no test uses more at a time."""


def _has_halves(key: PlainKey) -> bool:
    return isinstance(key, str) and any("\ud800" <= character <= "\udfff" for character in key)


HALVES = tuple(key for key in keys.HOSTILE_KEYS if _has_halves(key))
WHOLE = tuple(key for key in keys.HOSTILE_KEYS if not _has_halves(key))


class FollowedStore(ServerStore):
    """A store whose server always has the rules of the latest binding or call."""

    def __init__(self, server: ThreadedServer) -> None:
        super().__init__(server.url, deadline=LONGEST_WAIT)
        self._server = server

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        self._use(limiter, rules)
        gate = super().bind(limiter, rules, deadline=deadline)
        return cast("Gate", Following(gate, partial(self._use, limiter, rules)))

    def bind_async(
        self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None
    ) -> AsyncGate:
        self._use(limiter, rules)
        gate = super().bind_async(limiter, rules, deadline=deadline)
        return cast("AsyncGate", Following(gate, partial(self._use, limiter, rules)))

    def _use(self, limiter: str, rules: tuple[Rule, ...]) -> None:
        known = dict(self._server.live.policy.limiters)
        if limiter in known and known[limiter].rules is rules:
            return
        known.pop(limiter, None)
        recent = list(known.values())[1 - MOST_LIMITERS :]
        self._server.use(policy_of(*recent, limiter_policy(limiter, rules)))


class Following:
    """A gate, blocking or asynchronous, that runs a callback before each call."""

    def __init__(self, gate: Gate | AsyncGate, before: Callable[[], None]) -> None:
        self._gate = gate
        self._before = before

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._gate, name)

        def follow(*args: Any) -> Any:
            self._before()
            return call(*args)

        return follow


class CurrentClock(FakeClock):
    """The clock of the current test: one server runs for all tests."""

    of_the_test: FakeClock

    def now_us(self) -> int:
        return self.of_the_test.now_us()


class OnServer(Contract):
    """Stores that are a server in front of a memory."""

    own_time = True
    effort: ClassVar[float] = 0.1

    @pytest.fixture(autouse=True)
    def _leave_out_half_characters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """JSON cannot encode lone surrogates; see `test_a_lone_surrogate_is_not_a_valid_key`."""
        monkeypatch.setattr(keys, "HOSTILE_KEYS", WHOLE)

    def test_a_lone_surrogate_is_not_a_valid_key(self) -> None:
        limiter = self.limiter(self.rule("fixed_window", 5))
        assert len(HALVES) == 4
        for key in HALVES:
            with pytest.raises(ConfigError, match="make it bytes"):
                limiter.hit(key)
            assert limiter.hit(str(key).encode("utf-8", "surrogatepass")).remaining == 4

    @pytest.fixture(scope="class")
    @classmethod
    def shared_server(cls) -> Iterator[tuple[ThreadedServer, CurrentClock]]:
        clock = CurrentClock()
        with ThreadedServer(policy_of(), clock=clock) as server:
            yield server, clock

    @pytest.fixture(autouse=True)
    def _connect(self, _prepare: None, shared_server: tuple[ThreadedServer, CurrentClock]) -> None:
        self.server, clock = shared_server
        clock.of_the_test = self.clock

    def make_store(self) -> FollowedStore:
        return FollowedStore(self.server)


class TestServer(OnServer, BlockingVariant, keys.KeyTests, FeatureTests):
    pass


class TestAsyncServer(TaskVariant, OnServer):
    pass
