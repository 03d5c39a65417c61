"""Limiters and policies that open the same URL share one store; nothing here connects."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headgate import AsyncLimiter, ConfigError, Limiter, open_store
from headgate.policy import AsyncLivePolicy, LivePolicy, PolicyError, parse_policy
from headgate.stores.redis import RedisStore
from tests.unit.flavours import close

URL = "redis://ada:secret@127.0.0.1:1/7"

Open = Callable[..., Limiter]


@pytest.fixture
def open_limiter() -> Iterator[Open]:
    """A function that opens limiters by URL; they are closed at the end of the test."""
    with ExitStack() as stack:

        def open_limiter(url: str = URL, **options: Any) -> Limiter:
            return stack.enter_context(Limiter("5/minute", name="x", store=url, **options))

        yield open_limiter


@pytest.mark.parametrize(
    "url",
    [
        URL,
        "valkeys://127.0.0.1:1",
        "unix:///nowhere.sock",
        "redis+sentinel://127.0.0.1:1/primary",
        "redis+cluster://127.0.0.1:1",
        "postgresql://ada:secret@127.0.0.1:1/x",
        "http://:secret@127.0.0.1:1",
    ],
)
def test_limiters_with_one_url_share_a_store(open_limiter: Open, url: str) -> None:
    assert open_limiter(url).store is open_limiter(url).store


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://127.0.0.1:1", "REDIS://127.0.0.1:1"),
        ("redis://127.0.0.1:1?client_name=a&protocol=3", "redis://127.0.0.1:1?protocol=3&client_name=a"),
        (
            "postgresql://127.0.0.1:1/x?connect_timeout=3&application_name=a",
            "postgresql://127.0.0.1:1/x?application_name=a&connect_timeout=3",
        ),
    ],
)
def test_case_of_the_scheme_and_order_of_options_are_ignored(
    open_limiter: Open, one: str, other: str
) -> None:
    assert open_limiter(one).store is open_limiter(other).store


@pytest.mark.parametrize(
    "other",
    [
        "redis://ada:Secret@127.0.0.1:1/7",
        "redis://bob:secret@127.0.0.1:1/7",
        "redis://ada:secret@127.0.0.1:1/8",
        "redis://ada:secret@127.0.0.1:2/7",
        "rediss://ada:secret@127.0.0.1:1/7",
        f"{URL}?client_name=a",
    ],
)
def test_different_credentials_addresses_or_options_open_another_store(
    open_limiter: Open, other: str
) -> None:
    assert open_limiter(URL).store is not open_limiter(other).store


def test_memory_and_sqlite_stores_are_private(open_limiter: Open, tmp_path: Path) -> None:
    for url in ("memory://", "sqlite:///:memory:", f"sqlite:///{tmp_path}/limits.db"):
        assert open_limiter(url).store is not open_limiter(url).store


async def test_limiters_of_threads_and_of_tasks_share_a_store(open_limiter: Open) -> None:
    async with AsyncLimiter("5/minute", name="x", store=URL) as limiter:
        assert limiter.store is open_limiter().store


async def test_the_last_limiter_to_close_closes_the_store(
    flavour: type[Limiter] | type[AsyncLimiter],
) -> None:
    first, second = (flavour("5/minute", name="x", store=URL) for _ in range(2))
    store: Any = first.store
    await close(first)
    await close(first)
    assert not store.is_closed
    await close(second)
    assert store.is_closed


def test_a_closed_store_is_replaced(open_limiter: Open) -> None:
    first = open_limiter()
    first.close()
    second = open_limiter()
    first.close()
    second_store: Any = second.store
    assert second_store is not first.store
    assert not second_store.is_closed
    second_store.close()  # by the user, although the limiter stays open
    third = open_limiter()
    third_store: Any = third.store
    assert third_store is not second_store
    second.close()
    assert not third_store.is_closed
    assert open_limiter().store is third_store


def test_a_limiter_collected_without_close_leaves_the_store_to_others(open_limiter: Open) -> None:
    forgotten = Limiter("5/minute", name="x", store=URL)
    kept, store = open_limiter(), weakref.ref(forgotten.store)
    del forgotten
    gc.collect()
    open_limiter().close()
    assert kept.store is store()
    assert not kept.store.is_closed  # type: ignore[attr-defined]


def test_unreferenced_store_is_collected() -> None:
    limiter = Limiter("5/minute", name="x", store="redis://127.0.0.1:1/9")
    gone = weakref.ref(limiter.store)
    del limiter
    gc.collect()
    assert gone() is None


def test_a_limiter_that_cannot_be_made_releases_the_store(open_limiter: Open) -> None:
    limiter = open_limiter()
    store: Any = limiter.store
    with pytest.raises(ConfigError, match="on_store_error"):
        open_limiter(on_store_error="wrong")
    with pytest.raises(ConfigError, match="deadline"):
        open_limiter(deadline=-1)
    limiter.close()
    assert store.is_closed


def test_a_given_store_is_neither_shared_nor_closed(open_limiter: Open) -> None:
    with RedisStore(URL) as store:
        with Limiter("5/minute", name="x", store=store) as limiter:
            assert limiter.store is store
            assert open_limiter().store is not store
        assert not store.is_closed
    with open_store(URL) as opened:  # type: ignore[attr-defined]
        assert opened is not open_limiter().store


def test_deadline_belongs_to_one_limiter(open_limiter: Open) -> None:
    store: Any = open_limiter(deadline=0.3).store
    assert store is open_limiter(deadline=30).store is open_limiter().store
    assert store.deadline == 1


def test_limiters_share_the_health_of_their_store(open_limiter: Open) -> None:
    first, second = open_limiter(), open_limiter(on_store_error="closed")
    assert first.hit("ada").degraded
    assert (second.health.state, second.health.outages, second.health.failures) == ("unavailable", 1, 1)
    assert not second.hit("ada")
    assert (second.health.failures, second.health.degraded) == (1, 1)


def test_threads_that_open_and_close_never_share_a_closed_store() -> None:
    start = threading.Barrier(8)

    def open_and_close(_: int) -> int:
        start.wait()
        closed = 0
        for _ in range(40):
            with Limiter("5/minute", name="x", store=URL) as limiter:
                closed += limiter.store.is_closed  # type: ignore[attr-defined]
        return closed

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(open_and_close, range(8))) == 0
    with Limiter("5/minute", name="x", store=URL) as limiter:
        store: Any = limiter.store
    assert store.is_closed


def test_repr_of_a_shared_store_hides_its_credentials(open_limiter: Open) -> None:
    limiter = open_limiter()
    assert "secret" not in f"{limiter!r} {limiter.store!r} {vars(limiter)!r}"


POLICY = f"""
[limiters.a]
rules = ["5/minute"]
store = "{URL}"
"""


def test_a_policy_shares_stores_with_limiters_and_other_policies(open_limiter: Open) -> None:
    limiter = open_limiter()
    store: Any = limiter.store
    one, other = LivePolicy(parse_policy(POLICY)), AsyncLivePolicy(parse_policy(POLICY))
    assert one["a"].store is other["a"].store is store
    limiter.close()
    one.close()
    one.close()
    assert not store.is_closed
    asyncio.run(other.aclose())
    assert store.is_closed


def test_a_policy_that_cannot_be_used_releases_its_stores(open_limiter: Open) -> None:
    limiter = open_limiter()
    store: Any = limiter.store
    missing = '[limiters.b]\nrules = ["5/minute"]\nstore = "sqlite:////nowhere/at/all.db"\n'
    with pytest.raises(PolicyError, match="limiter 'b'"):
        LivePolicy(parse_policy(POLICY + missing))
    limiter.close()
    assert store.is_closed
