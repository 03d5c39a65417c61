"""The Redis store keeps every promise, on the oldest server that it supports and on the newest."""

from __future__ import annotations

from headgate.testing import StoreContract
from headgate.testing.contract.keys import KeyTests
from tests.conformance.redis_stores import OnCluster, OnServer
from tests.conformance.variants import BlockingVariant


class TestRedisAtGivenTimes(OnServer, StoreContract):
    effort = 0.3


class TestValkeyByItsOwnClock(OnServer, BlockingVariant):
    """The clock is in the client, so one server is enough."""

    effort = 0.3
    own_time = True
    server = "valkey"


class TestRedisCluster(OnCluster, BlockingVariant, KeyTests):
    effort = 0.1
    test_vectors_are_answered_to_the_microsecond = None  # the same server as above
