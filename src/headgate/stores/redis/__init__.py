"""The store on a Redis or Valkey server."""

from headgate.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
