"""The address of a server, its credentials, and the translation of its errors.

Connections are made by redis-py's classes with redis-py's settings, but without its pools and retries. The engine shares
one connection between many calls. A call that charges must not be sent twice: after a lost reply it is unknown whether it
was counted.
"""

from __future__ import annotations

import re
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import redis.asyncio.connection
import redis.connection
from redis import Redis, RedisCluster
from redis._parsers.base import BaseParser
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio import RedisCluster as AsyncRedisCluster
from redis.exceptions import InvalidResponse, MovedError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headgate.errors import (
    ConfigError,
    StoreConflict,
    StoreError,
    StoreMisconfigured,
    StoreTimeout,
    StoreUnavailable,
)
from headgate.stores.remote.peer import INVALID_REPLY, WRONG_TLS

Target = str | Redis | AsyncRedis | RedisCluster | AsyncRedisCluster
"""A URL, or a client of redis-py."""

SCHEMES = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}
"""The schemes of URLs, and redis-py's names for them."""

# Settings of a pool or a client, and settings that would retry, decode or change timeouts.
_LEFT_OUT = frozenset(
    {
        "connection_class",
        "decode_responses",
        "health_check_interval",
        "himport_registry",
        "maint_notifications_config",
        "maint_notifications_pool_handler",
        "max_connections",
        "orig_host_address",
        "orig_socket_connect_timeout",
        "orig_socket_timeout",
        "oss_cluster_maint_notifications_handler",
        "protocol",
        "retry",
        "retry_on_error",
        "retry_on_timeout",
        "socket_connect_timeout",
        "socket_timeout",
        "timeout",
    }
)


# Error replies that mean misconfiguration: wrong credentials, missing rights, a read-only replica, an unknown database, a
# Sentinel, or TLS settings that do not fit.
_REFUSAL = re.compile(
    r"\b(NOAUTH|WRONGPASS|NOPERM|READONLY|DENIED)\b|Authentication required|invalid (username-)?password|AUTH failed|"
    r"without any password|no permissions|executing the script can't|read only replica|unknown command|"
    r"DB index is out of range|Protocol error, got|cluster support disabled|"
    rf"SELECT is not allowed|knows no primary|{WRONG_TLS}|"
    r"Error 2 connecting to \S+:\d+\. No such file",  # a certificate file; the message about a server has its port
    re.IGNORECASE,
)

_NOT_OURS = re.compile(r"WRONGTYPE|: not a |user_script:\d+: (bad argument|attempt to)")
"""Error replies that mean that a key holds data of another program. The last two are errors of Lua."""

_PLACE = re.compile(r"(?<=connecting to )\S+?(?=(:\d+)?\. )|(?<=reading from )\S+")
"""The name of the server in an error text; it must not be searched for reasons."""


class Connection(Protocol):
    """The methods of redis-py's connections that are used."""

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...


class AsyncConnection(Protocol):
    """The methods of redis-py's asyncio connections that are used."""

    def connect(self) -> Awaitable[None]: ...
    def disconnect(self, nowait: bool) -> Awaitable[None]: ...


Recipe = tuple[type, Mapping[str, Any]]
"""A class of redis-py's connections, and its arguments."""


@dataclass(frozen=True, repr=False)
class RedisEndpoint:
    """The address of a server, from a URL or from a client of redis-py.

    Attributes:
        name: The server's name in messages, without credentials.
        for_threads: The recipe of a connection for threads; `None` if the client is for coroutines only.
        for_tasks: The recipe of a connection for coroutines; `None` if the client is for threads only.
        owner: The user's client. Some of its connections need it to stay alive.
        others: Further nodes of a cluster, to query if this one cannot be reached.
    """

    name: str
    for_threads: Recipe | None
    for_tasks: Recipe | None
    owner: object = None
    others: tuple[tuple[str, int], ...] = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @classmethod
    def of(cls, target: Target) -> RedisEndpoint:
        """Return the server of a URL or client; of a cluster, one of its nodes.

        Raises:
            ConfigError: The target is neither a URL nor a client of redis-py.
        """
        if isinstance(target, str):
            return cls.of_url(target)
        if isinstance(target, Redis):
            return cls._of_client(target, _recipe_of(target.connection_pool), None)
        if isinstance(target, AsyncRedis):
            return cls._of_client(target, None, _recipe_of(target.connection_pool))
        if isinstance(target, RedisCluster):
            node = next(iter(target.nodes_manager.startup_nodes.values()))
            return cls._of_client(target, _recipe_of(target.get_redis_connection(node).connection_pool), None)
        if isinstance(target, AsyncRedisCluster):
            return cls._of_client(
                target, None, _recipe_of(next(iter(target.nodes_manager.startup_nodes.values())))
            )
        raise ConfigError(f"a Redis store takes a URL or a client of redis-py, not a {type(target).__name__}")

    @classmethod
    def _of_client(
        cls, client: object, for_threads: Recipe | None, for_tasks: Recipe | None
    ) -> RedisEndpoint:
        return cls(_name(for_threads or for_tasks), for_threads, for_tasks, client)

    @classmethod
    def of_url(cls, url: str) -> RedisEndpoint:
        """Return the server of a URL."""
        scheme, separator, rest = url.partition("://")
        known = SCHEMES.get(scheme.lower())
        if not known or not separator:
            raise ConfigError(
                f"{scheme!r} is not a scheme of a Redis store; write for example 'redis://localhost:6379/0'"
            )
        try:
            sync = redis.connection.parse_url(f"{known}://{rest}")  # type: ignore[no-untyped-call]
            tasks = redis.asyncio.connection.parse_url(f"{known}://{rest}")
            endpoint = cls(
                "",
                _recipe(sync.get("connection_class", redis.connection.Connection), sync),
                _recipe(tasks.get("connection_class", redis.asyncio.connection.Connection), tasks),
            )
            endpoint.connection(1.0)  # raises for unknown options now, not at the first call
        except (ValueError, TypeError, RedisError):
            # Not chained, and without the URL: the parser may quote parts of a password.
            raise ConfigError(
                f"the {scheme.lower()}:// URL cannot be read; write for example 'redis://user:password@host:6379/0'; "
                f"percent-encode special characters, and use only options of redis-py after a '?'"
            ) from None
        return replace(endpoint, name=_name(endpoint.for_threads))

    @property
    def host(self) -> str:
        """The host, by default `localhost`."""
        recipe = self.for_threads or self.for_tasks
        return str(recipe[1].get("host", "localhost")) if recipe else "localhost"

    def at(self, host: str, port: int) -> RedisEndpoint:
        """Return another server of the same cluster, with the same login."""
        moved = {"host": host, "port": port}
        threads, tasks = (
            recipe and (recipe[0], {**recipe[1], **moved}) for recipe in (self.for_threads, self.for_tasks)
        )
        return RedisEndpoint(f"redis://{host}:{port}", threads, tasks, self.owner)

    def connection(self, deadline: float) -> Connection:
        """Return a new connection, not yet connected; each of its steps takes at most `deadline` seconds."""
        if self.for_threads is None:
            raise ConfigError(
                f"{self.name} was given as a client of redis.asyncio, which Limiter cannot use; "
                f"give it a redis.Redis or a URL"
            )
        kind, settings = self.for_threads
        made = kind(**settings, socket_timeout=deadline, socket_connect_timeout=deadline, protocol=2)
        return cast(Connection, made)

    def async_connection(self, deadline: float) -> AsyncConnection:
        """Return a new connection, not yet connected. The caller applies the deadline, also while connecting."""
        if self.for_tasks is None:
            raise ConfigError(
                f"{self.name} was given as a client of redis, which AsyncLimiter cannot use; "
                f"give it a redis.asyncio.Redis or a URL"
            )
        kind, settings = self.for_tasks
        made = kind(**settings, socket_timeout=None, socket_connect_timeout=deadline, protocol=2)
        # After the event loop was blocked, a timer would fire before what has arrived is read.
        made.socket_connect_timeout = None
        return cast(AsyncConnection, made)

    def error(self, cause: BaseException) -> StoreError:
        """Translate an exception of redis-py, without credentials."""
        text = self._without_credentials(str(cause) or type(cause).__name__)
        if isinstance(cause, (RedisTimeoutError, TimeoutError)):
            return StoreTimeout(f"{self.name} did not answer in time")
        if isinstance(cause, MovedError):
            return StoreMisconfigured(
                f"{self.name} belongs to a cluster: write redis+cluster://, or make the store with cluster=True"
            )
        if isinstance(cause, ResponseError) and _NOT_OURS.search(text):
            return StoreConflict(f"{self.name} holds data of another program under a key of Headgate: {text}")
        if isinstance(cause, InvalidResponse) or "Protocol error, got" in text:
            return StoreMisconfigured(f"{self.name} {INVALID_REPLY} ({text})")
        if is_refusal(cause):
            return StoreMisconfigured(f"{self.name} refuses this client: {text}")
        return StoreUnavailable(f"{self.name}: {text}")

    def presentable(self, cause: BaseException) -> BaseException | None:
        """Return the exception, or `None` if its text contains credentials."""
        text = str(cause)
        return cause if self._without_credentials(text) == text else None

    def _without_credentials(self, text: str) -> str:
        for recipe in (self.for_threads, self.for_tasks):
            settings = recipe[1] if recipe else {}
            for name in ("password", "ssl_password"):
                if secret := settings.get(name):
                    text = text.replace(str(secret), "***")
            if user := settings.get("username"):
                text = re.sub(rf"\b{re.escape(str(user))}\b", "***", text)
        return text


def socket_of(connection: Connection) -> Any:
    """Return the socket of an open connection; it has no public name in redis-py."""
    return connection._sock  # type: ignore[attr-defined]


def take_streams(connection: AsyncConnection) -> tuple[StreamReader, StreamWriter]:
    """Return the streams of an open connection, which then has none; they have no public names in redis-py."""
    streams = connection._reader, connection._writer  # type: ignore[attr-defined]
    connection._reader = connection._writer = None  # type: ignore[attr-defined]
    return streams


def error_of(text: str) -> RedisError:
    """Return redis-py's exception for an error reply."""
    error: RedisError = BaseParser.parse_error(text)  # type: ignore[no-untyped-call]
    return error


def is_refusal(error: BaseException) -> bool:
    """Return whether an error means misconfiguration, or a server that is not Redis."""
    text = _PLACE.sub("server", f"{getattr(error, 'status_code', '')} {error}")
    return isinstance(error, InvalidResponse) or _REFUSAL.search(text) is not None


def is_read_only(error: object) -> bool:
    """Return whether an error reply means that this server is now a replica, so that a new connection is needed."""
    return isinstance(error, ResponseError) and "READONLY" in f"{getattr(error, 'status_code', '')} {error}"


def _recipe_of(source: Any) -> Recipe:
    """Return the recipe of a pool's or a node's connections."""
    return _recipe(source.connection_class, source.connection_kwargs)


def _recipe(kind: type, settings: Mapping[str, Any]) -> Recipe:
    return kind, {name: value for name, value in settings.items() if name not in _LEFT_OUT}


def _name(recipe: Recipe | None) -> str:
    settings = recipe[1] if recipe else {}
    if "path" in settings:
        return f"unix://{settings['path']}?db={settings.get('db', 0)}"
    service = getattr(settings.get("connection_pool"), "service_name", None)
    place = service or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
    return f"redis://{place}/{settings.get('db', 0)}"
