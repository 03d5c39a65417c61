"""Policies over servers: limits that change there, shadow rules in one round trip, outages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from headgate.policy import AsyncLivePolicy, ShadowCount
from headgate.testing.servers import RedisServer

SHADOWED = """
[limiters.{name}]
rules = [
  "{quota}",
  {{ quota = "1/hour", name = "one", shadow = true }},
  {{ quota = "2/hour", name = "two", shadow = true }},
  {{ quota = "3/hour", name = "three", shadow = true }},
]
store = "{url}"
deadline = {deadline}
"""


@pytest.fixture(params=["redis", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"headgate_{request.param}_url")
    return found


def write(file: Path, name: str, url: str, quota: str, deadline: float = 30) -> None:
    file.write_text(SHADOWED.format(name=f'"{name}"', quota=quota, url=url, deadline=deadline))


async def test_a_changed_limit_applies_at_once_and_holds_are_settled(
    tmp_path: Path, url: str, name: str
) -> None:
    file = tmp_path / "headgate.toml"
    write(file, name, url, "4/hour")
    async with AsyncLivePolicy.from_file(file) as live:
        limiter = live[name]
        hold = await limiter.hold("ada", 3)
        assert await limiter.hit("ada")
        write(file, name, url, "5/hour")
        live.reload()
        assert [bool(await limiter.hit("ada")) for _ in range(2)] == [True, False]
        assert await hold.settle(1) == 1
        assert [bool(await limiter.hit("ada")) for _ in range(3)] == [True, True, False]
        assert limiter.shadow_report() == {
            "one": ShadowCount(asked=5, refused=4, failed=0),
            "two": ShadowCount(asked=5, refused=3, failed=0),
            "three": ShadowCount(asked=5, refused=2, failed=0),
        }


async def test_all_shadow_rules_together_add_one_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        write(file, "api", server.url, "100/hour")

        def round_trips() -> int:
            stats: Any = client.info("commandstats")
            calls: int = stats["cmdstat_evalsha"]["calls"]
            return calls

        async with AsyncLivePolicy.from_file(file) as live:
            await live["api"].hit("ada")
            before = round_trips()
            for _ in range(10):
                await live["api"].hit("ada")
            assert round_trips() - before == 20
