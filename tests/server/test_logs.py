"""The server's log, which nobody can fill."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator

import httpx
import pytest

from headgate_server import logs
from headgate_server.logs import MOST_ALIKE, MOST_KINDS, PERIOD, STRANGER, SparingFilter
from tests.integration.waiting import until
from tests.server.loopback import ServerProcess, serving
from tests.server.support import READ_SECONDS
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


def audit_record(stranger: str | None) -> logging.LogRecord:
    found = logging.LogRecord("headgate.audit", logging.WARNING, "access.py", 7, "refused", (), None)
    if stranger is not None:
        setattr(found, STRANGER, stranger)
    return found


def test_strangers_are_limited_separately() -> None:
    sparing = SparingFilter()
    noisy = [sparing.filter(audit_record("192.0.2.1")) for _ in range(3 * MOST_ALIKE)]
    assert sum(noisy) == MOST_ALIKE
    assert sparing.filter(audit_record("192.0.2.2"))
    assert sparing.filter(audit_record(None))


def test_many_strangers_fill_neither_disk_nor_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    sparing = SparingFilter()
    logged = sum(sparing.filter(audit_record(f"2001:db8::{number:x}")) for number in range(10 * MOST_KINDS))
    assert logged == MOST_KINDS + MOST_ALIKE
    now[0] += PERIOD
    assert sparing.filter(audit_record("192.0.2.3"))  # counted by itself again
    assert [sparing.filter(audit_record("192.0.2.4")) for _ in range(MOST_ALIKE)] == [True] * MOST_ALIKE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    token = f'[server.tokens.app]\nsha256 = "{hashlib.sha256(b"known").hexdigest()}"\nmay = ["decide"]\n'
    with serving(tmp_path_factory.mktemp("server"), MEMORY + token) as server:
        yield server


def test_wrong_tokens_do_not_hide_a_refused_token(server: ServerProcess) -> None:
    """A stranger sends many wrong tokens, and then a known one asks for more than it may do."""
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3 * MOST_ALIKE):
            assert client.get("/v1/limiters", headers={"authorization": "Bearer wrong"}).status_code == 401
        for _ in range(2 * MOST_ALIKE):
            reset = client.post(
                "/v1/limiters/login/reset", json={"key": "a"}, headers={"authorization": "Bearer known"}
            )
            assert reset.status_code == 403
    assert server.log.count("this token is not in the policy") == MOST_ALIKE
    assert server.log.count("the token 'app' may not administer") == 2 * MOST_ALIKE


def test_malformed_requests_do_not_fill_the_log(server: ServerProcess) -> None:
    for _ in range(MOST_ALIKE + 20):
        with connect(server) as connection:
            connection.settimeout(READ_SECONDS)
            connection.sendall(b"nonsense\r\n\r\n")
            assert b" 400 " in connection.recv(1000)
    until(lambda: "127.0.0.1 sent an invalid HTTP request" in server.log)
    assert server.log.count("sent an invalid HTTP request") == MOST_ALIKE
