"""The Redis store keeps every promise to coroutines, whose calls share round trips."""

from __future__ import annotations

from headgate.testing import AsyncStoreContract
from tests.conformance.redis_stores import OnCluster, OnServer


class TestAsyncRedisAtGivenTimes(AsyncStoreContract, OnServer):
    effort = 0.2


class TestAsyncRedisByItsOwnClock(AsyncStoreContract, OnServer):
    effort = 0.2
    own_time = True


class TestAsyncValkeyAtGivenTimes(AsyncStoreContract, OnServer):
    effort = 0.2
    server = "valkey"


class TestAsyncRedisCluster(AsyncStoreContract, OnCluster):
    effort = 0.1
