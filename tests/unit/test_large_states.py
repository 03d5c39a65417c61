"""Shared stores accept at most 1,000 entries per state; memory accepts any number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    Limiter,
    Quota,
    Rule,
    SQLiteStore,
    sliding_log,
    sliding_window,
)
from headgate.algorithms import MAX_ENTRIES, algorithm_for
from headgate.policy import LivePolicy, PolicyError
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from headgate.testing import FakeClock
from headgate.usage import with_unreachable_limits

AnyShared = SQLiteStore | RedisStore | PostgresStore

NOW = 1_700_000_000_000_000
TOO_LARGE = (
    pytest.param(sliding_log("1001/minute"), r"use sliding_window\('1001/minute'\)", id="log"),
    pytest.param(sliding_log("5/minute", tiers={"pro": "1001/minute"}), "1001/minute", id="log of a tier"),
    pytest.param(sliding_window("5/minute", buckets=1001), "at most 1000 buckets, not 1001", id="window"),
)
MOST = (sliding_log("1000/minute", tiers={"pro": "1000/minute"}), sliding_window("5000/minute", buckets=1000))


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyShared]:
    """Return a shared store; no server listens at the addresses of the network stores."""
    stores = {
        "sqlite": lambda: SQLiteStore(tmp_path / "limits.db"),
        "redis": lambda: RedisStore("redis://localhost:1"),
        "postgres": lambda: PostgresStore("postgresql://localhost:1/limits"),
    }
    with stores[request.param]() as store:
        yield store


@pytest.mark.parametrize(("rule", "message"), TOO_LARGE)
def test_a_shared_store_refuses_a_larger_state(shared_store: AnyShared, rule: Rule, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Limiter("5/hour", rule, name="x", store=shared_store)
    with pytest.raises(ConfigError, match=message):
        AsyncLimiter(rule, name="x", store=shared_store)


def test_a_shared_store_accepts_1000_entries(shared_store: AnyShared) -> None:
    Limiter(*MOST, name="x", store=shared_store)


def test_a_shared_store_refuses_a_larger_quota_of_a_call(shared_store: AnyShared) -> None:
    rules = sliding_log("5/minute", name="log"), sliding_window("5/minute", name="window")
    limiter = Limiter(*rules, name="x", store=shared_store)
    with pytest.raises(ConfigError, match="'log': a sliding_log on a shared store"):
        limiter.hit("a", quota={"log": "1001/minute"})
    with pytest.raises(ConfigError, match="limit of at most 1000, not 2000"):
        limiter.hold("a", quota={"log": Quota(2000, 60_000_000)})


def test_a_quota_function_cannot_make_a_state_larger(tmp_path: Path) -> None:
    with SQLiteStore(tmp_path / "limits.db") as store:
        limiter = Limiter(
            sliding_log("5/minute"), name="x", store=store, quotas=lambda key, tier: "1001/minute"
        )
        with pytest.raises(ConfigError, match="at most 1000"):
            limiter.hit("a")


def test_counts_beyond_the_limit_of_a_log_can_be_read(tmp_path: Path) -> None:
    rule = sliding_log("5/minute")
    with SQLiteStore(tmp_path / "limits.db") as store:
        Limiter(rule, name="x", store=store).record("a", 1200)
        highest = Limiter(with_unreachable_limits(rule), name="x", store=store).check("a", 0)
    assert highest.limit - highest.remaining == 1200


def test_a_reload_with_a_larger_state_keeps_the_old_policy(tmp_path: Path) -> None:
    path = tmp_path / "headgate.toml"
    text = f'[limiters.api]\nstore = "sqlite:///{tmp_path}/limits.db"\nrules = [{{quota = "%s", kind = "sliding_log"}}]'
    path.write_text(text % "2/minute")
    with LivePolicy.from_file(path) as live:
        path.write_text(text % "1001/minute")
        with pytest.raises(
            PolicyError, match=r"limiter 'api': .* at most 1000, not 1001; use sliding_window"
        ):
            live.reload()
        assert "at most 1000" in (live.last_error or "")
        assert [live["api"].hit("a").allowed for _ in range(3)] == [True, True, False]


def test_memory_store_has_no_size_limit_per_state() -> None:
    clock = FakeClock()
    limiter = Limiter(
        sliding_log("1500/minute", tiers={"pro": "3000/minute"}),
        sliding_window("3000/minute", buckets=3000),
        clock=clock,
    )
    for _ in range(1500):
        assert limiter.hit("a")
        clock.advance_us(1)
    assert not limiter.hit("a")
    assert limiter.hit("a", tier="pro")
    clock.advance_us(60_000_000 - 1500)
    assert limiter.check("a", 0, tier="pro").results[0].remaining == 1500


@pytest.mark.parametrize(("limit", "entries"), [(3, MAX_ENTRIES), (1000, MAX_ENTRIES), (1200, 1200)])
def test_a_record_in_a_full_log_moves_the_newest_entry_to_now(limit: int, entries: int) -> None:
    algorithm = algorithm_for(sliding_log(f"{limit}/minute"))
    state = None
    for number in range(entries):
        state = algorithm.record(state, NOW + number, 2, 1)
    assert state is not None
    full = algorithm.record(state, NOW + entries + 10, 5, 1)
    assert full == (*state[:-2], NOW + entries + 10, 7)
    assert algorithm.record(full, NOW, 1, 1) == (*state[:-2], NOW + entries + 10, 8)
    assert algorithm.fresh_at(full) == NOW + entries + 10 + 60_000_000
    # With room again, each record has an entry.
    later = NOW + 60_000_000
    assert algorithm.record(full, later, 1, 1) == (1, *full[3:], later, 1)


def test_windows_are_never_full() -> None:
    algorithm = algorithm_for(sliding_window("3/1001s", buckets=1001))
    state = None
    for second in range(1001):
        state = algorithm.record(state, NOW + second * 1_000_000, 1, 1)
    assert state is not None
    assert len(state) == 1 + 2 * 1001
