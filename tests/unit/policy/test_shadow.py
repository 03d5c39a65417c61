"""Shadow rules: they count and report what they would have refused, and are felt by nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headgate import ConfigError, CostTooHigh
from headgate.hooks import Call, Hook
from headgate.policy import AsyncLivePolicy, ShadowCount
from headgate.testing import FakeClock
from tests.unit.flavours import done, entered
from tests.unit.policy.conftest import Author

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


class Listener(Hook):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def attached(self, limiter: Any) -> None:
        self.heard.append(("attached",))

    def decided(self, call: Call, decision: Any, seconds: float) -> None:
        self.heard.append(("decided", call.limiter, decision.rule, decision.allowed))

    def completed(self, call: Call, seconds: float, degraded: bool) -> None:
        self.heard.append(("completed", call.operation))

    def settled(self, call: Call, cost: int | None) -> None:
        self.heard.append(("settled",))

    def failed(self, call: Call, error: Exception, seconds: float) -> None:
        self.heard.append(("failed", call.limiter, type(error)))


async def hits(limiter: Any, times: int, key: Any = "ada", **arguments: Any) -> list[bool]:
    return [bool(await done(limiter.hit(key, **arguments))) for _ in range(times)]


async def test_they_refuse_nothing_and_each_counts_for_itself(follow: Follow) -> None:
    limiter = follow(API)["api"]
    assert await hits(limiter, 4) == [True] * 4
    assert limiter.shadow_report() == {
        "tight": ShadowCount(asked=4, refused=2, failed=0),
        "loose": ShadowCount(asked=4, refused=1, failed=0),
    }


async def test_a_decision_is_that_of_the_live_rules(follow: Follow) -> None:
    limiter = follow(API)["api"]
    decision = await done(limiter.hit("ada"))
    assert [result.name for result in decision.results] == ["per-minute"]
    assert (decision.limit, decision.remaining) == (4, 3)


async def test_they_are_asked_only_about_what_is_admitted(follow: Follow, clock: FakeClock) -> None:
    limiter = follow(API)["api"]
    assert await hits(limiter, 9) == [True] * 4 + [False] * 5
    assert limiter.shadow_report()["tight"].asked == 4
    await done(limiter.check("ada"))
    assert limiter.shadow_report()["tight"].asked == 4, "a check asks for nothing"
    clock.advance(61)
    await hits(limiter, 1)
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=5, refused=2, failed=0)


async def test_what_they_would_have_refused_takes_nothing_there(follow: Follow, clock: FakeClock) -> None:
    """As if the rule were live: two are admitted, then none, until these two expire; the refused ones leave no trace."""
    limiter = follow(API)["api"]
    await hits(limiter, 2)
    clock.advance(30)
    await hits(limiter, 2)
    clock.advance(31)
    await hits(limiter, 2)
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=6, refused=2, failed=0)


@pytest.mark.parametrize("store", ["memory://", "sqlite:///{folder}/limits.db"])
async def test_a_hold_holds_and_is_settled_in_the_shadow_too(
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


async def test_a_lease_is_renewed_in_the_shadow_too(follow: Follow, clock: FakeClock) -> None:
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


async def test_what_a_hold_cost_beyond_is_counted_where_it_was_held(follow: Follow) -> None:
    limiter = follow(API.replace("4/minute", "9/minute"))["api"]
    hold = await done(limiter.hold("ada", 3))  # too much for the tight one
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=1, refused=1, failed=0)
    assert await done(hold.settle(5)) == 5
    await hits(limiter, 2)
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=3, refused=1, failed=0), (
        "it had nothing of it"
    )
    assert limiter.shadow_report()["loose"] == ShadowCount(asked=3, refused=2, failed=0), "it had all of it"
    assert (await done(limiter.check("ada"))).remaining == 1


async def test_a_hold_in_a_block_that_fails_is_released_in_the_shadow_too(follow: Follow) -> None:
    limiter = follow(API)["api"]
    with pytest.raises(RuntimeError):
        async with entered(limiter.hold("ada", 2)):
            raise RuntimeError("work")
    assert await hits(limiter, 2) == [True, True]
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=3, refused=0, failed=0)


async def test_records_and_resets_reach_them(follow: Follow) -> None:
    limiter = follow(API)["api"]
    await done(limiter.record("ada", 2))
    await hits(limiter, 1)
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=1, refused=1, failed=0)
    await done(limiter.reset("ada"))
    await hits(limiter, 2)
    assert limiter.shadow_report()["tight"] == ShadowCount(asked=3, refused=1, failed=0)


async def test_a_cost_that_they_could_never_admit_is_refused_there(follow: Follow) -> None:
    limiter = follow(API)["api"]
    assert await hits(limiter, 1, cost=4) == [True]
    assert limiter.shadow_report() == {
        "tight": ShadowCount(asked=1, refused=1, failed=0),
        "loose": ShadowCount(asked=1, refused=1, failed=0),
    }
    with pytest.raises(CostTooHigh):
        await done(limiter.hit("ada", 5))


async def test_shadow_hooks_hear_of_decisions_and_the_others_do_not(follow: Follow) -> None:
    live_hook, shadow_hook = Listener(), Listener()
    limiter = follow(API, hooks=[live_hook], shadow_hooks=[shadow_hook])["api"]
    await hits(limiter, 3)
    async with entered(limiter.hold("bob", 1)):
        pass
    await done(limiter.record("bob"))
    await done(limiter.hit("cyd", 3))
    decided = [heard for heard in shadow_hook.heard if heard[0] == "decided"]
    assert decided == [
        ("decided", "api", rule, allowed)
        for allowed_tight in (True, True, False, True)
        for rule, allowed in (("tight", allowed_tight), ("loose", True))
    ] + [("decided", "api", "loose", True)]
    assert [heard for heard in shadow_hook.heard if heard[0] != "decided"] == [("failed", "api", CostTooHigh)]
    assert {heard[2] for heard in live_hook.heard if heard[0] == "decided"} == {"per-minute"}


async def test_a_limiter_may_have_nothing_but_shadow_rules(follow: Follow) -> None:
    limiter = follow('[limiters.api]\nrules = [{ quota = "1/minute", name = "only", shadow = true }]')["api"]
    assert await hits(limiter, 3) == [True] * 3
    hold = await done(limiter.hold("bob", 1))
    await done(hold.release())
    assert limiter.shadow_report() == {"only": ShadowCount(asked=4, refused=2, failed=0)}
    await hits(limiter, 1, "bob")
    assert limiter.shadow_report() == {"only": ShadowCount(asked=5, refused=2, failed=0)}


# --- Keys, tiers and overrides ---------------------------------------------------------------------------------------


async def test_a_scope_that_only_a_shadow_rule_counts_by_may_be_in_the_key(
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


async def test_a_scope_missing_for_a_shadow_rule_fails_there_alone_and_is_logged_once(
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


async def test_a_shadow_rule_for_everybody_beside_one_per_user(follow: Follow) -> None:
    text = SCOPED.replace('scope = "realm"', 'scope = "*"')
    limiter = follow(text)["api"]
    for user in ("ada", "bob", "cyd"):
        assert await hits(limiter, 1, {"user": user}) == [True]
    assert limiter.shadow_report() == {"candidate": ShadowCount(asked=3, refused=1, failed=0)}


async def test_a_shadow_rule_decides_in_the_tier_that_it_would_if_it_were_live(follow: Follow) -> None:
    limiter = follow("""
        [limiters.api]
        rules = [
          { quota = "9/minute", tiers = { free = "8/minute" } },
          { quota = "1/minute", name = "candidate", tiers = { free = "2/minute", pro = "3/minute" }, shadow = true },
        ]
        default_tier = "free"
    """)["api"]
    decision = await done(limiter.hit("ada", tier="pro"))
    assert decision.limit == 8, "a tier that only the shadow knows changes nothing for the live rules"
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


# --- When something goes wrong ---------------------------------------------------------------------------------------


async def test_a_store_that_fails_is_not_felt_through_them(follow: Follow, tmp_path: Path) -> None:
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


async def test_whatever_a_gate_of_theirs_raises_stays_there(
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


async def test_a_hold_that_is_cancelled_while_a_shadow_is_asked_is_given_back(author: Author) -> None:
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


# --- Over reloads ----------------------------------------------------------------------------------------------------


async def test_a_rule_that_is_still_the_same_goes_on_with_its_figures(follow: Follow, author: Author) -> None:
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
        "its counts it has kept"
    )


async def test_a_candidate_that_becomes_live_begins_with_what_it_counted(
    follow: Follow, author: Author
) -> None:
    live = follow(API)
    limiter = live["api"]
    await hits(limiter, 1)
    author.write(API.replace(', name = "tight", shadow = true', ', name = "tight"'))
    live.reload()
    assert await hits(limiter, 2) == [True, False]
    assert list(limiter.shadow_report()) == ["loose"]


async def test_a_hold_is_settled_in_a_shadow_that_is_gone(follow: Follow, author: Author) -> None:
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
