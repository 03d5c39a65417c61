"""Databases that are reachable but not usable: an error is raised, and nothing is admitted."""

from __future__ import annotations

import socketserver
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from headgate import ConfigError, StoreError
from headgate.stores.postgres import PostgresStore
from headgate.testing.postgres_server import PostgresServer
from tests.integration.waiting import until
from tests.unit.flavours import Flavour, done


def _role(url: str, name: str, *statements: str) -> str:
    """Make a role and return a URL to log in as it."""
    role = sql.Identifier(name)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'hunter2'").format(role))
        for statement in statements:
            connection.execute(sql.SQL(statement).format(role))  # type: ignore[arg-type]
    return make_conninfo(url, user=name, password="hunter2")


def no_schema(url: str, empty_url: str, name: str) -> str:
    return empty_url


def no_rights(url: str, empty_url: str, name: str) -> str:
    return _role(url, name)


def read_only(url: str, empty_url: str, name: str) -> str:
    return make_conninfo(url, options="-c default_transaction_read_only=on")


def wrong_isolation(url: str, empty_url: str, name: str) -> str:
    return make_conninfo(url, options="-c default_transaction_isolation=serializable")


def no_such_role(url: str, empty_url: str, name: str) -> str:
    return make_conninfo(url, user=f"{name} and nobody else")


def no_such_database(url: str, empty_url: str, name: str) -> str:
    return make_conninfo(url, dbname=f"{name} and nothing else")


def no_such_port(url: str, empty_url: str, name: str) -> str:
    return make_conninfo(url, port=65_536)


def no_such_setting(url: str, empty_url: str, name: str) -> str:
    return make_conninfo(url, options="-c serach_path=limits")


def no_such_sslmode(url: str, empty_url: str, name: str) -> str:
    return make_conninfo(url, sslmode="on")


def no_login(url: str, empty_url: str, name: str) -> str:
    return _role(url, name, "ALTER ROLE {} NOLOGIN")


@pytest.mark.parametrize(
    ("way", "hint"),
    [
        (no_schema, "headgate migrate"),
        (no_rights, "GRANT SELECT, INSERT, UPDATE, DELETE ON headgate_states"),
        (read_only, "replica"),
        (wrong_isolation, "READ COMMITTED"),
        (no_such_role, "does not exist"),
        (no_such_database, "does not exist"),
        (no_such_port, "invalid port number"),
        (no_such_setting, "serach_path"),
        (no_such_sslmode, "sslmode"),
        (no_login, "log in"),
    ],
)
async def test_misconfiguration_at_the_start_raises(
    url: str, empty_url: str, name: str, way: Any, hint: str, flavour: Flavour
) -> None:
    store = PostgresStore(way(url, empty_url, name), deadline=60.0)
    limiter = flavour("5/hour", name=name, store=store, on_store_error="open")
    for call in (limiter.ping, limiter.hit, limiter.hit):
        with pytest.raises(ConfigError, match=hint) as raised:
            await done(call() if call == limiter.ping else call("alice"))
        assert isinstance(raised.value, StoreError)
        assert "hunter2" not in str(raised.value)
    assert limiter.health.outages == 0
    await store.aclose()


class RefusingPooler(socketserver.BaseRequestHandler):
    """Speaks neither TLS nor Kerberos, and then refuses as PgBouncer does."""

    def handle(self) -> None:
        while len(self.request.recv(65536)) == 8:
            self.request.sendall(b"N")
        fields = b"SFATAL\0C08P01\0Mbouncer config error\0\0"
        self.request.sendall(b"E" + struct.pack("!i", 4 + len(fields)) + fields)


async def test_misconfigured_pooler_admits_nothing(flavour: Flavour) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), RefusingPooler) as pooler:
        threading.Thread(target=pooler.serve_forever, daemon=True).start()
        store = PostgresStore(f"postgresql://ann@127.0.0.1:{pooler.server_address[1]}/x", deadline=60.0)
        limiter = flavour("5/hour", name="x", store=store, on_store_error="open")
        for _ in range(2):
            with pytest.raises(ConfigError, match="bouncer config error"):
                await done(limiter.hit("alice"))
        await store.aclose()
        pooler.shutdown()


@pytest.fixture
def role_with_password(server: PostgresServer, name: str) -> Iterator[str]:
    """A URL to log in as a role whose password the server wants to see."""
    url = _role(server.url, name)
    with psycopg.connect(server.url, autocommit=True) as connection:
        [place] = connection.execute("SHOW hba_file").fetchone() or ()
        rules = Path(place).read_text()
        Path(place).write_text(f"host all {name} 127.0.0.1/32 scram-sha-256\n{rules}")
        connection.execute("SELECT pg_reload_conf()")
        until(lambda: not _accepts_login(make_conninfo(url, password="hunter3")))
        yield url
        Path(place).write_text(rules)
        connection.execute("SELECT pg_reload_conf()")


def _accepts_login(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.parametrize("password", ["", "hunter3"])
async def test_a_wrong_password_is_raised(
    role_with_password: str, name: str, flavour: Flavour, password: str
) -> None:
    store = PostgresStore(make_conninfo(role_with_password, password=password, passfile="/nowhere"))
    limiter = flavour("5/hour", name=name, store=store, on_store_error="open")
    with pytest.raises(ConfigError, match="password") as raised:
        await done(limiter.hit("alice"))
    assert "hunter3" not in str(raised.value)
    await store.aclose()
