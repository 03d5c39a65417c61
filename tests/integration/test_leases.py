"""Leases of several processes on one real store."""

from __future__ import annotations

import asyncio
import os

import pytest

from headgate import AsyncLimiter, Limiter, fixed_window, sliding_window, token_bucket
from headgate.rules import Rule
from headgate.testing.contract.races import in_processes

LIMIT = 1_600
RULES = {
    "sliding": sliding_window(f"{LIMIT}/day", scope="user"),
    "fixed": fixed_window(f"{LIMIT}/week", scope="user"),
    "bucket": token_bucket("1/day", burst=LIMIT, scope="user"),
}
SHARED = sliding_window(f"{10 * LIMIT}/day", scope="*")
KEY = {"user": "42"}
LEASE = "1h"


@pytest.mark.parametrize("store", ["redis", "postgres"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_processes_with_leases_admit_exactly_the_limit(
    request: pytest.FixtureRequest, name: str, store: str, rule: Rule
) -> None:
    url = request.getfixturevalue(f"headgate_{store}_url")

    def admit(number: int) -> int:
        with Limiter(rule, SHARED, name=name, store=url, lease=LEASE) as limiter:
            decisions = [limiter.hit(KEY) for _ in range(LIMIT // 2)]
        admitted = sum(map(bool, decisions))
        assert admitted < LIMIT // 4 or any(decision.leased for decision in decisions)
        return admitted

    admitted = sum(in_processes(4, admit))
    with Limiter(rule, SHARED, name=name, store=url) as exact:
        left = exact.check(KEY, 0)
        by_rule = {result.limit: result.remaining for result in left.results}
        assert admitted + by_rule[LIMIT] == LIMIT
        assert admitted + by_rule[10 * LIMIT] == 10 * LIMIT


def test_killed_process_loses_at_most_its_chunk(headgate_redis_url: str, name: str) -> None:
    rule, url = RULES["sliding"], headgate_redis_url

    def die(number: int) -> int:
        limiter = Limiter(rule, name=name, store=url, lease=LEASE)
        for _ in range(LIMIT // 4):
            limiter.hit(KEY)
        if os.fork() == 0:
            os._exit(0)  # the child has no chunk to return
        return LIMIT // 4  # the process ends without closing its limiter

    admitted = sum(in_processes(2, die))
    with Limiter(rule, name=name, store=url) as exact:
        remaining = exact.check(KEY, 0).remaining
    assert remaining is not None
    assert LIMIT - 2 * admitted <= remaining <= LIMIT - admitted


def test_tasks_share_a_chunk(headgate_redis_url: str, name: str) -> None:
    async def admit() -> int:
        async with AsyncLimiter(
            RULES["sliding"], name=name, store=headgate_redis_url, lease=LEASE
        ) as limiter:

            async def call() -> int:
                return sum([(await limiter.hit(KEY)).allowed for _ in range(LIMIT // 16)])

            return sum(await asyncio.gather(*(call() for _ in range(20))))

    admitted = asyncio.run(admit())
    with Limiter(RULES["sliding"], name=name, store=headgate_redis_url) as exact:
        assert exact.check(KEY, 0).remaining == LIMIT - admitted
