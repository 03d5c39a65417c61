"""Tests of the thread that receives messages for waiting calls, without a server."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from headgate._concurrency import Event
from headgate.stores.remote import listener
from headgate.stores.remote.listener import WakeListener


class ScriptedSubscription:
    """A connection whose results are given in order; then nothing arrives until the listener is closed."""

    def __init__(self, results: list[Sequence[str] | Exception], ended: threading.Event) -> None:
        self._results = results
        self._ended = ended

    def receive(self, _: float) -> Sequence[str]:
        if not self._results:
            self._ended.wait()
            return ()
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        pass


def test_unexpected_error_costs_a_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "RETRY_AFTER", 0.0)
    ended = threading.Event()
    results: list[Sequence[str] | Exception] = [ValueError("a reply that no parser knows")]
    wake_ups = WakeListener(lambda _: ScriptedSubscription(results, ended))
    event = Event()
    results.append([wake_ups.new_ticket(event)])
    try:
        wake_ups.listen()
        assert event.wait(30)
    finally:
        wake_ups.close()
        ended.set()
