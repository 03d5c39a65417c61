"""An asynchronous store as a synchronous one: each call is awaited on a private event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

from headgate.costs import Costs
from headgate.keys import Key
from headgate.rules import Rule
from headgate.stores.base import Answer, AsyncGate, AsyncStore, Gate, Guarantees, Receipts
from headgate.stores.request import Request

T = TypeVar("T")


class BlockingStore:
    """Calls an asynchronous store, one call after the other, from one thread.

    Attributes:
        store: The asynchronous store.
    """

    def __init__(self, store: AsyncStore) -> None:
        self.store = store
        self.clock, self.remote, self.has_rules = store.clock, store.remote, store.has_rules
        self._runner = asyncio.Runner()
        self._process = os.getpid()

    @property
    def guarantees(self) -> Guarantees:
        return self.store.guarantees

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        return _BlockingGate(self, self.store.bind_async(limiter, rules, deadline=deadline))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end on the loop."""
        if self._process != os.getpid():  # forked: the parent's loop must be neither run nor closed here
            self._process, self._runner = os.getpid(), asyncio.Runner()
        # Not `Runner.run`, which replaces the handler of SIGINT for each of these short calls.
        return self._runner.get_loop().run_until_complete(work)

    def change_loop(self) -> None:
        """Close the event loop and continue with a new one."""
        self._runner.close()
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Close the store and the loop."""
        self.run(self.store.aclose())
        self._runner.close()


class _BlockingGate:
    def __init__(self, store: BlockingStore, gate: AsyncGate) -> None:
        self._run = store.run
        self._gate = gate

    def decide(self, request: Request) -> Answer:
        return self._run(self._gate.decide(request))

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        self._run(self._gate.refund(receipts, cost, now))

    def reset(self, key: Key | None) -> None:
        self._run(self._gate.reset(key))
