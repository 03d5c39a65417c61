"""Shadow rules: counts and reports of refusals that do not affect calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headgate import ConfigError, CostTooHigh
from headgate.policy import AsyncLivePolicy, ShadowCount
from headgate.testing import FakeClock
from tests.unit.flavours import done, entered
from tests.unit.policy.conftest import Author
from tests.unit.recorder import Recorder

Follow = Callable[..., Any]

API = """
[limiters.api]
rules = [
  "4/minute",
  { quota = "2/minute", name = "tight", shadow = true },
  { quota = "3/minute", name = "loose", shadow = true },
]
"""

SCOPED = """
[limiters.api]
rules = [
  { quota = "3/minute", scope = "user" },
  { quota = "2/minute", name = "candidate", scope = "realm", shadow = true },
]
"""


async def hits(limiter: Any, times: int, key: Any = "ada", **arguments: Any) -> list[bool]:
    return [bool(await done(limiter.hit(key, **arguments))) for _ in range(times)]


async def test_shadow_rules_refuse_nothing_and_count_separately(follow: Follow) -> None:
    limiter = follow(API)["api"]
    decision = await done(limiter.hit("ada"))
    assert [result.name for result in decision.results] == ["per-minute"]
    assert (decision.limit, decision.remaining) == (4, 3)
    assert await hits(limiter, 3) == [True] * 3
    assert limiter.shadow_report() == {
        "tight": ShadowCount(asked=4, refused=2, failed=0),
        "loose": ShadowCount(asked=4, refused=1, failed=0),
    }


async def test_shadow_rules_decide_only_admitted_calls(follow: Follow, clock: FakeClock) -> None:
    limiter = follow(API)["api"]
    assert await hits(limiter, 9) == [True] * 4 + [False] * 5
    assert limiter.shadow_report()["tight"].asked == 4
    await done(limiter.check("ada"))
    assert limiter.shadow_report()["tight"].asked == 4, "a check does not count"
    clock.advance(61)
    await hits(limiter, 1)
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=5, refused=2, failed=0)


async def test_a_call_refused_by_a_shadow_rule_takes_no_units_there(follow: Follow, clock: FakeClock) -> None:
    limiter = follow(API)["api"]
    await hits(limiter, 2)
    clock.advance(30)
    await hits(limiter, 2)
    clock.advance(31)
    await hits(limiter, 2)
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=6, refused=2, failed=0)


@pytest.mark.parametrize("store", ["memory://", "sqlite:///{folder}/limits.db"])
async def test_a_hold_is_taken_and_settled_in_shadow_rules(
    follow: Follow, tmp_path: Path, store: str
) -> None:
    limiter = follow(API.replace("2/minute", "4/minute") + f'store = "{store.format(folder=tmp_path)}"')[
        "api"
    ]
    hold = await done(limiter.hold("ada", 3))
    assert hold
    other = await done(limiter.hold("ada", 1))
    assert limiter.shadow_report() == {
        "tight": ShadowCount(asked=2, refused=0, failed=0),
        "loose": ShadowCount(asked=2, refused=1, failed=0),
    }
    assert await done(hold.settle(1)) == 1
    assert await done(hold.settle(9)) == 1, "only the first settlement counts"
    assert await done(other.release()) == 0
    assert await hits(limiter, 4) == [True, True, True, False]
    # 1 stands of the first hold: three more fit into four, two into three.
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=5, refused=0, failed=0)
    assert limiter.shadow_report()["loose"] == ShadowCount(asked=5, refused=2, failed=0)


async def test_a_lease_is_renewed_in_shadow_rules(follow: Follow, clock: FakeClock) -> None:
    limiter = follow(
        """
        [limiters.api]
        rules = [
          { kind = "concurrent", quota = 3, lease = "60s" },
          { kind = "concurrent", quota = 1, lease = "60s", name = "tight", shadow = true },
          { quota = "9/hour", name = "rate", shadow = true },
        ]
        """
    )["api"]
    hold = await done(limiter.hold("ada"))
    for _ in range(3):
        clock.advance(59)
        assert await done(hold.renew())
    await done((await done(limiter.hold("ada"))).release())
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=2, refused=1, failed=0)
    await done(hold.release())
    await done((await done(limiter.hold("ada"))).release())
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=3, refused=1, failed=0)
    assert limiter.shadow_report()["rate"] == ShadowCount(asked=3, refused=0, failed=0)


async def test_excess_cost_of_a_hold_counts_only_where_it_was_held(follow: Follow) -> None:
    limiter = follow(API.replace("4/minute", "9/minute"))["api"]
    hold = await done(limiter.hold("ada", 3))  # too much for the tight one
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=1, refused=1, failed=0)
    assert await done(hold.settle(5)) == 5
    await hits(limiter, 2)
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=3, refused=1, failed=0), (
        "the hold was refused there"
    )
    assert limiter.shadow_report()["loose"] == ShadowCount(asked=3, refused=2, failed=0), (
        "the hold was taken there"
    )
    assert (await done(limiter.check("ada"))).remaining == 1


async def test_records_and_resets_apply_to_shadow_rules(follow: Follow) -> None:
    limiter = follow(API)["api"]
    await done(limiter.record("ada", 2))
    await hits(limiter, 1)
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=1, refused=1, failed=0)
    await done(limiter.reset("ada"))
    await hits(limiter, 2)
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=3, refused=1, failed=0)


async def test_a_cost_above_the_capacity_of_a_shadow_rule_is_refused_there(follow: Follow) -> None:
    limiter = follow(API)["api"]
    assert await hits(limiter, 1, cost=4) == [True]
    assert limiter.shadow_report() == {
        "tight": ShadowCount(asked=1, refused=1, failed=0),
        "loose": ShadowCount(asked=1, refused=1, failed=0),
    }
    with pytest.raises(CostTooHigh):
        await done(limiter.hit("ada", 5))


async def test_only_shadow_hooks_receive_decisions_of_shadow_rules(follow: Follow) -> None:
    live_hook, shadow_hook = Recorder(), Recorder()
    limiter = follow(API, hooks=[live_hook], shadow_hooks=[shadow_hook])["api"]
    await hits(limiter, 3)
    async with entered(limiter.hold("bob", 1)):
        pass
    await done(limiter.record("bob"))
    await done(limiter.hit("cyd", 3))
    decided = shadow_hook.arguments("decided")
    assert {call.limiter for call, _ in decided} == {"api"}
    assert [(decision.rule, decision.allowed) for _, decision in decided] == [
        (rule, allowed)
        for allowed_tight in (True, True, False, True)
        for rule, allowed in (("tight", allowed_tight), ("loose", True))
    ] + [("loose", True)]
    [(name, call, error)] = [event for event in shadow_hook.events if event[0] != "decided"]
    assert (name, call.limiter, error) == ("failed", "api", CostTooHigh)
    assert {decision.rule for _, decision in live_hook.arguments("decided")} == {"per-minute"}


async def test_a_limiter_with_only_shadow_rules(follow: Follow) -> None:
    limiter = follow('[limiters.api]\nrules = [{ quota = "1/minute", name = "only", shadow = true }]')["api"]
    assert await hits(limiter, 3) == [True] * 3
    hold = await done(limiter.hold("bob", 1))
    await done(hold.release())
    assert limiter.shadow_report() == {"only": ShadowCount(asked=4, refused=2, failed=0)}
    await hits(limiter, 1, "bob")
    assert limiter.shadow_report() == {"only": ShadowCount(asked=5, refused=2, failed=0)}


# Keys, tiers and overrides


async def test_the_key_may_have_a_scope_of_shadow_rules_only(
    follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = follow(SCOPED)["api"]
    key = {"user": "ada", "realm": "north"}
    assert await hits(limiter, 2, key) == [True, True]
    assert await hits(limiter, 1, {"user": "bob", "realm": "north"}) == [True]
    assert limiter.shadow_report() == {"candidate": ShadowCount(asked=3, refused=1, failed=0)}
    assert (await done(limiter.check(key))).remaining == 0
    assert await done(limiter.wait(key, timeout=1))
    hold = await done(limiter.hold({"user": "cyd", "realm": "south"}, 2))
    await done(hold.release())
    await done(limiter.record(key))
    await done(limiter.reset(key))
    assert not caplog.records
    with pytest.raises(ConfigError, match="'rum'"):
        await done(limiter.hit({**key, "rum": "x"}))


async def test_a_missing_scope_of_a_shadow_rule_fails_only_there_and_is_logged_once(
    follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = follow(SCOPED)["api"]
    key = {"user": "ada"}
    assert await hits(limiter, 2, key) == [True, True]
    await done(limiter.record(key))
    await done(limiter.reset(key))
    assert limiter.shadow_report() == {"candidate": ShadowCount(asked=2, refused=0, failed=2)}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'candidate'" in line
    assert "'realm'" in line


async def test_a_shadow_rule_uses_the_tier_as_if_it_were_live(follow: Follow) -> None:
    limiter = follow("""
        [limiters.api]
        rules = [
          { quota = "9/minute", tiers = { free = "8/minute" } },
          { quota = "1/minute", name = "candidate", tiers = { free = "2/minute", pro = "3/minute" }, shadow = true },
        ]
        default_tier = "free"
    """)["api"]
    decision = await done(limiter.hit("ada", tier="pro"))
    assert decision.limit == 8, "live rules ignore a tier that only the shadow rule has"
    await hits(limiter, 3, tier="pro")
    assert limiter.shadow_report() == {"candidate": ShadowCount(asked=4, refused=1, failed=0)}
    await hits(limiter, 3, "bob")
    assert limiter.shadow_report() == {"candidate": ShadowCount(asked=7, refused=2, failed=0)}


async def test_an_override_of_a_shadow_rule(follow: Follow) -> None:
    text = API + '[[limiters.api.overrides]]\nkey = "ada"\nrules = { tight = "4/minute" }\n'
    limiter = follow(text)["api"]
    assert await hits(limiter, 4) == [True] * 4
    assert await hits(limiter, 4, "bob") == [True] * 4
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=8, refused=2, failed=0)


# When something goes wrong


async def test_a_failing_store_of_shadow_rules_does_not_affect_calls(follow: Follow, tmp_path: Path) -> None:
    limiter = follow(API + f'store = "sqlite:///{tmp_path}/limits.db"')["api"]
    hold = await done(limiter.hold("ada", 2))
    limiter.store.close()
    assert await hits(limiter, 2) == [True, True]
    assert await done(hold.release()) == 0
    await done(limiter.record("ada"))
    assert limiter.shadow_report() == {
        "tight": ShadowCount(asked=3, refused=0, failed=2),
        "loose": ShadowCount(asked=3, refused=0, failed=2),
    }


async def test_an_unexpected_error_of_a_shadow_rule_does_not_affect_calls(
    follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = follow(API)["api"]

    class Broken:
        """A gate whose every operation raises."""

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    tight = limiter.current.shadows[0]
    tight._gate = Broken()
    assert await hits(limiter, 2) == [True, True]
    hold = await done(limiter.hold("ada", 1))
    assert await done(hold.release()) == 0
    await done(limiter.record("ada"))
    await done(limiter.reset("ada"))
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=3, refused=0, failed=3)
    assert limiter.shadow_report()["loose"] == ShadowCount(asked=3, refused=0, failed=0)
    assert len(caplog.records) == 1


async def test_a_hold_cancelled_during_a_shadow_decision_is_released(author: Author) -> None:
    author.write(API)
    limiter = AsyncLivePolicy.from_file(author.path, clock=FakeClock())["api"]
    asked = asyncio.Event()

    class Stuck:
        async def decide(self, _: object) -> Any:
            asked.set()
            await asyncio.Event().wait()

    version: Any = limiter.current
    version.shadows[0]._gate = Stuck()

    async def take() -> None:
        await limiter.hold("ada", 4)

    task = asyncio.create_task(take())
    await asked.wait()
    assert (await limiter.check("ada")).remaining == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await limiter.check("ada")).remaining == 3


# Over reloads


async def test_an_unchanged_shadow_rule_keeps_its_report_across_a_reload(
    follow: Follow, author: Author
) -> None:
    live = follow(API)
    limiter = live["api"]
    await hits(limiter, 3)
    author.write(API.replace("4/minute", "5/minute").replace("3/minute", "1/minute"))
    live.reload()
    assert limiter.shadow_report() == {
        "tight": ShadowCount(asked=3, refused=1, failed=0),
        "loose": ShadowCount(asked=0, refused=0, failed=0),
    }
    await hits(limiter, 1)
    assert limiter.shadow_report()["loose"] == ShadowCount(asked=1, refused=1, failed=0), (
        "the counts are kept"
    )


async def test_a_shadow_rule_that_becomes_live_keeps_its_counts(follow: Follow, author: Author) -> None:
    live = follow(API)
    limiter = live["api"]
    await hits(limiter, 1)
    author.write(API.replace(', name = "tight", shadow = true', ', name = "tight"'))
    live.reload()
    assert await hits(limiter, 2) == [True, False]
    assert list(limiter.shadow_report()) == ["loose"]


async def test_a_hold_is_released_in_a_removed_shadow_rule(follow: Follow, author: Author) -> None:
    live = follow(API)
    limiter = live["api"]
    hold = await done(limiter.hold("ada", 2))
    author.write('[limiters.api]\nrules = ["4/minute"]')
    live.reload()
    assert limiter.shadow_report() == {}
    assert await done(hold.release()) == 0
    author.write(API)
    live.reload()
    await hits(limiter, 2)
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=2, refused=0, failed=0)
