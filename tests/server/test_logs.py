"""The server's log, which nobody can fill."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headgate_server import logs
from headgate_server.logs import MOST_ALIKE, PERIOD, SparingFilter
from tests.server.support import READ_SECONDS, eventually, serving
from tests.server.test_startup import MEMORY, connect


def record(line: int, text: str = "request %d failed", *values: object) -> logging.LogRecord:
    return logging.LogRecord("headgate", logging.WARNING, "engine.py", line, text, values or (1,), None)


def test_records_of_one_kind_are_limited_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    sparing = SparingFilter()
    assert [sparing.filter(record(7)) for _ in range(MOST_ALIKE + 5)] == [True] * MOST_ALIKE + [False] * 5
    assert sparing.filter(record(8))
    now[0] += PERIOD
    late = record(7)
    assert sparing.filter(late)
    assert late.getMessage() == "request 1 failed (5 more like this were not logged)"
    again = record(7)
    assert sparing.filter(again)
    assert again.getMessage() == "request 1 failed"


def test_every_reset_is_logged() -> None:
    """Only callers who may administer cause them; what strangers cause is limited in the same log."""
    sparing = SparingFilter()
    for level, logged in ((logging.INFO, 3 * MOST_ALIKE), (logging.WARNING, MOST_ALIKE)):
        records = [
            logging.LogRecord("headgate.audit", level, "x.py", level, "", (), None)
            for _ in range(3 * MOST_ALIKE)
        ]
        assert sum(map(sparing.filter, records)) == logged


def test_malformed_requests_do_not_fill_the_log(tmp_path: Path) -> None:
    with serving(tmp_path, MEMORY) as server:
        for _ in range(MOST_ALIKE + 20):
            with connect(server) as connection:
                connection.settimeout(READ_SECONDS)
                connection.sendall(b"nonsense\r\n\r\n")
                assert b" 400 " in connection.recv(1000)
        eventually(lambda: "127.0.0.1 has sent what is no HTTP request" in server.log, "a line in the log")
        assert len(server.log.splitlines()) == MOST_ALIKE
