"""The Redis store keeps every promise, on the oldest server that it supports and on the newest."""

from __future__ import annotations

from headgate.testing import StoreContract
from tests.conformance.redis_stores import OnCluster, OnServer


class TestRedisAtGivenTimes(OnServer, StoreContract):
    effort = 0.3


class TestValkeyByItsOwnClock(OnServer, StoreContract):
    """The clock is in the client, so one server is enough."""

    effort = 0.3
    own_time = True
    server = "valkey"


class TestRedisCluster(OnCluster, StoreContract):
    effort = 0.1
