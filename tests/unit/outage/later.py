"""Probes that a test runs explicitly, instead of a timer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate.outage import AsyncCircuit, Circuit


class Later:
    """A queue of background calls, which the test runs explicitly."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self._due: list[tuple[Callable[..., Any], tuple[object, ...]]] = []

    @classmethod
    def instead_of_timers(cls, monkeypatch: pytest.MonkeyPatch) -> Later:
        """Replace the timers of threads and tasks."""
        later = cls()
        monkeypatch.setattr(Circuit, "_call_later", later)
        monkeypatch.setattr(AsyncCircuit, "_call_later", later)
        return later

    def __call__(self, seconds: float, method: Callable[..., Any], *args: object) -> bool:
        self.pauses.append(seconds)
        self._due.append((method, args))
        return True

    @property
    def is_idle(self) -> bool:
        return not self._due

    def probe(self) -> None:
        """Run the queued probes."""
        due, self._due = self._due, []
        assert due, "nobody probes"
        for method, args in due:
            method(*args)

    async def aprobe(self) -> None:
        """Run the queued probes of tasks."""
        due, self._due = self._due, []
        assert due, "nobody probes"
        for method, args in due:
            await method(*args)
