"""Tests of the thread that receives messages for waiting calls, without a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from headgate._concurrency import Event
from headgate.stores.remote import listener
from headgate.stores.remote.listener import WakeListener

Result = Sequence[str] | Exception | Callable[[], Sequence[str]]


class ScriptedSubscription:
    """A connection whose results are given in order; then nothing arrives until the listener is closed."""

    def __init__(self, results: list[Result], ended: threading.Event) -> None:
        self._results = results
        self._ended = ended

    def receive(self, _: float) -> Sequence[str]:
        if not self._results:
            self._ended.wait()
            return ()
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result() if callable(result) else result

    def close(self) -> None:
        pass


def test_unexpected_error_costs_a_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "RETRY_AFTER", 0.0)
    ended = threading.Event()
    results: list[Result] = [ValueError("a reply that no parser knows")]
    wake_ups = WakeListener(lambda _: ScriptedSubscription(results, ended))
    event = Event()
    results.append([wake_ups.new_ticket(event)])
    try:
        wake_ups.listen()
        assert event.wait(30)
    finally:
        wake_ups.close()
        ended.set()


def test_a_missed_message_costs_a_connection_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "RETRY_AFTER", 0.0)
    ended = threading.Event()
    results: list[Result] = []
    connections = []

    def subscribe(_: str) -> ScriptedSubscription:
        connections.append(ScriptedSubscription(results, ended))
        return connections[-1]

    def miss(received: Sequence[str]) -> Sequence[str]:
        wake_ups.works = False
        return received

    wake_ups = WakeListener(subscribe)
    first, second, third = Event(), Event(), Event()
    tickets = [wake_ups.new_ticket(event) for event in (first, second, third)]
    results += [lambda: miss(()), tickets[:1], lambda: miss(tickets[1:2]), (), lambda: miss(()), tickets[2:]]
    try:
        wake_ups.listen()
        assert first.wait(30)
        assert second.wait(30)
        assert third.wait(30)
        assert len(connections) == 2
    finally:
        wake_ups.close()
        ended.set()
