"""The store on a Redis or Valkey server."""

from headgate._extras import needing

with needing("headgate.stores.redis", "redis"):
    from headgate.stores.redis.endpoint import is_refusal
    from headgate.stores.redis.store import RedisStore

__all__ = ["RedisStore", "is_refusal"]
