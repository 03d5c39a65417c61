"""A fake cluster that answers calls of the script, for tests of operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from redis.crc import key_slot

from headgate.clock import WallClock
from headgate.errors import StoreUnavailable
from headgate.stores.redis.codec import Reply, ScriptCall
from tests.simulation.redis import run_script
from tests.simulation.servers import Server


class FakeServer(Server):
    """All nodes of the cluster; fails for `broken_slots`."""

    def __init__(self) -> None:
        self.now = WallClock().now_us()  # calendar windows are sent around the local time
        network: Any = SimpleNamespace(now_us=lambda: self.now)
        super().__init__(network)
        self.requests: list[ScriptCall] = []
        self.broken_slots: set[int] = set()

    def call(self, request: ScriptCall) -> Reply:
        slot, *others = {key_slot(key) for key in request.keys}
        assert not others, "a call must not reach for several slots"
        self.requests.append(request)
        if slot in self.broken_slots:
            raise StoreUnavailable(f"slot {slot} is gone")
        return run_script(self, list(request.keys), request.body)
