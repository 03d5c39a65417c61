"""Addresses of servers and translation of their errors, without a server."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import MovedError, NoPermissionError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.sentinel import Sentinel

from headgate import (
    ConfigError,
    StoreConflict,
    StoreMisconfigured,
    StoreTimeout,
    StoreUnavailable,
    open_async_store,
    open_store,
)
from headgate.stores.redis import RedisStore
from headgate.stores.redis.endpoint import RedisEndpoint, is_read_only


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://localhost", "redis://localhost:6379/0"),
        ("redis://user:secret@example.org:7000/3", "redis://example.org:7000/3"),
        ("rediss://:secret@example.org", "redis://example.org:6379/0"),
        ("valkey://example.org/1", "redis://example.org:6379/1"),
        ("valkeys://example.org", "redis://example.org:6379/0"),
        ("REDIS://example.org", "redis://example.org:6379/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock?db=0"),
        ("unix://:secret@/run/redis.sock?db=2", "unix:///run/redis.sock?db=2"),
    ],
)
def test_names_show_no_credentials(url: str, name: str) -> None:
    assert RedisEndpoint.of(url).name == name
    assert repr(RedisEndpoint.of(url)) == f"<RedisEndpoint {name}>"
    assert repr(RedisStore(url)) == f"<RedisStore {name}>"


def test_tls_is_used_for_tls_urls() -> None:
    endpoint = RedisEndpoint.of("rediss://example.org")
    assert type(endpoint.connection(1)).__name__ == "SSLConnection"
    assert type(endpoint.async_connection(1)).__name__ == "SSLConnection"


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pa#ss-part@example.org:6379",
        "redis://user:pass-part@example.org:no-port",
        "redis://:pass-part@example.org/?socket_keepalive=pass-part&no_such_option=1",
        "redis://:pass-part@example.org/?health_check_interval=pass-part",
    ],
)
def test_an_invalid_url_is_not_quoted_in_the_error(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        RedisStore(url)
    shown = "".join(traceback.format_exception(error.value, limit=0))
    assert "pass-part" not in shown
    assert "ss-part" not in shown


@pytest.mark.parametrize("url", ["http://example.org", "redis:/example.org", "example.org", ""])
def test_urls_with_an_unknown_scheme_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="scheme"):
        RedisStore(url)


def test_stores_are_opened_by_url() -> None:
    for url in ("redis://localhost", "unix:///run/redis.sock", "valkey://localhost"):
        assert isinstance(open_store(url), RedisStore)
        assert isinstance(open_async_store(url), RedisStore)


def test_the_error_for_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'redis'", name="redis")

    monkeypatch.setattr("headgate.stores.import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'headgate\[redis\]'"):
        open_store("redis://localhost")


def test_a_broken_installation_is_not_reported_as_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'headgate.stores.redis'", name="headgate.stores.redis")

    monkeypatch.setattr("headgate.stores.import_module", missing)
    with pytest.raises(ModuleNotFoundError):
        open_store("redis://localhost")


# --- Clients of the user ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "client",
    [
        redis.Redis(host="example.org", port=7000, db=3, password="secret", decode_responses=True),
        redis.asyncio.Redis(host="example.org", port=7000, db=3, password="secret", decode_responses=True),
    ],
)
def test_address_and_login_but_not_settings_are_taken_from_a_client(client: Any) -> None:
    endpoint = RedisEndpoint.of(client)
    assert endpoint.name == "redis://example.org:7000/3"
    recipe = endpoint.for_threads or endpoint.for_tasks
    assert recipe is not None
    connection: Any = recipe[0](**recipe[1])
    assert connection.password == "secret"
    assert not connection.encoder.decode_responses
    assert connection.retry.get_retries() == 0
    assert connection.health_check_interval == 0


def test_the_store_deadline_replaces_the_socket_timeout_of_the_client() -> None:
    connection: Any = RedisEndpoint.of(redis.Redis(socket_timeout=60)).connection(0.5)
    assert connection.socket_timeout == connection.socket_connect_timeout == 0.5


def test_a_sentinel_client_still_asks_the_sentinel() -> None:
    client = Sentinel([("localhost", 26379)]).master_for("primary")
    endpoint = RedisEndpoint.of(client)
    assert endpoint.name == "redis://primary/0"
    connection: Any = endpoint.connection(1)
    assert connection.connection_pool.service_name == "primary"


def test_cluster_nodes_use_the_login_of_the_first_node() -> None:
    node = RedisEndpoint.of("redis://user:secret@example.org:7000").at("other.example.org", 7001)
    connection: Any = node.connection(1)
    assert (connection.host, connection.port, connection.password) == ("other.example.org", 7001, "secret")
    assert node.name == "redis://other.example.org:7001"


# --- Failures --------------------------------------------------------------------------------------------------------

ENDPOINT = RedisEndpoint.of("redis://user:secret@example.org:7000")


@pytest.mark.parametrize(
    ("cause", "kind", "text"),
    [
        (redis.ConnectionError("refused"), StoreUnavailable, "refused"),
        (RedisTimeoutError("slow"), StoreTimeout, "in time"),
        (TimeoutError(), StoreTimeout, "in time"),
        (OSError(5, "broken"), StoreUnavailable, "broken"),
        (ResponseError("OOM no memory"), StoreUnavailable, "OOM"),
        (NoPermissionError("NOPERM no"), StoreMisconfigured, "NOPERM"),
        (MovedError("5 example.org:1"), StoreMisconfigured, "cluster=True"),
        (ResponseError("WRONGTYPE Operation against a key"), StoreConflict, "data of another program"),
        (ResponseError("user_script:42: not a sliding window"), StoreConflict, "not a sliding window"),
    ],
)
def test_failures_are_translated(cause: Exception, kind: type[Exception], text: str) -> None:
    error = ENDPOINT.error(cause)
    assert type(error) is kind
    assert text in str(error)
    assert "redis://example.org:7000/0" in str(error)
    assert ENDPOINT.presentable(cause) is cause


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed (_ssl.c:1006).", StoreMisconfigured),
        (
            "[SSL: TLSV1_ALERT_PROTOCOL_VERSION] tlsv1 alert protocol version (_ssl.c:1006).",
            StoreMisconfigured,
        ),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca (_ssl.c:2580)", StoreMisconfigured),
        ("[SSL: SSLV3_ALERT_HANDSHAKE_FAILURE] sslv3 alert handshake failure.", StoreMisconfigured),
        ("[SSL: UNSUPPORTED_PROTOCOL] unsupported protocol (_ssl.c:1006).", StoreMisconfigured),
        ("[X509: NO_CERTIFICATE_OR_CRL_FOUND] no certificate or crl found.", StoreMisconfigured),
        ("[SSL] PEM lib (_ssl.c:3926).", StoreMisconfigured),
        ("Error 2 connecting to example.org:7000. No such file or directory.", StoreMisconfigured),
        ("Error 2 connecting to /run/redis.sock. No such file or directory.", StoreUnavailable),
        ("Error 111 connecting to my_certificate:6379. Connection refused.", StoreUnavailable),
        ("Error -2 connecting to unknown-cache:6379. Name or service not known.", StoreUnavailable),
        ("Error 111 connecting to readonly.example.org:6379. Connection refused.", StoreUnavailable),
        ("Error while reading from cache-readonly:6379 : (104, 'reset')", StoreUnavailable),
        ("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol.", StoreUnavailable),
    ],
)
def test_connection_errors_are_misconfigurations_or_outages(text: str, kind: type[Exception]) -> None:
    assert type(ENDPOINT.error(redis.ConnectionError(text))) is kind


def test_credentials_are_removed_from_errors() -> None:
    cause = ResponseError("NOPERM User user cannot use secret, and neither can username")
    assert str(ENDPOINT.error(cause)).endswith("NOPERM User *** cannot use ***, and neither can username")
    assert ENDPOINT.presentable(cause) is None


def test_a_read_only_server_is_recognised() -> None:
    assert is_read_only(ResponseError("READONLY You can't write against a read only replica."))
    assert not is_read_only(ResponseError("OOM"))
    assert not is_read_only([1, 2, 3])


def test_guarantees() -> None:
    alone = RedisStore("redis://localhost").guarantees
    assert alone.exact
    assert alone.shared
    assert alone.durable
    assert alone.all_or_nothing
    assert "noeviction" in alone.may_lose
    assert RedisStore("redis://localhost", cluster=True).guarantees == alone
