"""A connection on which a server wakes the waiting calls of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from headgate.stores.redis.endpoint import RedisEndpoint


class RedisSubscription:
    """See `Subscription`. redis-py reads this connection, because few messages arrive.

    Args:
        endpoint: The server; of a cluster any node, because messages reach all nodes.
        process: The process whose messages to receive.
        deadline: Seconds for each step of connecting.

    Raises:
        StoreError: The server is down or refuses.
        ConfigError: The endpoint is a client for coroutines only.
    """

    def __init__(self, endpoint: RedisEndpoint, process: str, deadline: float) -> None:
        self._endpoint = endpoint
        connection: Any = endpoint.connection(deadline)
        self._connection = connection
        try:
            connection.connect()
            connection.send_command("SUBSCRIBE", f"headgate:{process}")
            connection.read_response()
        except (RedisError, OSError) as error:
            self.close()
            raise endpoint.error(error) from endpoint.presentable(error)

    def receive(self, seconds: float) -> Sequence[str]:
        try:
            if not self._connection.can_read(timeout=seconds):
                return ()
            _, _, ticket = self._connection.read_response()
        except (RedisError, OSError) as error:
            raise self._endpoint.error(error) from self._endpoint.presentable(error)
        return (ticket.decode(),)

    def close(self) -> None:
        self._connection.disconnect()
