"""Connections to the primary that Sentinels name.

A connection asks one Sentinel after the other for the address of the primary, and then connects to it. If a primary fails
or is demoted, its connections end, and new ones find its successor. Connections share only the order of the Sentinels, so
they are safe with threads, event loops and forks.
"""

from __future__ import annotations

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

    def ask(self, timeout: float) -> Address:
        """Return the address of the primary; `timeout` is for all Sentinels together.

        Raises:
            RedisError: No Sentinel answered with an address.
        """
        kind = redis.connection.SSLConnection if self._is_tls else redis.connection.Connection
        failures: list[str] = []
        for address in self._addresses:
            connection: Any = kind(**self._arguments(address, timeout))
            try:
                connection.connect()
                connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
                return self._found(address, connection.read_response())
            except (RedisError, OSError) as error:
                failures.append(f"{address[0]}:{address[1]}: {error}")
            finally:
                connection.disconnect()
        raise self._failure(failures)

    async def ask_async(self, timeout: float) -> Address:
        """Like `ask`, for coroutines."""
        kind = redis.asyncio.connection.SSLConnection if self._is_tls else redis.asyncio.connection.Connection
        failures: list[str] = []
        for address in self._addresses:
            connection: Any = kind(**self._arguments(address, timeout))
            try:
                await connection.connect()
                await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
                return self._found(address, await connection.read_response())
            except (RedisError, OSError) as error:
                failures.append(f"{address[0]}:{address[1]}: {error}")
            finally:
                await connection.disconnect(nowait=True)
        raise self._failure(failures)

    def _arguments(self, address: Address, timeout: float) -> dict[str, Any]:
        # A Sentinel that hangs must leave time for the others.
        share = timeout / len(self._addresses)
        place = {"host": address[0], "port": address[1], "protocol": 2}
        return {**self._settings, **place, "socket_timeout": share, "socket_connect_timeout": share}

    def _found(self, sentinel: Address, reply: Any) -> Address:
        if reply is None:
            raise RedisError(f"it knows no primary named {self.service!r}")
        # The next connection asks the Sentinel first that answered last.
        others = tuple(address for address in self._addresses if address != sentinel)
        self._addresses = (sentinel, *others)
        host, port = reply
        return host.decode() if isinstance(host, bytes) else str(host), int(port)

    def _failure(self, failures: list[str]) -> RedisError:
        return redis.ConnectionError(f"no Sentinel named the primary: {'; '.join(failures)}")


class _Finding:
    """A connection that asks for its host when it connects."""

    host: str
    port: int

    def __init__(self, *, sentinels: Sentinels, socket_connect_timeout: float, **settings: Any) -> None:
        # The class of redis-py that this is mixed into.
        super().__init__(socket_connect_timeout=socket_connect_timeout, **settings)  # type: ignore[call-arg]
        self._sentinels = sentinels
        self._patience = socket_connect_timeout


class _FindingInThread(_Finding):
    def connect(self) -> None:
        self.host, self.port = self._sentinels.ask(self._patience)
        super().connect()  # type: ignore[misc]


class _FindingInTask(_Finding):
    async def connect(self) -> None:
        self.host, self.port = await self._sentinels.ask_async(self._patience)
        await super().connect()  # type: ignore[misc]


class PrimaryConnection(_FindingInThread, redis.connection.Connection):
    """A connection to the primary, for threads."""


class TLSPrimaryConnection(_FindingInThread, redis.connection.SSLConnection):
    """The same over TLS."""


class AsyncPrimaryConnection(_FindingInTask, redis.asyncio.connection.Connection):
    """A connection to the primary, for coroutines."""


class AsyncTLSPrimaryConnection(_FindingInTask, redis.asyncio.connection.SSLConnection):
    """The same over TLS."""
