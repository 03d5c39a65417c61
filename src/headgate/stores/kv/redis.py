"""The key-value store in a Redis or Valkey server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib import resources
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from headgate._checks import check_kind, check_text
from headgate._extras import needing
from headgate.errors import ConfigError, StoreMisconfigured, StoreUnavailable
from headgate.stores.base import Guarantees, check_deadline
from headgate.stores.kv.loops import PerLoop

with needing("headgate.stores.kv.redis", "redis"):
    from redis.asyncio import Redis, RedisCluster
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError

    from headgate.stores.redis.endpoint import is_refusal

__all__ = ["RedisKV"]

_SWAP = resources.files("headgate.stores.kv").joinpath("swap.lua").read_text(encoding="utf-8")
_GLOB = str.maketrans({letter: "\\" + letter for letter in "*?[]\\^"})


class RedisKV:
    """Keeps values in a Redis database, as plain strings with a time to live.

    Args:
        client: A client for one event loop; `aclose` closes it. If it retries commands, a swap whose reply was lost counts
            twice. `from_url` creates a client without retries for each loop.
        prefix: Text before every key, for a database that is shared with other applications.
    """

    guarantees = Guarantees(
        shared=True,
        durable=True,
        may_lose="depends on the server's persistence, replication and eviction policy",
    )

    def __init__(self, client: Redis, *, prefix: str = "") -> None:
        check_kind(
            "client", client, Redis | RedisCluster, "a redis.asyncio.Redis (RedisKV.from_url takes a URL)"
        )
        self.prefix = check_text("prefix", prefix, 0)
        self._clients = PerLoop(lambda: client)

    @classmethod
    def from_url(cls, url: str, *, timeout: float = 2.0) -> RedisKV:
        """Return the store of `redis://host:port/database`, `rediss://…` or `unix://path`; `?prefix=` is its prefix.

        Args:
            url: The URL of the server.
            timeout: Seconds to wait for a connection or an answer before `StoreUnavailable` is raised.
        """

        def connect() -> Redis:
            return Redis.from_url(
                urlunsplit(parts._replace(query=urlencode(options))),
                socket_timeout=seconds,
                socket_connect_timeout=seconds,
                retry=Retry(NoBackoff(), 0),
            )

        seconds = check_deadline(timeout)
        try:
            parts = urlsplit(check_text("the URL of a Redis server", url))
            options = dict(parse_qsl(parts.query))
            prefix = options.pop("prefix", "")
            kv = cls(connect(), prefix=prefix)
        except ValueError as error:
            raise ConfigError(f"Redis URL: {error}") from error
        kv._clients = PerLoop(connect)
        return kv

    def __repr__(self) -> str:
        return f"RedisKV(prefix={self.prefix!r})"

    async def get(self, key: str) -> str | None:
        with _translated():
            found = await self._clients.own().get(self._name(key))
        return None if found is None else _text(found)

    async def put(self, key: str, value: str, ttl: int) -> None:
        with _translated():
            await self._clients.own().set(self._name(key), value, ex=ttl)

    async def swap(self, key: str, expected: str | None, value: str, ttl: int) -> bool:
        arguments = ("0", b"") if expected is None else ("1", _bytes(expected))
        script = self._clients.own().register_script(_SWAP)
        with _translated():
            return bool(await script(keys=[self._name(key)], args=[*arguments, value, str(ttl)]))

    async def delete(self, key: str) -> None:
        with _translated():
            await self._clients.own().delete(self._name(key))

    async def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        """Yield the keys with the prefix; keys that change during the scan may be repeated or missing."""
        pattern = _bytes((self.prefix + prefix).translate(_GLOB) + "*")
        with _translated():
            async for key in self._clients.own().scan_iter(match=pattern, count=1000):
                yield _text(key).removeprefix(self.prefix)

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await self._clients.own().aclose()

    def _name(self, key: str) -> bytes:
        return _bytes(self.prefix + key)


@contextmanager
def _translated() -> Iterator[None]:
    """Translate errors of redis-py; they contain no credentials."""
    try:
        yield
    except (RedisError, OSError) as error:
        kind = StoreMisconfigured if is_refusal(error) else StoreUnavailable
        raise kind(f"Redis: {error}") from error


def _text(reply: str | bytes) -> str:
    # Values of other programs may be invalid UTF-8; encoding must restore the same bytes.
    return reply if isinstance(reply, str) else reply.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
