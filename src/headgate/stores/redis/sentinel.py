"""Connections to the primary that Sentinels name.

A connection queries one Sentinel after the other for the address of the primary, and then connects to it. If a primary
fails or is demoted, its connections end, and new connections find its successor. Connections share only the order of
the Sentinels, so they are safe with threads, event loops and forks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import redis.asyncio.connection
import redis.connection
from redis.exceptions import RedisError

Address = tuple[str, int]


class Sentinels:
    """The Sentinels that watch a primary.

    Args:
        addresses: Their addresses.
        service: Their name for the primary.
        settings: Arguments of redis-py's connections, such as credentials.
        is_tls: Whether to use TLS.
    """

    def __init__(
        self, addresses: tuple[Address, ...], service: str, settings: Mapping[str, Any], is_tls: bool
    ) -> None:
        self.service = service
        self._addresses = addresses
        self._settings = settings
        self._is_tls = is_tls

    def find_primary(self, timeout: float) -> Address:
        """Return the address of the primary; `timeout` is for all Sentinels together.

        Raises:
            RedisError: No Sentinel answered with an address.
        """
        kind = redis.connection.SSLConnection if self._is_tls else redis.connection.Connection
        share = timeout / len(self._addresses)  # a Sentinel that hangs must leave time for the others
        times = {"socket_timeout": share, "socket_connect_timeout": share}
        failures: list[str] = []
        for host, port in self._addresses:
            connection: Any = kind(**{**self._settings, **times, "host": host, "port": port, "protocol": 2})
            try:
                connection.connect()
                connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
                reply = connection.read_response()
            except (RedisError, OSError) as error:
                failures.append(f"{host}:{port}: {error}")
                continue
            finally:
                connection.disconnect()
            if reply is not None:
                # The next connection starts with the Sentinel that answered last.
                others = tuple(address for address in self._addresses if address != (host, port))
                self._addresses = ((host, port), *others)
                primary = reply[0].decode() if isinstance(reply[0], bytes) else str(reply[0])
                return primary, int(reply[1])
            failures.append(f"{host}:{port}: it knows no primary named {self.service!r}")
        raise redis.ConnectionError(f"no Sentinel named the primary: {'; '.join(failures)}")


class _Finding:
    """A connection that gets its host from a Sentinel when it connects."""

    host: str
    port: int

    def __init__(self, *, sentinels: Sentinels, socket_connect_timeout: float, **settings: Any) -> None:
        # The class of redis-py that this is mixed into.
        super().__init__(socket_connect_timeout=socket_connect_timeout, **settings)  # type: ignore[call-arg]
        self._sentinels = sentinels
        self._patience = socket_connect_timeout


class _FindingInThread(_Finding):
    def connect(self) -> None:
        self.host, self.port = self._sentinels.find_primary(self._patience)
        super().connect()  # type: ignore[misc]


class _FindingInTask(_Finding):
    async def connect(self) -> None:
        self.host, self.port = await asyncio.to_thread(self._sentinels.find_primary, self._patience)
        await super().connect()  # type: ignore[misc]


class PrimaryConnection(_FindingInThread, redis.connection.Connection):
    """A connection to the primary, for threads."""


class TLSPrimaryConnection(_FindingInThread, redis.connection.SSLConnection):
    """The same over TLS."""


class AsyncPrimaryConnection(_FindingInTask, redis.asyncio.connection.Connection):
    """A connection to the primary, for coroutines."""


class AsyncTLSPrimaryConnection(_FindingInTask, redis.asyncio.connection.SSLConnection):
    """The same over TLS."""
