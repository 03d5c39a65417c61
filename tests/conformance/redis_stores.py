"""Redis stores on a real server, for the conformance kit."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from headgate.stores.redis import RedisStore
from headgate.testing.contract.base import Contract
from tests.integration.redis.cluster import Cluster, running_cluster


class OnServer(Contract):
    """Stores on one server, with a separate namespace for each test."""

    server = "redis"

    @pytest.fixture(autouse=True)
    def _connect(self, request: pytest.FixtureRequest) -> Iterator[None]:
        self.url: str = request.getfixturevalue(f"headgate_{self.server}_url")
        self.namespace = secrets.token_hex(8)
        with redis.Redis.from_url(self.url) as self.client:
            yield

    def make_store(self) -> RedisStore:
        clock = self.clock if self.own_time else None
        return RedisStore(self.url, namespace=self.namespace, clock=clock, deadline=30)

    def dump(self) -> object:
        keys: Any = self.client.keys(f"*{self.namespace}*")
        return {key: self.client.get(key) for key in keys}


class OnCluster(Contract):
    """Stores on a cluster, with everything that a limiter counts in one slot."""

    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls) -> Iterator[Cluster]:
        with running_cluster("redis") as cluster:
            yield cluster

    @pytest.fixture(autouse=True)
    def _connect(self, cluster: Cluster) -> None:
        self.url = cluster.url

    def make_store(self) -> RedisStore:
        return RedisStore(self.url, cluster=True, hash_tag="limiter", deadline=30)
