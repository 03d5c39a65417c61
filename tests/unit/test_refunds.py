"""Refunds of a token bucket, in every order of holds, hits and releases within a few ticks.

Promise 6: the level after a release is never below the level without the hold, never above the level with it, and equal if
nothing else touched the key. Here each script is played in three worlds: without the hold, with it, and with its release.
A hold that is settled in part is compared with a hold of the part that stays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import NamedTuple

import pytest

from headgate.algorithms import Receipt, State, TokenBucket
from headgate.quota import MAX_UNITS

pytestmark = pytest.mark.deep

START = 100
"""The first tick of every script."""


class Event(NamedTuple):
    """One step of a script; a charge has no name, a hold and its settlement have the same one."""

    at: int
    kind: str
    name: str
    units: int
    """The units charged, held, or kept by a settlement."""


Script = Sequence[Event]


@dataclass
class World:
    """A bucket, its state, and the holds that are open.

    Units are recorded and never refused, so that the same happens in every world.
    """

    bucket: TokenBucket
    state: State | None = None

    def __post_init__(self) -> None:
        self.receipts: dict[str, tuple[Receipt, int]] = {}
        self.births = iter(range(1, 1_000_000))

    def play(self, event: Event) -> None:
        now = event.at * self.bucket.tick
        if event.kind == "settle":
            receipt, held = self.receipts.pop(event.name)
            self.state = self.bucket.refund(self.state, receipt, held - event.units, now)
        elif event.units:
            before = self.state
            self.state = self.bucket.record(before, now, event.units, next(self.births))
            assert self.state is not None
            if event.kind == "hold":
                receipt = self.bucket.receipt(before, self.state, event.units)
                self.receipts[event.name] = receipt, event.units
        if self.state is not None:
            birth, level, _, refunded, *_ = self.state
            assert max(birth, level, refunded) <= MAX_UNITS

    def level(self, at: int) -> int:
        """Return the level at a tick, computed from the state."""
        if self.state is None:
            return 0
        _, level, time, _, n, *_ = self.state
        return max(0, level - n * max(0, at - time))


def played(bucket: TokenBucket, script: Script, start: State | None = None) -> World:
    world = World(bucket, start)
    for event in script:
        world.play(event)
    return world


def without(script: Script, settlement: Event) -> Script:
    """Return the script in which the hold had only the units that its settlement keeps."""
    return [
        event._replace(units=settlement.units)
        if (event.kind, event.name) == ("hold", settlement.name)
        else event
        for event in script
        if event != settlement
    ]


def check_each_release(bucket: TokenBucket, script: Script, start: State | None = None) -> None:
    """Check promise 6 for every hold of a script whose time does not go back, at the time of its settlement and later."""
    for number, settlement in enumerate(script):
        if settlement.kind != "settle":
            continue
        past = script[:number]
        scripts = without(past, settlement), [*past, settlement], past
        never, released, whole = (played(bucket, script, start) for script in scripts)
        for wait in (0, 1, 4, 20):
            levels = [world.level(settlement.at + wait) for world in (never, released, whole)]
            assert levels == sorted(levels), (bucket, script, settlement, levels)
        if (past[-1].kind, past[-1].name) == ("hold", settlement.name):
            at = settlement.at
            assert released.level(at) == never.level(at), (bucket, script, settlement)


# --- Scripts ---------------------------------------------------------------------------------------------------------

SHAPES = [TokenBucket("x", 20, n, d, 1) for n, d in ((1, 1), (2, 3), (3, 1))]


def orders(holds: str, charges: int) -> list[tuple[str, ...]]:
    """Return every order of this number of charges, the holds and their settlements, as in `a b A + B`."""
    steps = [*holds, *holds.upper(), *"+" * charges]
    return sorted(
        order
        for order in set(permutations(steps))
        if [step for step in order if step.islower()] == [*holds]
        and all(order.index(hold) < order.index(hold.upper()) for hold in holds)
    )


def script_of(
    order: Sequence[str], waits: Sequence[int], costs: dict[str, int], stays: dict[str, int]
) -> list[Event]:
    """Return a script with this order of events, these waits and these costs."""
    script, at = [], START
    for step, wait in zip(order, (0, *waits), strict=True):
        at += wait
        if step == "+":
            script.append(Event(at, "charge", step, costs[step]))
        elif step.islower():
            script.append(Event(at, "hold", step, costs[step]))
        else:
            script.append(Event(at, "settle", step.lower(), stays.get(step.lower(), 0)))
    return script


def two_holds(waits: Sequence[int]) -> Iterator[Script]:
    costs = {"a": 5, "b": 4, "+": 3}
    for order in orders("ab", 1):
        for steps in product(waits, repeat=4):
            for a, b in ((0, 0), (0, 2), (3, 0), (2, 1)):
                yield script_of(order, steps, costs, {"a": a, "b": b})


# --- Promise 6: hold, then settle -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", SHAPES, ids=["1", "2/3", "3"])
def test_two_overlapping_holds_in_every_order(bucket: TokenBucket) -> None:
    for script in two_holds((0, 1, 4)):
        check_each_release(bucket, script)


def test_nested_releases_restore_the_previous_states() -> None:
    """Nested holds: each release restores the state before its hold, or no state if that is fresh by this time."""
    for bucket, first, *waits in product(SHAPES, (2, 9), (0, 2, 5), (0, 2), (0, 3), (0, 3)):
        world = World(bucket)
        world.play(Event(START, "charge", "", first))
        states, at = [world.state], START
        for name, wait in zip("ab", waits, strict=False):
            at += wait
            world.play(Event(at, "hold", name, 4))
            states.append(world.state)
        for name, wait in zip("ba", waits[2:], strict=True):
            at += wait
            world.play(Event(at, "settle", name, 0))
            states.pop()
            before = states[-1]
            assert before is not None
            assert world.state == (before if bucket.fresh_at(before) > at else None)
            if world.state is None:
                break


# --- The largest numbers ---------------------------------------------------------------------------------------------

LARGEST = [
    TokenBucket("x", MAX_UNITS, 1, 1, 1),
    TokenBucket("x", MAX_UNITS // 1_000, 999, 1_000, 1),  # a period of 1 ms
    TokenBucket("x", MAX_UNITS // 315_576_000_000, 1, 315_576_000_000, 1_000),  # one in ten years
    TokenBucket("x", 2_501_999, MAX_UNITS, 3_600_000_000, 1),
    TokenBucket("x", 1, MAX_UNITS, MAX_UNITS, 1),
]


@pytest.mark.parametrize("bucket", LARGEST, ids=lambda bucket: f"{bucket.burst} of {bucket.d}")
@pytest.mark.parametrize("refunded", [0, MAX_UNITS - 1], ids=["new", "often refunded"])
def test_the_largest_buckets_keep_the_promise_and_stay_in_the_exact_range(
    bucket: TokenBucket, refunded: int
) -> None:
    dice = random.Random(bucket.d)
    for _ in range(300):
        level = dice.randint(1, bucket.burst * bucket.d)
        start = (0, level, START, refunded, bucket.n, bucket.d, bucket.burst)
        check_each_release(bucket, large_script(dice, bucket, start), start=start)


def large_script(dice: random.Random, bucket: TokenBucket, start: State) -> list[Event]:
    """Return a script of three holds that fit into the bucket, because only such holds can be refunded."""
    world, script, at = World(bucket, state=start), list[Event](), START
    drains_in = -(bucket.burst * bucket.d // -bucket.n)  # ticks, when it is full
    for name in (*"abc", *dice.sample("abc", 3)):
        at += dice.choice((0, 1, drains_in // 5, drains_in // 3))
        room = (bucket.burst * bucket.d - world.level(at)) // bucket.d
        if name in world.receipts:
            held = world.receipts[name][1]
            script.append(Event(at, "settle", name, dice.choice((0, 0, held // 2))))
        elif room > 0 and len(script) < 3:
            script.append(Event(at, "hold", name, dice.choice((1, room, room // 2 or 1))))
        else:
            continue
        world.play(script[-1])
    return script
