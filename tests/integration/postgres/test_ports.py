"""The SQL functions decide exactly like the Python functions that they are ports of, also at the edges of 2^53."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from headgate.algorithms import (
    Algorithm,
    Calendar,
    Concurrent,
    FixedWindow,
    Receipt,
    SlidingWindow,
    State,
    TokenBucket,
)
from headgate.calendars import window_end
from headgate.errors import CostTooHigh
from headgate.quota import MAX_UNITS
from headgate.stores.port_parameters import port_parameters
from headgate.stores.postgres.codec import _can_move
from tests import searching

EXAMPLES = 2 * searching.EXAMPLES
LATEST = 2**53 - 1
NOW = 1_700_000_000_000_000

ADMITTED, NEVER, UNCOUNTABLE, NOT_OURS, OTHER_WINDOW = -1, -2, -3, -4, -5
NO_RECEIPT = (-1, 0)
"""Sent in place of a missing receipt."""

sizes = st.one_of(st.integers(1, 20), st.integers(1, MAX_UNITS), st.sampled_from([MAX_UNITS, 2**52, 2**35]))
instants = st.one_of(st.integers(0, 200), st.integers(NOW, NOW + 200), st.integers(0, LATEST))
births = st.integers(0, MAX_UNITS - 1)


@pytest.fixture(scope="module")
def ask(url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@st.composite
def fixed_windows(draw: st.DrawFn) -> tuple[FixedWindow, State | None]:
    algorithm = FixedWindow("rule", draw(st.just(0) | sizes), draw(st.integers(1, 100) | sizes))
    index = draw(instants) // algorithm.period
    state = draw(st.none() | st.tuples(births, st.just(index), sizes))
    return algorithm, state


@st.composite
def sliding_windows(draw: st.DrawFn) -> tuple[SlidingWindow, State | None]:
    width = draw(st.integers(1, 50) | st.sampled_from([1, 60_000_000, 527_040_000_000]))
    lifetime = width * draw(st.integers(1, 60)) + draw(st.integers(0, 1)) * width
    algorithm = SlidingWindow("rule", draw(st.just(0) | sizes), width, lifetime)
    steps = draw(st.lists(st.integers(1, 5), max_size=8))
    index = draw(instants) // width
    state: list[int] = [draw(births)]
    for step in steps:
        units = draw(st.integers(1, 20) | st.integers(1, MAX_UNITS // 8))
        state += index, units
        index += step
    return algorithm, tuple(state) if steps else None


@st.composite
def token_buckets(draw: st.DrawFn) -> tuple[TokenBucket, State | None]:
    algorithm = draw(shapes())
    level, d = draw(sizes), algorithm.d
    if draw(st.booleans()):
        level, d = draw(st.integers(1, MAX_UNITS)), draw(st.integers(1, 2**35))
    other = draw(shapes())
    shape = (algorithm.n, algorithm.d, algorithm.burst) if draw(st.booleans()) else (other.n, d, other.burst)
    assume(shape[0])
    state = (draw(births), level, draw(instants) // algorithm.tick, draw(st.just(0) | sizes), *shape)
    return algorithm, draw(st.sampled_from([None, state]))


@st.composite
def shapes(draw: st.DrawFn) -> TokenBucket:
    d = draw(st.integers(1, 100) | st.integers(1, 2**35))
    burst = draw(st.integers(1, 20) | st.integers(1, MAX_UNITS // d))
    n = draw(st.integers(0, 100) | st.integers(0, MAX_UNITS))
    return TokenBucket("rule", burst, n, d, draw(st.sampled_from([1, 1000])))


@st.composite
def places(draw: st.DrawFn) -> tuple[Concurrent, State | None]:
    algorithm = Concurrent("rule", draw(st.just(0) | sizes), draw(st.integers(1, 50) | sizes))
    latest = draw(instants)
    ends = sorted(draw(st.lists(st.integers(latest + 1, latest + 60) | sizes, max_size=6)))
    state: list[int] = [draw(births), latest]
    for number, end in enumerate(end for end in ends if end > latest):
        state += end, -1 - number, draw(st.integers(1, 20) | st.integers(1, MAX_UNITS // 8))
    return algorithm, tuple(state) if len(state) > 2 else None


@st.composite
def calendars(draw: st.DrawFn) -> tuple[Calendar, State | None]:
    span = draw(st.sampled_from(["day", "week", "month", "year"]))
    zone = draw(st.sampled_from(["UTC", "Europe/Berlin", "America/Havana", "Pacific/Apia"]))
    algorithm = Calendar("rule", draw(st.just(0) | sizes), span, zone)
    end = window_end(algorithm.span, zone, draw(instants))
    return algorithm, draw(st.none() | st.tuples(births, st.just(end), sizes))


cases = st.one_of(fixed_windows(), sliding_windows(), token_buckets(), places(), calendars())


@st.composite
def moments(draw: st.DrawFn) -> tuple[Algorithm, State | None, int]:
    """Return a rule, a state and a time, which is often one at which something changes."""
    algorithm, state = draw(cases)
    turning_points = [draw(instants)]
    if state is not None:
        turning_points.append(algorithm.fresh_at(state))
    if state is not None and isinstance(algorithm, SlidingWindow):
        turning_points += [index * algorithm.width + algorithm.lifetime for index in state[1::2]]
    if state is not None and isinstance(algorithm, Concurrent):
        turning_points += state[2::3]
    now = draw(st.sampled_from(turning_points)) + draw(st.integers(-1, 1))
    assume(0 <= now <= LATEST)
    return algorithm, state, now


def kept(algorithm: Algorithm, state: State | None) -> list[int] | None:
    """Return a state as the database keeps it."""
    if state is None:
        return None
    if isinstance(algorithm, SlidingWindow):
        return [state[0], sum(state[2::2]), *state[1:]]
    if isinstance(algorithm, Concurrent):
        return [*state[:2], sum(state[4::3]), *state[2:]]
    return list(state)


def shape(algorithm: Algorithm, now: int) -> tuple[int, ...]:
    """Return the SQL parameters of a rule at a time."""
    return port_parameters(algorithm, now)[0]


def decide(
    ask: psycopg.Connection,
    algorithm: Algorithm,
    state: State | None,
    now: int,
    cost: int,
    birth: int,
    forced: bool,
) -> list[int]:
    arguments = (*shape(algorithm, now), kept(algorithm, state), now, cost, birth, forced)
    row = ask.execute(
        "SELECT headgate_decide_v2(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)", arguments
    ).fetchone()
    assert row is not None
    answer: list[int] = row[0]
    return answer


def is_countable(algorithm: Algorithm, state: State | None) -> bool:
    """Return whether a level fits the caller's parameters; otherwise the database truncates it."""
    if not isinstance(algorithm, TokenBucket) or state is None:
        return True
    return -(state[1] * algorithm.d // -state[5]) <= MAX_UNITS


@settings(max_examples=EXAMPLES)
@given(moments(), st.integers(0, 25) | st.integers(0, MAX_UNITS), births)
@example((TokenBucket("rule", 1, MAX_UNITS, 2**35, 1), (1, 1, 0, 0, 1, 2**35, 1), LATEST), 1, 2)
@example((TokenBucket("rule", 1, 1, 2**35, 1), (1, MAX_UNITS, 5, 0, MAX_UNITS, 1, MAX_UNITS), 5), 1, 2)
@example((TokenBucket("rule", 5, 3, 2, 1), (1, 10, 0, 0, 3, 2, 5), 4), 1, 2)
@example((TokenBucket("rule", 1, 1, 2**35, 1), (1, MAX_UNITS, 5, 0, 1, 1, MAX_UNITS), LATEST), 1, 2)
@example((Concurrent("rule", 9, 5), (MAX_UNITS - 1, 5, 90, 1, 2, 95, 3, 1), 6), 1, 2)
def test_sql_decide_matches_python(
    ask: psycopg.Connection, case: tuple[Algorithm, State | None, int], cost: int, birth: int
) -> None:
    algorithm, state, now = case
    assume(is_countable(algorithm, state))
    if algorithm.capacity:
        cost = min(cost, algorithm.capacity)  # a cost above it never reaches a store
    after, verdict = algorithm.decide(state, now, cost, birth)
    answer = decide(ask, algorithm, state, now, cost, birth, forced=False)
    without = algorithm.decide(state, now, 0, birth)[1]
    if verdict.allowed:
        assert answer[0] == ADMITTED
        assert answer[1] - cost == verdict.remaining
        assert answer[3] == (verdict.reset_after_us or 0)
    else:
        assert answer[0] == (NEVER if verdict.retry_after_us is None else verdict.retry_after_us)
        assert answer[1] == verdict.remaining
        assert answer[2] == (verdict.reset_after_us or 0)
    assert (answer[1], answer[2]) == (without.remaining, without.reset_after_us or 0)
    if verdict.allowed and cost:
        assert after is not None
        assert answer[9:] == kept(algorithm, after)
        assert answer[3] == algorithm.fresh_at(after) - now
        *receipt, held = algorithm.receipt(state, after, cost)
        assert held == cost
        assert answer[4:9] == [*receipt, 0, 0, 0][:5]
    else:
        assert answer[9:] == []


@settings(max_examples=EXAMPLES)
@given(moments(), st.integers(1, 25) | st.integers(1, MAX_UNITS), births)
@example((TokenBucket("rule", 1, 1, 2**35, 1), None, 5), MAX_UNITS, 2)
def test_sql_record_matches_python(
    ask: psycopg.Connection, case: tuple[Algorithm, State | None, int], cost: int, birth: int
) -> None:
    algorithm, state, now = case
    assume(is_countable(algorithm, state))
    answer = decide(ask, algorithm, state, now, cost, birth, forced=True)
    after, room = record(algorithm, state, now, cost, birth)
    if room is not None:
        assert answer == [UNCOUNTABLE, room, 0, 0, 0, 0, 0, 0, 0]
    elif isinstance(algorithm, TokenBucket) and not algorithm.n:
        assert answer == [ADMITTED, 0, 0, 0, 0, 0, 0, 0, 0]  # the state is left as it is
    else:
        assert after is not None
        assert answer[0] == ADMITTED
        assert answer[9:] == kept(algorithm, after)
        assert answer[3] == algorithm.fresh_at(after) - now


def record(
    algorithm: Algorithm, state: State | None, now: int, cost: int, birth: int
) -> tuple[State | None, int | None]:
    """Return the state with the units counted, or how many more could have been."""
    try:
        return algorithm.record(state, now, cost, birth), None
    except CostTooHigh as error:
        return None, error.capacity


@settings(max_examples=EXAMPLES)
@given(cases, st.lists(instants, min_size=3, max_size=3), st.data())
def test_sql_refund_matches_python(
    ask: psycopg.Connection, case: tuple[Algorithm, State | None], times: list[int], data: st.DataObject
) -> None:
    algorithm, state = case
    most = max(1, algorithm.capacity)
    cost = data.draw(st.integers(1, min(most, 30)) | st.integers(1, most))
    birth = data.draw(births)
    after, verdict = algorithm.decide(state, times[0], cost, birth)
    assume(verdict.allowed and after is not None)
    assert after is not None
    receipt = algorithm.receipt(state, after, cost)
    hits = data.draw(st.integers(0, 2))
    for number in range(hits):  # other hits follow, and may also be refunded
        following, verdict = algorithm.decide(after, times[1], 1, (birth + 1 + number) % MAX_UNITS)
        if verdict.allowed and following is not None:
            if data.draw(st.booleans()):
                own = algorithm.receipt(after, following, 1)
                following = algorithm.refund(following, own, 1, times[1]) or following
            after = following
    if data.draw(st.integers(0, 5)) == 0:
        after = None
    if after and isinstance(algorithm, SlidingWindow) and data.draw(st.booleans()):
        after = (*after[:-1], 1)  # fewer units than were held: another caller refunded too much
    if after and isinstance(algorithm, TokenBucket) and data.draw(st.booleans()):
        after = (*after[:3], data.draw(st.integers(MAX_UNITS - 5, MAX_UNITS)), *after[4:])
    back = data.draw(st.integers(0, cost + 3))
    check_refund(ask, algorithm, after, receipt, back, times[2])


def check_refund(
    ask: psycopg.Connection, algorithm: Algorithm, state: State | None, receipt: Receipt, cost: int, now: int
) -> State | None:
    """Give units back in both ways, compare, and return the new state."""
    expected = algorithm.refund(state, receipt, cost, now)
    *charged, held = receipt
    arguments = (*shape(algorithm, now), kept(algorithm, state), charged, held, cost, now)
    row = ask.execute(
        "SELECT headgate_refund_v2(%s, %s, %s, %s, %s, %s, %s::bigint[], %s, %s, %s)", arguments
    ).fetchone()
    assert row is not None
    answer = row[0]
    if answer is None:
        assert expected == state
    elif len(answer) == 1:
        assert expected is None
    else:
        assert expected is not None
        assert answer == [algorithm.fresh_at(expected), *(kept(algorithm, expected) or [])]
    return expected


@settings(max_examples=EXAMPLES)
@given(cases, st.lists(instants, min_size=3, max_size=3), st.data())
def test_sql_move_matches_python(
    ask: psycopg.Connection, case: tuple[Algorithm, State | None], times: list[int], data: st.DataObject
) -> None:
    algorithm, state = case
    most = max(1, algorithm.capacity)
    costs = st.integers(1, min(most, 30)) | st.integers(1, most)
    cost = data.draw(costs)
    before, (after, verdict) = state, algorithm.decide(state, times[0], cost, MAX_UNITS - 2)
    receipt = ()
    if verdict.allowed and after is not None:
        receipt = algorithm.receipt(before, after, cost)
        state = after
        following, verdict = algorithm.decide(state, times[1], data.draw(costs), MAX_UNITS - 3)
        if data.draw(st.booleans()):  # another hit follows
            state = following
    if data.draw(st.integers(0, 5)) == 0:
        state = None
    if isinstance(algorithm, TokenBucket) and state and data.draw(st.integers(0, 5)) == 0:
        algorithm = replace(algorithm, burst=max(1, algorithm.burst // 2))
        most = algorithm.capacity
    turning_points = [times[1], times[2]]
    if state is not None:
        turning_points.append(algorithm.fresh_at(state))
    now = data.draw(st.sampled_from(turning_points)) + data.draw(st.integers(-1, 1))
    assume(0 <= now <= LATEST)
    check_move(ask, algorithm, state, receipt, now, data.draw(st.integers(0, min(most, 30)) | costs))


def check_move(
    ask: psycopg.Connection, algorithm: Algorithm, state: State | None, receipt: Receipt, now: int, cost: int
) -> None:
    """Move units in both ways, and compare."""
    birth = MAX_UNITS - 4
    cost = min(cost, algorithm.capacity) if algorithm.capacity else cost
    after, verdict = (
        algorithm.move(state, receipt, now, cost, birth)
        if receipt
        else algorithm.decide(state, now, cost, birth)
    )
    as_is = algorithm.decide(state, now, 0, birth)[1]
    *charged, held = receipt if _can_move(algorithm, receipt) and receipt else NO_RECEIPT
    arguments = (*shape(algorithm, now), kept(algorithm, state), charged, held, now, cost, birth)
    row = ask.execute(
        "SELECT headgate_move_v1(%s, %s, %s, %s, %s, %s, %s::bigint[], %s, %s, %s, %s)", arguments
    ).fetchone()
    assert row is not None
    left, *answer = row[0]
    assert answer[1:3] == [as_is.remaining, as_is.reset_after_us or 0]
    if not verdict.allowed:
        assert answer[0] == (NEVER if verdict.retry_after_us is None else verdict.retry_after_us)
        assert answer[9:] == []
        return
    assert answer[0] == ADMITTED
    assert (left - cost, answer[3]) == (verdict.remaining, verdict.reset_after_us or 0)
    if answer[9:]:
        assert answer[9:] == (kept(algorithm, after) or [0])
    else:
        assert after == state
    if cost:
        assert after is not None
        is_renewal = isinstance(algorithm, Concurrent) and receipt
        *expected, _ = receipt if is_renewal else algorithm.receipt(state, after, cost)
        assert answer[4:9] == [*expected, 0, 0, 0][:5]


@pytest.mark.parametrize("state", [None, (7, NOW - 1, 3)])
def test_time_outside_the_sent_windows_is_returned(ask: psycopg.Connection, state: State | None) -> None:
    day = Calendar("rule", 5, "day", "UTC")
    for cost, away in ((0, -3), (1, 3), (1, -3)):
        now = NOW + away * 24 * 3600 * 1_000_000
        arguments = (*shape(day, NOW), kept(day, state if away > 0 else None), now, cost, 2, False)
        row = ask.execute(
            "SELECT headgate_decide_v2(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)", arguments
        ).fetchone()
        assert row == ([OTHER_WINDOW, now, 0, 0, 0, 0, 0, 0, 0],)


def test_moving_a_hold_of_a_later_window_needs_the_current_windows(ask: psycopg.Connection) -> None:
    """They are needed to order the two windows."""
    day, now = Calendar("rule", 5, "day", "UTC"), NOW - 3 * 24 * 3600 * 1_000_000
    state = (7, window_end("day", "UTC", NOW), 3)
    arguments = (*shape(day, NOW), list(state), [*state[:2]], 3, now, 1, 2)
    row = ask.execute(
        "SELECT headgate_move_v1(%s, %s, %s, %s, %s, %s, %s::bigint[], %s, %s, %s, %s)", arguments
    ).fetchone()
    assert row == ([0, OTHER_WINDOW, now, 0, 0, 0, 0, 0, 0, 0],)
    check_move(ask, day, state, (*state[:2], 3), now, 2)


@settings(max_examples=EXAMPLES // 2)
@given(st.lists(shapes(), min_size=1, max_size=3), st.sampled_from([1, 1000]), st.data())
def test_sql_token_bucket_with_tiers_matches_python_at_every_step(
    ask: psycopg.Connection, tiers: list[TokenBucket], tick: int, data: st.DataObject
) -> None:
    """Tiers alternate, time also goes back, and holds are given back late, in part and twice."""
    state: State | None = None
    receipts: list[tuple[TokenBucket, Receipt]] = []
    now = data.draw(instants)
    for birth in range(1, data.draw(st.integers(2, 12))):
        now = min(LATEST, max(0, now + data.draw(st.integers(-50, 100) | st.integers(-(2**51), 2**51))))
        tier = replace(data.draw(st.sampled_from(tiers)), tick=tick)
        step = data.draw(st.sampled_from(["hold", "hold", "record", "refund", "refund"]))
        assume(is_countable(tier, state))
        if step == "refund":
            if receipts:
                holder, receipt = data.draw(st.sampled_from(receipts))
                back = data.draw(st.sampled_from([receipt[-1], receipt[-1], receipt[-1] // 2, 1]))
                state = check_refund(ask, holder, state, receipt, back, now)
        elif step == "record":
            cost = data.draw(st.integers(1, MAX_UNITS // tier.d))
            after, room = record(tier, state, now, cost, birth)
            answer = decide(ask, tier, state, now, cost, birth, forced=True)
            assert answer[9:] == list(after or () if room is None and tier.n else ())
            state = after if room is None else state
        else:
            cost = data.draw(st.integers(1, tier.burst))
            before, (state, verdict) = state, tier.decide(state, now, cost, birth)
            answer = decide(ask, tier, before, now, cost, birth, forced=False)
            if verdict.allowed:
                assert state is not None
                receipts.append((tier, tier.receipt(before, state, cost)))
                assert answer[:2] == [ADMITTED, verdict.remaining + cost]
                assert answer[3:9] == [verdict.reset_after_us, *receipts[-1][1][:5]]
                assert answer[9:] == list(state)
            else:
                retry_after = NEVER if verdict.retry_after_us is None else verdict.retry_after_us
                assert answer[:3] == [retry_after, verdict.remaining, verdict.reset_after_us or 0]


def test_refund_is_limited_to_the_units_in_the_bucket(ask: psycopg.Connection) -> None:
    window, state, receipt = SlidingWindow("rule", 9, 10, 60), (7, 5, 3, 6, 1), (7, 6, 4)
    after = window.refund(state, receipt, 4, 65)
    assert after == (7, 5, 3)
    row = ask.execute(
        "SELECT headgate_refund_v2(%s, %s, %s, %s, %s, %s, %s::bigint[], %s, %s, %s)",
        (*shape(window, 0), kept(window, state), list(receipt[:2]), receipt[2], 4, 65),
    ).fetchone()
    assert row == ([window.fresh_at(after), *(kept(window, after) or [])],)


@pytest.mark.parametrize("state", [[1], [1, 2], [1, 2, 3, 4, 5], [1] * 11])
@pytest.mark.parametrize(
    "algorithm",
    [
        FixedWindow("r", 5, 10),
        SlidingWindow("r", 5, 1, 10),
        TokenBucket("r", 5, 1, 1, 1),
        Concurrent("r", 5, 10),
        Calendar("r", 5, "day", "UTC"),
    ],
)
def test_state_of_another_algorithm_is_detected(
    ask: psycopg.Connection, algorithm: Algorithm, state: list[int]
) -> None:
    arguments = (*shape(algorithm, 100), state, 100, 1, 2, False)
    row = ask.execute(
        "SELECT headgate_decide_v2(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)", arguments
    ).fetchone()
    assert row is not None
    assert row[0] == [NOT_OURS, 0, 0, 0, 0, 0, 0, 0, 0]
