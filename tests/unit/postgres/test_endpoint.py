"""What a database's failures mean to callers; without a database."""

from __future__ import annotations

import pytest
from psycopg import OperationalError

from headgate.errors import StoreMisconfigured, StoreUnavailable
from headgate.stores.postgres.endpoint import PostgresEndpoint

ENDPOINT = PostgresEndpoint("postgresql://ann@db.example.org:6432/limits")
REFUSED = 'connection to server at "db.example.org", port 6432 failed: FATAL:  {}\n'


@pytest.mark.parametrize(
    "text",
    [
        "bouncer config error",
        "no such user",
        "no such database: limits",
        "password authentication failed",
        "SASL authentication failed",
        '"trust" authentication failed',
        "certificate authentication failed",
        "unix socket login rejected",
        "login rejected",
        "not allowed",
        "SSL required",
        "unsupported startup parameter: options",
        "unsupported startup parameter in options: search_path",
        "unsupported options startup parameter: only '-c config=val' is allowed",
        "server login failed: wrong password type",
        'server login has been failing, cached error: password authentication failed for user "ann" (server_login_retry)',
    ],
)
def test_a_pooler_that_refuses_is_misconfigured(text: str) -> None:
    assert type(ENDPOINT.error(OperationalError(REFUSED.format(text)))) is StoreMisconfigured


def test_the_console_of_a_pooler_is_no_database() -> None:
    error = OperationalError("extended query protocol not supported by admin console")
    assert type(ENDPOINT.error(error)) is StoreMisconfigured


@pytest.mark.parametrize(
    "text",
    [
        "no more connections allowed (max_client_conn)",
        "query_wait_timeout",
        "client_login_timeout (server down)",
        "server login has been failing, try again later (server_login_retry)",
        "server login has been failing, cached error: connect failed (server_login_retry)",
        "pgbouncer cannot connect to server",
        'database "limits" is disabled',
        "the database system is shutting down",
    ],
)
def test_a_pooler_without_a_database_is_an_outage(text: str) -> None:
    assert type(ENDPOINT.error(OperationalError(REFUSED.format(text)))) is StoreUnavailable
