"""Figures: counted in each worker, added up over all of them."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from headgate.policy import AsyncLivePolicy, parse_policy
from headgate.testing import FakeClock
from headgate_server.history import DecisionHistory
from headgate_server.latency import MINUTE, StoreLatency, quantile, total
from headgate_server.snapshots import SharedFolder, Snapshot, merged
from headgate_server.statistics import Statistics, shown_key
from headgate_server.wire import Figures, History, RefusedKey, RuleRefusals, StoreShown, Tick
from tests.server.support import next_tick

POLICY = """
[limiters.login]
rules = ["2/minute"]
[limiters.api]
rules = ["100/minute", { quota = "1/hour", name = "candidate", shadow = true }]
"""
TOP = POLICY + "[server]\ntop_keys = 2\n"


def times(history: DecisionHistory) -> list[int]:
    """Return the seconds that are known."""
    return [second.time for second in msgspec.json.decode(history.seconds.whole(), type=History).ticks]


def live_with(statistics: Statistics, policy: str = POLICY) -> AsyncLivePolicy:
    return AsyncLivePolicy(parse_policy(policy), hooks=[statistics], clock=FakeClock())


async def test_tick_has_the_second_and_the_totals() -> None:
    statistics = Statistics()
    live = live_with(statistics)
    for _ in range(5):
        await live["login"].hit("alice")
    await live["login"].check("alice")
    first = next_tick(statistics, live, 100)
    assert first.limiters["login"] == first.totals["login"] == Figures(admitted=2, refused=3)
    assert first.limiters["api"] == Figures()
    async with live["api"].hold("alice"):
        await live["api"].record("alice")
    second = next_tick(statistics, live, 101)
    assert (second.time, second.workers) == (101, 1)
    assert second.limiters["login"] == Figures()
    assert second.totals["login"] == Figures(admitted=2, refused=3)
    assert second.limiters["api"] == Figures(admitted=1)


async def test_late_tick_covers_all_seconds_since_the_last() -> None:
    statistics = Statistics()
    live = live_with(statistics)
    # The last: someone has set the clock.
    assert [next_tick(statistics, live, at).seconds for at in (100, 104, 103)] == [1, 4, 1]
    ticks = msgspec.json.decode(statistics.history.seconds.whole(), type=History).ticks
    assert [(tick.time, tick.seconds) for tick in ticks] == [(100, 1), (103, 1)]


async def test_policy_decisions_are_counted_as_degraded() -> None:
    statistics = Statistics()
    far = '[limiters.far]\nrules = ["5/minute"]\nstore = "redis://u:secret@127.0.0.1:1/0"'
    live = live_with(statistics, far)
    await live["far"].hit("alice")
    tick = next_tick(statistics, live, 1)
    assert tick.limiters["far"] == Figures(admitted=1, degraded=1)
    (store,) = tick.stores
    assert store.reason is not None
    assert "127.0.0.1:1" in store.reason
    assert (store.last_contact, store.p50, store.p99) == (None, None, None)
    assert store.since is not None
    assert next_tick(statistics, live, 2).stores[0].since == store.since
    assert (store.limiter, store.store, store.up, store.breaker) == (
        "far",
        "redis://***@127.0.0.1:1/0",
        False,
        "open",
    )
    assert store.failures == 1
    await live.aclose()


async def test_degraded_refusals_are_counted_separately() -> None:
    statistics = Statistics()
    far = '[limiters.far]\nrules = ["5/minute"]\nstore = "redis://127.0.0.1:1/0"\non_store_error = "closed"'
    live = live_with(statistics, far)
    await live["far"].hit("alice")
    tick = next_tick(statistics, live, 1)
    assert tick.limiters["far"] == Figures(refused=1, degraded=1, degraded_refused=1)
    assert tick.refusals == []
    await live.aclose()


def test_a_quantile_is_at_most_a_fifth_too_high_and_forgets() -> None:
    latency = StoreLatency()
    for seconds in [0.001] * 98 + [0.2] * 2:
        latency.add(seconds, 1000.0)
    times = total([latency.recent(1000.0), {}])
    assert 0.001 <= (quantile(times, 0.5) or 0) <= 0.0012
    assert 0.2 <= (quantile(times, 0.99) or 0) <= 0.24
    assert latency.recent(1000.0 + MINUTE) == times
    assert latency.recent(1000.0 + 2 * MINUTE) == {}
    assert latency.last == 1000.0


async def test_refusals_are_counted_by_rule_and_tier() -> None:
    statistics = Statistics()
    policy = """
[limiters.api]
rules = [{ quota = "0/minute", name = "all", tiers = { pro = "1/minute" } }]
[[limiters.api.overrides]]
key = "mallory"
rules = { all = "0/minute" }
"""
    live = live_with(statistics, policy)
    statistics.publish(live)
    for key, tier in (("a", "pro"), ("a", "pro"), ("b", None), ("b", "made up"), ("mallory", "pro")):
        await live["api"].hit(key, tier=tier)
    assert next_tick(statistics, live, 1).refusals == [
        RuleRefusals("api", "all", "pro", 1),
        RuleRefusals("api", "all", None, 2),
        RuleRefusals("api", "all", "override", 1),
    ]


async def test_units_of_open_holds_are_counted_by_unit() -> None:
    statistics = Statistics()
    live = live_with(
        statistics,
        """
        [limiters.model]
        rules = [
          { quota = "1000/minute", unit = "tokens" },
          { kind = "concurrent", quota = 5, lease = "60s" },
        ]
        [limiters.words]
        rules = [{ quota = "1000/minute", unit = "words" }]
        """,
    )
    kept = await live["model"].hold("alice", {"tokens": 800})
    hold = await live["model"].hold("bob", {"tokens": 100, "requests": 2})
    words = await live["words"].hold("alice", 7)
    held = {"model": {"tokens": 900, "requests": 3}, "words": {"words": 7}}
    assert next_tick(statistics, live, 1).held == held
    assert kept
    await hold.confirm()
    await words.release()
    assert next_tick(statistics, live, 2).held == {
        "model": {"tokens": 800, "requests": 1},
        "words": {"words": 0},
    }


async def test_keys_are_shown_only_if_the_policy_allows_it() -> None:
    statistics = Statistics()
    live = live_with(statistics)
    for _ in range(3):
        await live["login"].hit("alice")
    assert next_tick(statistics, live, 1).top is None
    live = live_with(statistics, TOP)
    assert next_tick(statistics, live, 2).top == []
    for key, hits in (("alice", 6), ("bob", 4), ("carol", 3)):
        for _ in range(hits):
            await live["login"].hit(key)
    assert next_tick(statistics, live, 3).top == [
        RefusedKey("login", "alice", 4, "alice"),
        RefusedKey("login", "bob", 2, "bob"),
    ]
    assert next_tick(statistics, live_with(statistics), 4).top is None


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (None, ""),
        ("alice", "alice"),
        (b"\x00", "b'\\x00'"),
        ({"user": "42", "realm": b"n"}, "user: 42, realm: b'n'"),
        ("\ud800", "\\ud800"),
        ("x" * 500, "x" * 127 + "…"),
    ],
)
def test_shown_keys_are_valid_text(key: object, text: str) -> None:
    assert shown_key(key) == text  # type: ignore[arg-type]
    assert msgspec.json.encode(shown_key(key))  # type: ignore[arg-type]


# Several workers


async def test_figures_of_workers_are_summed(tmp_path: Path) -> None:
    boards = [Statistics(SharedFolder(tmp_path, name)) for name in ("0-0", "1-0")]
    lives = [live_with(statistics, TOP) for statistics in boards]
    for statistics, live in zip(boards, lives, strict=True):
        next_tick(statistics, live, 0)
        for _ in range(4):
            await live["login"].hit("alice")
        await live["api"].hit("bob")
        await live["api"].hit("bob")
    next_tick(boards[0], lives[0], 1)
    tick = next_tick(boards[1], lives[1], 1)
    assert tick.workers == 2
    assert tick.totals["login"] == Figures(admitted=4, refused=4)
    assert tick.top == [RefusedKey("login", "alice", 4, "alice")]
    (shadow,) = tick.shadow
    assert (shadow.asked, shadow.refused) == (4, 2)
    assert [store.limiter for store in tick.stores] == ["login", "api"]


async def test_totals_do_not_go_backwards_when_a_worker_is_replaced(tmp_path: Path) -> None:
    seen: list[Tick] = []
    stays, leaves = Statistics(SharedFolder(tmp_path, "0-0")), Statistics(SharedFolder(tmp_path, "1-0"))
    policy = live_with(stays)
    leaving = live_with(leaves)
    for _ in range(3):
        await leaving["login"].hit("alice")
        await leaving["api"].hit("alice")
    next_tick(stays, policy, 0)
    next_tick(leaves, leaving, 1)
    seen.append(next_tick(stays, policy, 1))
    SharedFolder.retire(tmp_path, "1-0")
    seen.append(next_tick(stays, policy, 2))
    comes = Statistics(SharedFolder(tmp_path, "1-1"))
    coming = live_with(comes)
    await coming["login"].hit("alice")
    seen.append(next_tick(comes, coming, 3))
    seen.append(next_tick(stays, policy, 3))
    assert [tick.workers for tick in seen] == [2, 1, 2, 2]
    assert [tick.totals["login"].admitted for tick in seen] == [2, 2, 3, 3]
    assert [tick.limiters["login"].admitted for tick in seen] == [2, 0, 1, 1]
    assert [tick.shadow[0].refused for tick in seen] == [2, 2, 2, 2]


async def test_missing_snapshot_does_not_lower_totals(tmp_path: Path) -> None:
    """A file that is being renamed while it is looked for."""
    statistics, other = Statistics(SharedFolder(tmp_path, "0-0")), Statistics(SharedFolder(tmp_path, "1-0"))
    live, more = live_with(statistics), live_with(other)
    await more["login"].hit("alice")
    next_tick(other, more, 1)
    assert next_tick(statistics, live, 1).totals["login"].admitted == 1
    (tmp_path / "1-0.worker").rename(tmp_path / "elsewhere")
    tick = next_tick(statistics, live, 2)
    assert (tick.totals["login"].admitted, tick.limiters["login"].admitted) == (1, 0)
    (tmp_path / "elsewhere").rename(tmp_path / "1-0.gone")
    assert next_tick(statistics, live, 3).totals["login"].admitted == 1


async def test_new_worker_has_the_history(tmp_path: Path) -> None:
    statistics = Statistics(SharedFolder(tmp_path, "0-0"))
    live = live_with(statistics)
    await live["login"].hit("alice")
    for at in range(95, 101):
        next_tick(statistics, live, at)
    late = Statistics(SharedFolder(tmp_path, "1-0"))
    assert times(late.history) == [95, 96, 97, 98, 99, 100]
    assert next_tick(late, live_with(late), 101).limiters["login"] == Figures()


def test_worker_without_a_snapshot_can_be_retired(tmp_path: Path) -> None:
    SharedFolder.retire(tmp_path, "0-0")
    assert SharedFolder(tmp_path, "1-0").read() == ([], [])


async def test_full_disk_loses_only_figures_of_other_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statistics = Statistics(SharedFolder(tmp_path, "0-0"))
    live = live_with(statistics)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    await live["login"].hit("alice")
    assert next_tick(statistics, live, 1).totals["login"] == Figures(1)
    assert next_tick(statistics, live, 20).totals["login"] == Figures(1)
    assert len([text for text in caplog.messages if "No space left" in text]) == 1


def test_a_store_is_down_if_any_worker_cannot_reach_it() -> None:
    up = StoreShown("login", "redis://db", True, "closed", 1)
    down = StoreShown("login", "redis://db", False, "open", 2)
    for order in ([up, down], [down, up]):
        tick = merged(1, [Snapshot({}, [store]) for store in order], [], 0, {})
        assert tick.stores == [StoreShown("login", "redis://db", False, "open", 3)]


def test_an_error_of_any_worker_is_shown() -> None:
    snapshots = [Snapshot({}), Snapshot({}, policy_error="headgate.toml:3:1: no")]
    assert merged(1, snapshots, [], 0, {}).policy_error == "headgate.toml:3:1: no"


class Demo:
    traffic = True

    def services(self) -> list[dict[str, object]]:
        return [{"name": "mail", "url": "http://127.0.0.1:8001", "sent": 120, "refused": 7}]


async def test_the_demo_is_in_the_tick() -> None:
    statistics = Statistics()
    statistics.demo = Demo()
    assert msgspec.to_builtins(next_tick(statistics, live_with(statistics), 1))["demo"] == {
        "traffic": True,
        "services": [{"name": "mail", "url": "http://127.0.0.1:8001", "sent": 120, "refused": 7}],
    }
