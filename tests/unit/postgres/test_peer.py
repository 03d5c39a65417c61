"""Tests of connections closed by the database, without a database."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from psycopg import NotSupportedError, OperationalError, capabilities
from psycopg.pq import DiagnosticField, ExecStatus

from headgate.errors import ConfigError
from headgate.stores.postgres import PostgresStore, peer
from headgate.stores.postgres.peer import ONE, AsyncPostgresWire, PostgresWire, Terminated
from headgate.stores.remote.peer import PENDING


class FakeResult:
    def __init__(self, status: ExecStatus, sqlstate: bytes | None = None, message: str = "") -> None:
        self.status = status
        self._sqlstate = sqlstate
        self._message = message

    def error_field(self, field: DiagnosticField) -> bytes | None:
        return self._sqlstate if field == DiagnosticField.SQLSTATE else None

    def get_error_message(self) -> str:
        return self._message


class EndingConnection:
    """A connection that returns some results and is then closed."""

    def __init__(self, socket: int, results: list[FakeResult]) -> None:
        self.socket = socket
        self.nonblocking = 0
        self._results = results
        self._is_closed = False

    def enter_pipeline_mode(self) -> None:
        pass

    def consume_input(self) -> None:
        if self._is_closed:
            raise OperationalError("server closed the connection unexpectedly")
        self._is_closed = True

    def is_busy(self) -> bool:
        return not self._results

    def get_result(self) -> Any:
        return self._results.pop(0)


def test_the_error_for_an_old_library_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_pipeline(check: bool = False) -> bool:
        raise NotSupportedError("the client libpq version (imported from system libraries) is 13.9")

    monkeypatch.setattr(capabilities, "has_pipeline", has_pipeline)
    with pytest.raises(ConfigError, match=r"needs libpq 14 or later: .* 13\.9"):
        PostgresStore("postgresql://localhost/x")


ENDED = FakeResult(ExecStatus.FATAL_ERROR, b"57P01")
COUNTED = FakeResult(ExecStatus.TUPLES_OK)


@pytest.fixture
def a_file() -> Iterator[int]:
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("results", "is_undone"),
    [([ENDED], True), ([COUNTED, ENDED], False), ([COUNTED], False), ([], False)],
    ids=["ended", "ended after its result", "result only", "nothing"],
)
def test_only_termination_before_any_result_means_nothing_was_executed(
    a_file: int, results: list[FakeResult], is_undone: bool
) -> None:
    wire = PostgresWire(EndingConnection(a_file, list(results)), prepare=False)
    assert wire.receive() is PENDING
    with pytest.raises(OperationalError) as raised:
        wire.receive()
    assert isinstance(raised.value, Terminated) is is_undone


def test_the_last_error_of_a_closing_server_is_quoted(a_file: int) -> None:
    """For example a pooler that can no longer log in to its database."""
    ended = FakeResult(ExecStatus.FATAL_ERROR, b"08P01", "server login failed: wrong password type")
    wire = PostgresWire(EndingConnection(a_file, [ended]), prepare=False)
    assert wire.receive() is PENDING
    with pytest.raises(OperationalError, match="wrong password type"):
        wire.receive()


ALL = FakeResult(ExecStatus.PIPELINE_SYNC)
DONE = FakeResult(ExecStatus.COMMAND_OK)


def test_replies_before_the_disconnect_are_read(a_file: int) -> None:
    """For example if two replies and the disconnect arrive together."""
    wire = PostgresWire(EndingConnection(a_file, [DONE, ALL, DONE, ALL, ENDED]), prepare=False)
    assert [wire.receive() for _ in range(3)] == [None, None, PENDING]
    with pytest.raises(Terminated):
        wire.receive()


async def test_no_writer_remains_after_everything_was_sent(
    a_file: int,
) -> None:
    wire = Mock(fileno=a_file, is_unsent=False)
    asynchronous = AsyncPostgresWire(wire, Mock())
    for is_unsent in (True, False):
        wire.send = lambda message, left=is_unsent: setattr(wire, "is_unsent", left)
        asynchronous.send((ONE, []))
    loop = asyncio.get_running_loop()
    assert not loop.remove_writer(a_file), "the event loop would call the writer without end"
    asynchronous.close()


def test_a_connecting_step_has_a_minimum_time_if_the_process_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = []

    class LatePoller:
        def __init__(self, fileno: int) -> None:
            pass

        def wait(self, seconds: float, *, for_writing: bool) -> bool:
            waits.append(seconds)
            return True

    monkeypatch.setattr(peer, "Poller", LatePoller)
    peer._wait_until(0, 0.0, for_writing=False)
    assert waits[0] > 0
