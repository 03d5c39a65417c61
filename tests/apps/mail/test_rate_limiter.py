"""The limiter by itself."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import ConfigError
from headgate.testing import FakeClock
from headgate_services.mail.rate_limiter import GlobalRateLimiter, WindowUsage


@pytest.mark.requirement("N-20", "N-21")
def test_n21_any_number_of_checks_consumes_nothing() -> None:
    limiter = GlobalRateLimiter(1, 50)
    assert all(limiter.check().allowed for _ in range(1000))
    limiter.record()
    assert not limiter.check().allowed


@pytest.mark.requirement("N-22")
def test_n22_the_result_says_whether_and_when() -> None:
    limiter = GlobalRateLimiter(1, 50, clock=FakeClock())
    allowed = limiter.check()
    assert (allowed.allowed, allowed.retry_after, allowed.detail) == (True, None, "")
    limiter.record()
    denied = limiter.check()
    assert (denied.allowed, denied.retry_after) == (False, 61)
    assert denied.detail == "Rate limit exceeded: per-minute limit reached (1/1)"


@pytest.mark.requirement("N-14")
def test_n14_the_count_is_what_was_recorded() -> None:
    limiter = GlobalRateLimiter(100, 0)
    for recorded in range(30):
        assert [window.count for window in limiter.check().windows] == [recorded, recorded]
        limiter.record()


@pytest.mark.requirement("N-20")
@pytest.mark.parametrize("limits", [(-1, 0), (0, -1)])
def test_n20_a_negative_limit_is_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="-1"):
        GlobalRateLimiter(*limits)


@pytest.mark.requirement("N-15")
def test_n15_memory_does_not_grow_with_traffic() -> None:
    clock = FakeClock()
    limiter = GlobalRateLimiter(10**9, 10**9, clock=clock)

    def an_hour_of_traffic(sends_every_20_seconds: int) -> None:
        for _ in range(180):
            clock.advance(20)
            for _ in range(sends_every_20_seconds):
                limiter.record()

    an_hour_of_traffic(1)
    tracemalloc.start()
    limiter.record()  # the state is a new object now, and so in sight
    before, _ = tracemalloc.get_traced_memory()
    an_hour_of_traffic(15)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert limiter.check().windows[1].count > 15 * 179
    assert after - before < 15_000  # 2,700 more sends; a list of their times would be seven times that


@pytest.mark.requirement("N-18")
def test_n18_no_record_is_lost_between_threads() -> None:
    limiter = GlobalRateLimiter(1_000_000, 1_000_000, clock=FakeClock())

    def record() -> None:
        for _ in range(1000):
            limiter.record()

    threads = [threading.Thread(target=record) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [window.count for window in limiter.check().windows] == [8000, 8000]


async def test_shared_counts_are_seen_by_check_record_and_hold_alike(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'limits.db'}"
    clock = FakeClock()
    one = GlobalRateLimiter(3, 0, store=url, clock=clock)
    other = GlobalRateLimiter(3, 0, store=url, clock=clock)
    one.record()
    await other.hold()
    assert (await one.usage()).windows[0] == WindowUsage("per-minute", 2, 3)
    await one.hold()
    assert other.check().retry_after == 61
    await one.aclose()
    await other.aclose()


async def test_a_failed_refund_keeps_the_unit_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = GlobalRateLimiter(1, 0, store=f"sqlite:///{tmp_path / 'limits.db'}")
    hold = await limiter.hold()
    await limiter.aclose()
    await hold.release()
    assert "stays counted" in caplog.text


@given(
    steps=st.lists(st.tuples(st.floats(0, 40), st.booleans()), min_size=1, max_size=60),
    limit=st.integers(1, 4),
)
async def test_no_minute_ever_holds_more_than_the_limit(steps: list[tuple[float, bool]], limit: int) -> None:
    """NL-5: for any times and any releases."""
    clock = FakeClock()
    limiter = GlobalRateLimiter(limit, 0, clock=clock)
    sent: list[int] = []
    for pause, succeeds in steps:
        clock.advance(pause)
        hold = await limiter.hold()
        if not hold.result.allowed:
            wait = hold.result.retry_after
            assert wait is not None
            clock.advance(wait - 1)
            assert not limiter.check().allowed
            clock.advance(1)
            assert limiter.check().allowed
        elif succeeds:
            await hold.confirm()
            sent.append(clock.now_us())
        else:
            await hold.release()
    for first in sent:
        assert sum(first <= at < first + 60_000_000 for at in sent) <= limit
