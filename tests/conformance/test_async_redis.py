"""The Redis store keeps its promises to coroutines, whose calls share round trips; `test_redis` tests the script."""

from __future__ import annotations

from tests.conformance.redis_stores import OnCluster, OnServer
from tests.conformance.variants import TaskVariant


class TestAsyncRedisAtGivenTimes(TaskVariant, OnServer):
    effort = 0.2


class TestAsyncValkeyByItsOwnClock(TaskVariant, OnServer):
    effort = 0.2
    own_time = True
    server = "valkey"


class TestAsyncRedisCluster(TaskVariant, OnCluster):
    effort = 0.1
    kinds = ("sliding_window",)  # the kind decides nothing about nodes and connections
