"""URLs of several servers."""

from __future__ import annotations

from typing import Any

import pytest

from headgate import ConfigError, open_async_store, open_store
from headgate.observe import redact
from headgate.stores.redis import RedisStore
from headgate.stores.redis.sentinel import PrimaryConnection, TLSPrimaryConnection


def connection_of(url: str) -> Any:
    return RedisStore(url).endpoint.connection(1)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys"])
@pytest.mark.parametrize("rest", ["+sentinel://h/primary", "+cluster://h"])
def test_every_scheme_supports_sentinel_and_cluster_urls(scheme: str, rest: str) -> None:
    for store in (open_store(scheme + rest), open_async_store(scheme + rest)):
        assert isinstance(store, RedisStore)
        assert repr(store).startswith(f"<RedisStore {scheme}+")


def test_a_sentinel_url_has_all_connection_settings() -> None:
    url = "redis+sentinel://ann:s%40cret@h:1,[::1],g/pri%20mary/3?client_name=me&sentinel_password=xyz"
    connection = connection_of(url)
    assert isinstance(connection, PrimaryConnection)
    assert (connection.username, connection.password, connection.db) == ("ann", "s@cret", 3)
    sentinels = connection._sentinels
    assert sentinels.service == "pri mary"
    assert sentinels._addresses == (("h", 1), ("::1", 26379), ("g", 26379))
    assert sentinels._settings == {"password": "xyz"}
    assert RedisStore(url).endpoint.name == "redis+sentinel://h:1,[::1]:26379,g:26379/pri mary/3"


def test_tls_is_used_for_sentinels_too() -> None:
    connection = connection_of("rediss+sentinel://h/primary?ssl_ca_certs=/ca.pem")
    assert isinstance(connection, TLSPrimaryConnection)
    assert connection._sentinels._is_tls
    assert connection._sentinels._settings == {"ssl_ca_certs": "/ca.pem"}


def test_a_cluster_url_has_all_store_settings() -> None:
    store = RedisStore("redis+cluster://ann:secret@h:7000,g?hash_tag=limiter")
    assert store._tag == "limiter"
    assert store.endpoint.others == (("g", 6379),)
    connection: Any = store.endpoint.connection(1)
    assert (connection.host, connection.port, connection.password) == ("h", 7000, "secret")
    assert RedisStore("redis+cluster://h")._tag == "key"


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("redis+sentinel://ann:secret@h", "name of the primary"),
        ("redis+sentinel://ann:secret@h/primary/x", "name of the primary"),
        ("redis+sentinel://ann:secret@/primary", "cannot be read"),
        ("redis+sentinel://ann:secret@h,/primary", "cannot be read"),
        ("redis+sentinel://ann:secret@h:99999/primary", "cannot be read"),
        ("redis+sentinel://ann:secret@h/primary?nonsense=1", "only options of redis-py"),
        ("redis+cluster://ann:secret@h:port", "cannot be read"),
        ("redis+cluster://ann:secret@h,bob:secret@g", "cannot be read"),
        ("redis+cluster://ann:secret@h/3", "only database 0"),
        ("redis+cluster://ann:secret@h?hash_tag=slot", "hash_tag must be 'key' or 'limiter'"),
        ("unix+sentinel://ann:secret@h/primary", "not a scheme"),
        ("redis+proxy://ann:secret@h", "not a scheme"),
    ],
)
def test_url_errors_contain_no_credentials(url: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as raised:
        RedisStore(url)
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert "secret" not in redact(url)
