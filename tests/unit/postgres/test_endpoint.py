"""Translation of a database's errors, without a database."""

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
def test_a_refusal_by_the_pooler_is_a_misconfiguration(text: str) -> None:
    assert type(ENDPOINT.error(OperationalError(REFUSED.format(text)))) is StoreMisconfigured


@pytest.mark.parametrize(
    "text",
    [
        # Settings of the URL
        'invalid sslmode value: "on"',
        'invalid "ssl_min_protocol_version" value: "1.2"',
        'definition of service "limits" not found',
        "GSSAPI encryption required but no credential cache",
        REFUSED.format('unrecognized configuration parameter "serach_path"'),
        REFUSED.format('invalid value for parameter "client_encoding": "utf-9"'),
        REFUSED.format("invalid command-line argument for server process: -z"),
        REFUSED.format('parameter "port" cannot be changed without restarting the server'),
        'authentication method requirement "scram-sha-256" failed: server did not complete authentication',
        # TLS
        'root certificate file "/etc/limits/root.crt" does not exist',
        'server certificate for "localhost" does not match host name "127.0.0.1"',
        'private key file "/etc/limits/key.pem" has group or world access',
        "SSL error: tlsv1 alert protocol version",
        "SSL error: tlsv1 alert no application protocol",
        "direct SSL connection was established without ALPN protocol negotiation extension",
        REFUSED.format("connection requires a valid client certificate"),
        # The console of the pooler
        "extended query protocol not supported by admin console",
    ],
)
def test_errors_that_waiting_does_not_end_are_misconfigurations(text: str) -> None:
    assert type(ENDPOINT.error(OperationalError(text))) is StoreMisconfigured


@pytest.mark.parametrize(
    "text",
    [
        'connection to server at "certificate.example" (10.0.0.1), port 5432 failed: Connection refused',
        'could not translate host name "my_certificate_store" to address: Name or service not known',
        REFUSED.format('too many connections for role "svc_certificate_api"'),
    ],
)
def test_names_in_an_error_do_not_change_its_type(text: str) -> None:
    assert type(ENDPOINT.error(OperationalError(text))) is StoreUnavailable


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
