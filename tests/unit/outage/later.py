"""Probes that run when a test says so, and not when their time has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate.outage import AsyncCircuit, Circuit


class Later:
    """What is to be done in the background some time later, and now when a test says so."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self._due: list[tuple[Callable[..., Any], tuple[object, ...]]] = []

    @classmethod
    def instead_of_timers(cls, monkeypatch: pytest.MonkeyPatch) -> Later:
        """Let all probes wait for the test, whether threads or tasks would make them."""
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
        """Let the probes run that are due."""
        due, self._due = self._due, []
        assert due, "nobody probes"
        for method, args in due:
            method(*args)

    async def aprobe(self) -> None:
        """The same for those of tasks."""
        due, self._due = self._due, []
        assert due, "nobody probes"
        for method, args in due:
            await method(*args)
