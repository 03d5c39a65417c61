"""Calls from threads: each has a connection to itself while it lasts."""

from __future__ import annotations

from collections.abc import Sequence

from redis.exceptions import NoScriptError, RedisError, ResponseError

from headgate._fork import watch
from headgate.errors import StoreUnavailable
from headgate.stores.redis.codec import ASKING, Reply, ScriptCall, call_by_name, call_by_text
from headgate.stores.redis.endpoint import Connection, Endpoint, is_read_only


class Lines:
    """The connections of this process to one server.

    There are as many as there were calls at once. One that broke is not put back, and neither is one whose reply was not
    read: what comes next on it would be taken for the reply to another call.
    """

    def __init__(self, endpoint: Endpoint, deadline: float) -> None:
        self.endpoint = endpoint
        self._deadline = deadline
        self._idle: list[Connection] = []
        self._closed = False
        watch(self)

    def call(self, request: ScriptCall) -> Reply:
        """Send a request, once, and return the reply.

        Raises:
            StoreUnavailable: The server could not be reached, did not answer in time, or refused.
            StoreConflict: Something else is stored under a key of ours.
        """
        try:
            reply = self.exchange((request,))[0]
        except RedisError as cause:
            raise self.endpoint.error(cause) from self.endpoint.presentable(cause)
        if isinstance(reply, ResponseError):
            raise self.endpoint.error(reply) from self.endpoint.presentable(reply)
        return reply

    def exchange(self, requests: Sequence[ScriptCall], *, asking: bool = False) -> list[Reply]:
        """Send requests in one call, once, and return the reply or the error of each.

        Raises:
            RedisError: There is no reply.
        """
        connection = self._take()
        usable = False
        try:
            try:
                replies = _round_trip(connection, call_by_name(requests), asking)
            except NoScriptError:  # a new server, or one that was told to forget: nothing was done yet
                replies = _round_trip(connection, call_by_text(requests), asking)
            usable = not any(
                map(is_read_only, replies)
            )  # no longer the primary: the next call looks for it anew
        except ResponseError:
            usable = True
            raise
        finally:
            self._give_back(connection, usable)
        return replies

    def close(self) -> None:
        """Close all connections; calls that are under way end first."""
        self._closed = True
        while self._idle:
            self._idle.pop().disconnect()

    def _take(self) -> Connection:
        if self._closed:
            raise StoreUnavailable(f"{self.endpoint.name}: the store was closed")
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.endpoint.connection(self._deadline)
        else:
            # A server that was restarted has closed it. To notice that before anything is sent is not to send twice.
            if not _is_over(connection):
                return connection
            connection.disconnect()
        connection.connect()
        return connection

    def _give_back(self, connection: Connection, usable: bool) -> None:
        if usable and not self._closed:
            self._idle.append(connection)
        else:
            connection.disconnect()

    def after_fork_in_child(self) -> None:
        self._idle = []  # they are the parent's; forgetting them closes no more than our copies


def _round_trip(connection: Connection, command: list[bytes], asking: bool) -> list[Reply]:
    connection.send_packed_command(ASKING + command if asking else command, check_health=False)
    if asking:
        connection.read_response(disable_decoding=True)
    replies: list[Reply] = connection.read_response(disable_decoding=True)
    return replies


def _is_over(connection: Connection) -> bool:
    """Tell whether a connection that nobody waits on has something to say, which can only be that it is over."""
    try:
        return connection.can_read(timeout=0)
    except RedisError:
        return True
