"""Which node of a cluster has which slot, and calls that follow it when it moves.

A node that does not have a slot says so before it does anything (MOVED, or ASK while the slot is on its way), so these
answers may be followed without charging twice; nothing else is sent again.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from redis.exceptions import AskError, MovedError, RedisError, ResponseError

from headgate._fork import watch
from headgate.errors import StoreUnavailable
from headgate.stores.redis.codec import Reply, ScriptCall, command
from headgate.stores.redis.endpoint import Endpoint
from headgate.stores.redis.flows import slot_of
from headgate.stores.redis.tasks import Abandoned, Pipes
from headgate.stores.redis.threads import Lines

MOST_HOPS = 5
_ASK_FOR_SLOTS = [command(b"CLUSTER", b"SLOTS")]

Address = tuple[str, int]


class SlotMap:
    """Who has which slot, as far as is known; shared by all threads and tasks of a store.

    It is read anew after a node could not be reached: another one may have taken over its slots.
    """

    def __init__(self, first: Endpoint) -> None:
        self._first = first
        self._owners: dict[int, Address] = {}
        self._nodes: list[Address] = []
        self.reading = watch(threading.Lock())
        """Held by the one thread that reads it."""

    @property
    def is_known(self) -> bool:
        """Whether it has been read."""
        return bool(self._owners)

    def endpoint(self, address: Address) -> Endpoint:
        """Return the endpoint of a node."""
        return self._first.at(*address)

    def sources(self) -> list[Endpoint]:
        """Return whom to ask for the slots, one after the other."""
        known = (self.endpoint(address) for address in (*self._nodes, *self._first.others))
        return [*known, self._first]

    def owner(self, slot: int) -> Address:
        """Return who has a slot.

        Raises:
            StoreUnavailable: Nobody has it.
        """
        try:
            return self._owners[slot]
        except KeyError:
            raise StoreUnavailable(f"{self._first.name}: no node of the cluster has slot {slot}") from None

    def read(self, ranges: list[list[Any]]) -> None:
        """Take over the reply to CLUSTER SLOTS."""
        owners: dict[int, Address] = {}
        for start, end, (host, port, *_), *_ in ranges:
            # A node that does not know its own name means the one that was asked.
            address = ((host or b"").decode() or self._first.host, int(port))
            owners.update(dict.fromkeys(range(start, end + 1), address))
        self._owners = owners
        self._nodes = sorted(set(owners.values()))

    def follow(self, error: AskError) -> tuple[Address, bool]:
        """Return where a node sends us, and whether the slot is only on its way there."""
        address = (error.host or self._first.host, error.port)
        if isinstance(error, MovedError):
            self._owners[error.slot_id] = address
            return address, False
        return address, True

    def forget(self) -> None:
        """Read it anew at the next call."""
        self._owners = {}

    def lost(self) -> StoreUnavailable:
        """Return the error of a call that was sent around in circles."""
        return StoreUnavailable(f"{self._first.name}: after {MOST_HOPS} nodes, none has the slot")

    def closed(self) -> StoreUnavailable:
        """Return the error of a call to a store that was closed."""
        return StoreUnavailable(f"{self._first.name}: the store was closed")


class ClusterLines:
    """Calls from threads to a cluster."""

    def __init__(self, slots: SlotMap, deadline: float) -> None:
        self._slots = slots
        self._deadline = deadline
        self._lines: dict[Address, Lines] = {}
        self._closed = False

    def call(self, request: ScriptCall) -> Reply:
        """As `Lines.call`, at the node that has the request's slot."""
        if not self._slots.is_known:
            self._read_slots()
        address, asking = self._slots.owner(slot_of(request)), False
        for _ in range(MOST_HOPS):
            lines = self._at(address)
            try:
                [reply] = lines.exchange((request,), asking=asking)
            except AskError as error:
                address, asking = self._slots.follow(error)
            except RedisError as error:
                self._slots.forget()
                raise lines.endpoint.error(error) from lines.endpoint.presentable(error)
            else:
                if isinstance(reply, ResponseError):
                    raise lines.endpoint.error(reply) from lines.endpoint.presentable(reply)
                return reply
        raise self._slots.lost()

    def close(self) -> None:
        """Close all connections; calls that are under way end first."""
        self._closed = True
        for lines in list(self._lines.values()):
            lines.close()

    def _at(self, address: Address) -> Lines:
        if self._closed:
            raise self._slots.closed()
        lines = self._lines.get(address)
        if lines is None:
            made = Lines(self._slots.endpoint(address), self._deadline)
            lines = self._lines.setdefault(address, made)
        return lines

    def _read_slots(self) -> None:
        with self._slots.reading:
            if self._slots.is_known:
                return  # by whoever had the lock
            for endpoint in self._slots.sources():
                connection = endpoint.connection(self._deadline)
                try:
                    connection.connect()
                    connection.send_packed_command(_ASK_FOR_SLOTS, check_health=False)
                    self._slots.read(connection.read_response(disable_decoding=True))
                    return
                except RedisError as error:
                    failure = endpoint.error(error)
                finally:
                    connection.disconnect()
        raise failure


class ClusterPipes:
    """Calls from tasks to a cluster."""

    def __init__(self, slots: SlotMap, deadline: float) -> None:
        self._slots = slots
        self._deadline = deadline
        self._pipes: dict[Address, Pipes] = {}
        self._reading: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._closed = False

    async def call(self, request: ScriptCall) -> Reply:
        """As `Pipes.call`, at the node that has the request's slot."""
        return await self.call_watched(request, _ignored)

    async def call_watched(self, request: ScriptCall, abandoned: Abandoned) -> Reply:
        """As `Pipes.call_watched`, at the node that has the request's slot."""
        if not self._slots.is_known:
            await self._know_slots()
        address, asking = self._slots.owner(slot_of(request)), False
        for _ in range(MOST_HOPS):
            try:
                return await self._at(address).call_watched(request, abandoned, asking)
            except AskError as error:
                address, asking = self._slots.follow(error)
            except StoreUnavailable:
                self._slots.forget()
                raise
        raise self._slots.lost()

    async def aclose(self) -> None:
        """Close the connections of this event loop, and tell the others to do the same."""
        self._closed = True
        for pipes in list(self._pipes.values()):
            await pipes.aclose()

    def close(self) -> None:
        """As `aclose`, from a thread without an event loop: none is waited for."""
        self._closed = True
        for pipes in list(self._pipes.values()):
            pipes.close()

    def _at(self, address: Address) -> Pipes:
        if self._closed:
            raise self._slots.closed()
        pipes = self._pipes.get(address)
        if pipes is None:
            made = Pipes(self._slots.endpoint(address), self._deadline, slot_of)
            pipes = self._pipes.setdefault(address, made)
        return pipes

    async def _know_slots(self) -> None:
        """Read the slots, once for all tasks of this event loop."""
        loop = asyncio.get_running_loop()
        reading = self._reading.get(loop)
        if reading is None:
            reading = self._reading[loop] = loop.create_task(self._read_slots())
            reading.add_done_callback(self._has_read)
        await asyncio.shield(reading)

    def _has_read(self, reading: asyncio.Task[None]) -> None:
        self._reading.pop(reading.get_loop(), None)
        if not reading.cancelled():
            reading.exception()  # whoever waited has seen it; if nobody did, there is nobody to tell

    async def _read_slots(self) -> None:
        for endpoint in self._slots.sources():
            connection = endpoint.async_connection(self._deadline)
            try:
                async with asyncio.timeout(self._deadline):
                    await connection.connect()
                    await connection.send_packed_command(_ASK_FOR_SLOTS, check_health=False)
                    self._slots.read(await connection.read_response(disable_decoding=True))
                    return
            except (RedisError, TimeoutError) as error:
                failure = endpoint.error(error)
            finally:
                await connection.disconnect(nowait=True)
        raise failure


def _ignored(reply: Reply) -> None:
    """Leave a charged call charged."""
