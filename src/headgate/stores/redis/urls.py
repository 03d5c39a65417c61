"""URLs of several servers: Sentinels that name a primary, and nodes of a cluster.

redis+sentinel://user:password@host:26379,other:26379/primary/0    Sentinels, their name for the primary, and a database
redis+cluster://user:password@host:6379,other:6379                 some nodes of a cluster; ?hash_tag=limiter

`rediss`, `valkey` and `valkeys` work as well; with TLS, Sentinels use it too. The default ports are 26379 and 6379. The
credentials for Sentinels are `?sentinel_username=…&sentinel_password=…`; other options are those of redis-py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from headgate.errors import ConfigError
from headgate.stores.redis.endpoint import SCHEMES, RedisEndpoint, Target
from headgate.stores.redis.sentinel import (
    Address,
    AsyncPrimaryConnection,
    AsyncTLSPrimaryConnection,
    PrimaryConnection,
    Sentinels,
    TLSPrimaryConnection,
)

_SENTINEL = "write for example 'redis+sentinel://host:26379,other:26379/primary/0'"
_CLUSTER = "write for example 'redis+cluster://host:6379,other:6379?hash_tag=limiter'"
_PORTS = {"sentinel": 26379, "cluster": 6379}


class Place(NamedTuple):
    """The target of a store.

    Attributes:
        endpoint: The server; of a cluster, one of its nodes.
        is_cluster: Whether it is a cluster.
        hash_tag: The `hash_tag` option of the URL, or `None`.
    """

    endpoint: RedisEndpoint
    is_cluster: bool = False
    hash_tag: str | None = None


def place_of(target: Target) -> Place:
    """Return the target of a URL or a client of redis-py.

    Raises:
        ConfigError: The target is not valid. The message does not contain the URL, which may have a password.
    """
    kind = target.partition("://")[0].lower().partition("+") if isinstance(target, str) else ("", "", "")
    if isinstance(target, str) and kind[2] in _PORTS and kind[0] in SCHEMES and kind[0] != "unix":
        example = _SENTINEL if kind[2] == "sentinel" else _CLUSTER
        try:
            parts = urlsplit(target)
            addresses = _addresses(parts, _PORTS[kind[2]])
        except ValueError:  # not chained: its text may contain a part of the password
            raise ConfigError(f"the {kind[0]}+{kind[2]}:// URL cannot be read; {example}") from None
        return (_sentinel if kind[2] == "sentinel" else _cluster)(kind[0], parts, addresses)
    return Place(RedisEndpoint.of(target))


def _sentinel(scheme: str, parts: SplitResult, addresses: tuple[Address, ...]) -> Place:
    service, _, database = parts.path.strip("/").partition("/")
    if not service or not (database or "0").isdigit():
        raise ConfigError(
            f"the path of a Sentinel URL is the name of the primary and a database; {_SENTINEL}"
        )
    service = unquote(service)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    login = {
        name: value
        for name in ("username", "password")
        if (value := options.pop(f"sentinel_{name}", None)) is not None
    }
    endpoint = _endpoint(scheme, parts, addresses[0], f"/{database or 0}", options)
    assert endpoint.for_threads is not None
    assert endpoint.for_tasks is not None
    is_tls = SCHEMES[scheme] == "rediss"
    settings = dict(endpoint.for_threads[1])
    tls = {name: value for name, value in settings.items() if name.startswith("ssl_")}
    sentinels = Sentinels(addresses, service, {**login, **tls}, is_tls)
    return Place(
        replace(
            endpoint,
            name=f"{scheme}+sentinel://{_names(addresses)}/{service}/{database or 0}",
            for_threads=(
                TLSPrimaryConnection if is_tls else PrimaryConnection,
                {**settings, "sentinels": sentinels},
            ),
            for_tasks=(
                AsyncTLSPrimaryConnection if is_tls else AsyncPrimaryConnection,
                {**endpoint.for_tasks[1], "sentinels": sentinels},
            ),
        )
    )


def _cluster(scheme: str, parts: SplitResult, addresses: tuple[Address, ...]) -> Place:
    if parts.path.strip("/") not in ("", "0"):
        raise ConfigError(f"a cluster has only database 0, so its URL has no path; {_CLUSTER}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    hash_tag = options.pop("hash_tag", None)
    endpoint = _endpoint(scheme, parts, addresses[0], "/0", options)
    named = replace(endpoint, name=f"{scheme}+cluster://{_names(addresses)}", others=addresses[1:])
    return Place(named, is_cluster=True, hash_tag=hash_tag)


def _endpoint(
    scheme: str, parts: SplitResult, address: Address, path: str, options: dict[str, str]
) -> RedisEndpoint:
    """Return the endpoint of one server of a URL, with its credentials and options."""
    login, at, _ = parts.netloc.rpartition("@")
    query = f"?{urlencode(options)}" if options else ""
    return RedisEndpoint.of_url(f"{scheme}://{login}{at}{_names((address,))}{path}{query}")


def _names(addresses: tuple[Address, ...]) -> str:
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses)


def _addresses(parts: SplitResult, default_port: int) -> tuple[Address, ...]:
    login, _, hosts = parts.netloc.rpartition("@")
    if "@" in login:  # the credentials are the same for all hosts
        raise ValueError
    return tuple(_address(text, default_port) for text in hosts.split(","))


def _address(text: str, default_port: int) -> Address:
    part = urlsplit(f"//{text}")
    if not part.hostname:
        raise ValueError
    return part.hostname, part.port or default_port
