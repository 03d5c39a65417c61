"""Holds of a policy file: shadow rules, overrides, and files that change between take and finish."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headgate import AsyncLimiter, Rule, sliding_window, token_bucket
from headgate.policy import AsyncLivePolicy
from headgate.stores import SQLiteStore
from headgate_server.holds import HoldBook, SettleResult
from tests.server.hold_places import take

LIVE = sliding_window("1000/hour", name="live")
ROOMY = sliding_window("5000/hour", name="roomy")
BUCKET = token_bucket("5000/day", name="bucket")
TIGHT = sliding_window("500/hour", name="tight")

LIVE_RULE = '{ quota = "1000/hour", name = "live" }'
SHADOWS = """
    { quota = "5000/hour", name = "roomy", shadow = true },
    { quota = "5000/day", kind = "token_bucket", name = "bucket", shadow = true },
    { quota = "500/hour", name = "tight", shadow = true },
"""


class Site:
    """A policy file, and the workers of a server that follow it."""

    def __init__(self, folder: Path, workers: AsyncExitStack) -> None:
        self._folder = folder
        self._workers = workers
        self.write(f"{LIVE_RULE},{SHADOWS}")

    def write(self, rules: str, more: str = "") -> None:
        text = f'[limiters.llm]\nstore = "sqlite:///{self._folder}/limits.db"\nrules = [{rules}]\n{more}'
        (self._folder / "headgate.toml").write_text(text, encoding="utf-8")

    async def worker(self) -> HoldBook:
        live = await self._workers.enter_async_context(
            AsyncLivePolicy.from_file(self._folder / "headgate.toml")
        )
        return HoldBook(live)

    async def used(self, rule: Rule) -> int:
        """Return the used units of a live or shadow rule."""
        async with SQLiteStore(self._folder / "limits.db") as store:
            result = (await AsyncLimiter(rule, name="llm", store=store).check("alice", 0)).results[0]
            return result.limit - result.remaining


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as workers:
        yield Site(tmp_path, workers)


@pytest.mark.parametrize("cost", [300, 0, 800, 900])
async def test_any_worker_settles_shadow_rules(site: Site, cost: int) -> None:
    one, other = await site.worker(), await site.worker()
    hold_id = await take(one)
    assert [await site.used(rule) for rule in (LIVE, ROOMY, BUCKET, TIGHT)] == [800, 800, 800, 0]
    assert await other.finish(hold_id, cost) == SettleResult("llm", 800, cost, first=True)
    assert await one.finish(hold_id, 1) == SettleResult("llm", 800, cost, first=False)
    assert [await site.used(rule) for rule in (LIVE, ROOMY, BUCKET)] == [cost] * 3


async def test_shadow_rule_that_would_refuse_counts_nothing(site: Site) -> None:
    hold_id = await take(await site.worker())
    await (await site.worker()).finish(hold_id, 900)
    assert await site.used(TIGHT) == 0


Change = Callable[[Site], None]


def drop_shadows(site: Site) -> None:
    site.write(LIVE_RULE)


def drop_live_rule(site: Site) -> None:
    site.write(f'"9000/day",{SHADOWS}')


def promote(site: Site) -> None:
    site.write(f"{LIVE_RULE},{SHADOWS.replace(', shadow = true', '')}")


def swap_everything(site: Site) -> None:
    site.write('"9000/day", { quota = "7/day", name = "new", shadow = true }')


@pytest.mark.parametrize(
    ("change", "used"),
    [
        (drop_shadows, [300, 800, 800]),
        (drop_live_rule, [800, 800, 800]),  # with other live rules, shadow rules get nothing back
        # As live rules they would have to be given back by a receipt that speaks of shadow rules.
        (promote, [300, 800, 800]),
        (swap_everything, [800, 800, 800]),
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
async def test_removed_rules_get_nothing_back(
    site: Site, change: Change, used: list[int], restarted: bool
) -> None:
    book = await site.worker()
    hold_id = await take(book)
    change(site)
    if restarted:
        book = await site.worker()
    else:
        live = book._live
        assert isinstance(live, AsyncLivePolicy)
        assert live.reload()
    assert await book.finish(hold_id, 300) == SettleResult("llm", 800, 300, first=True)
    assert [await site.used(rule) for rule in (LIVE, ROOMY, BUCKET)] == used


async def test_override_applies_to_holds(site: Site) -> None:
    site.write(LIVE_RULE, '[[limiters.llm.overrides]]\nkey = "alice"\nrules = { live = "9000/hour" }')
    one, other = await site.worker(), await site.worker()
    hold_id = await take(one, cost=8000)
    await other.finish(hold_id, 8500)
    assert (await other._live["llm"].check("alice", 0)).remaining == 500


async def test_a_hold_of_shadow_rules_alone_is_settled(site: Site) -> None:
    site.write(SHADOWS)
    hold_id = await take(await site.worker())
    await (await site.worker()).finish(hold_id, 300)
    assert [await site.used(rule) for rule in (ROOMY, BUCKET)] == [300, 300]
