"""A shared server of either kind, and the number of our connections to it."""

from __future__ import annotations

import secrets

import psycopg
import redis
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore

PATIENT = 60.0
"""Seconds; long, because most tests do not check deadlines."""

Store = RedisStore | PostgresStore


class World:
    """A server and the number of our connections.

    Attributes:
        url: The URL of the server.
        name: The name of our connections; only one test has it.
    """

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self.name = f"n{secrets.token_hex(8)}"

    @property
    def named_url(self) -> str:
        """A URL under which only one test connects."""
        option = "client_name" if self.kind == "redis" else "application_name"
        return f"{self.url}{'&' if '?' in self.url else '?'}{option}={self.name}"

    def store(self, *, port: int | None = None, deadline: float = PATIENT) -> Store:
        """Return a store whose connections have a unique name."""
        if self.kind == "redis":
            url = self.named_url if port is None else self.named_url.replace(f":{self.port}", f":{port}")
            return RedisStore(url, deadline=deadline)
        rest = {} if port is None else {"host": "127.0.0.1", "port": str(port)}
        return PostgresStore(make_conninfo(self.named_url, **rest), deadline=deadline)

    @property
    def port(self) -> int:
        if self.kind == "redis":
            return int(self.url.rpartition(":")[2].partition("/")[0])
        return int(conninfo_to_dict(self.url)["port"] or 5432)

    def connections(self) -> int:
        if self.kind == "redis":
            with redis.Redis.from_url(self.url) as client:
                return sum(entry["name"] == self.name for entry in client.client_list())
        with psycopg.connect(self.url) as connection:
            query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
            [count] = connection.execute(query, (self.name,)).fetchone() or [0]
            return int(count)
