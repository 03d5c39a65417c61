"""The Redis store keeps every promise to coroutines, whose calls share round trips.

The vectors are played once: they are about the script, which `test_redis` has run on every server with them.
"""

from __future__ import annotations

from headgate.testing import AsyncStoreContract
from tests.conformance.redis_stores import OnCluster, OnServer


class TestAsyncRedisAtGivenTimes(AsyncStoreContract, OnServer):
    effort = 0.2


class TestAsyncValkeyByItsOwnClock(AsyncStoreContract, OnServer):
    effort = 0.2
    own_time = True
    server = "valkey"
    test_vectors_are_answered_to_the_microsecond = None


class TestAsyncRedisCluster(AsyncStoreContract, OnCluster):
    effort = 0.1
    test_vectors_are_answered_to_the_microsecond = None
