"""Who answers instead of a server that has never answered."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headgate.stores.postgres.endpoint import PostgresEndpoint
from headgate.stores.redis.endpoint import RedisEndpoint
from headgate.stores.remote import strangers
from headgate.stores.remote.strangers import (
    PLAIN_POSTGRES,
    POSTGRES,
    REDIS,
    REDIS_TLS,
    TLS,
    WEB,
    Doubt,
    stranger_at,
)

PATIENCE = 60.0
"""Seconds; no test waits so long unless it fails."""

Answer = Callable[[bytes], bytes]


class Listener:
    """Answers the first bytes of each connection, and hangs up.

    Attributes:
        questions: What it was sent.
        answer: What it says to that.
    """

    def __init__(self) -> None:
        self.questions: list[bytes] = []
        self.answer: Answer = lambda _: b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it has been closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.questions.append(connection.recv(65536))
                connection.sendall(self.answer(self.questions[-1]))


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def at(listener: Listener, *own: str) -> str | None:
    return stranger_at(listener.address, own, time.monotonic() + PATIENCE)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"+PONG\r\n", REDIS),
        (b"-NOAUTH Authentication required.\r\n", REDIS),
        (b"-LOADING Redis is loading the dataset in memory\r\n", REDIS),
        (b"HTTP/1.1 400 Bad Request\r\n", WEB),
        (b"<!DOCTYPE HTML>", WEB),
        (b"S", POSTGRES),
        (b"N", PLAIN_POSTGRES),
        (b"E\0\0\0\x20SFATAL\0", POSTGRES),
        (b"\x15\x03\x01\0\2\2\x28", TLS),
        (b"\x16\x03\x03\0\x7a", TLS),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "an SSH server"),
        (b"220-mail.example.org\r\n", "a mail server"),
        (b"ERROR\r\n", "something that says b'ERROR\\r\\n'"),
    ],
)
def test_a_server_is_known_by_what_it_says(listener: Listener, said: bytes, kind: str) -> None:
    listener.answer = lambda _: said
    assert at(listener, "another kind") == kind
    assert at(listener, kind) is None


class ByteByByte(socket.socket):
    """A connection that is so slow that each byte comes alone."""

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        return super().recv(min(bufsize, 1), flags)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"+PONG\r\n", REDIS),
        (b"-MASTERDOWN Link with MASTER is down", REDIS),
        (b"HTTP/1.1 400 Bad Request\r\n", WEB),
        (b"N", PLAIN_POSTGRES),
        (b"\x16\x03\x03\0\x7a", TLS),
        (b"J\0\0\0\n8.0.36", "something that says b'J\\x00\\x00\\x00\\n'"),
        (b"AMQP\0\0\x09\x01", "something that says b'AMQP\\x00\\x00\\t\\x01'"),
    ],
)
def test_a_server_is_not_judged_by_the_first_bytes_of_a_slow_answer(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, said: bytes, kind: str
) -> None:
    connect = socket.create_connection

    def connect_slowly(*args: Any, **options: Any) -> ByteByByte:
        connection = ByteByByte(fileno=connect(*args, **options).detach())
        connection.settimeout(PATIENCE)
        return connection

    monkeypatch.setattr(socket, "create_connection", connect_slowly)
    listener.answer = lambda _: said
    assert at(listener, "another kind") == kind
    assert at(listener, kind) is None


def test_the_right_server_is_asked_nothing_else(listener: Listener) -> None:
    listener.answer = lambda question: b"S" if question.startswith(b"\0\0\0\x08") else b""
    assert at(listener, POSTGRES) is None
    assert len(listener.questions) == 1


def test_a_server_that_hangs_up_is_asked_in_every_language(listener: Listener) -> None:
    assert at(listener, REDIS) is None
    assert [question[:2] for question in listener.questions] == [b"PI", b"\0\0", b"\x16\x03"]


def test_where_no_server_is_no_other_kind_is(listener: Listener) -> None:
    listener.close()
    assert at(listener, REDIS) is None
    assert stranger_at(("a." + "b" * 64, 1), (REDIS,), time.monotonic() + PATIENCE) is None


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("postgresql://db.example.org/x", ("db.example.org", 5432)),
        ("postgresql://db.example.org:5433/x", ("db.example.org", 5433)),
        ("host=db.example.org hostaddr=192.0.2.1 port=5434", ("192.0.2.1", 5434)),
        ("postgresql:///x?host=/var/run/postgresql", None),
        ("postgresql://one.example.org,two.example.org/x", None),
        ("service=limits host=db.example.org", None),
    ],
)
def test_a_database_is_asked_where_libpq_would_connect(
    url: str, address: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGHOST", "PGPORT", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    doubt = PostgresEndpoint(url).doubt()
    assert (None if doubt.is_settled else doubt.address) == address


def test_a_port_of_the_environment_that_is_none_is_left_to_libpq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "none")
    assert PostgresEndpoint("postgresql://db.example.org/x").doubt().is_settled


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("redis://example.org", (REDIS,)),
        ("rediss://example.org", (TLS, REDIS_TLS)),
        ("unix:///run/redis", ()),
    ],
)
def test_redis_is_asked_as_its_url_says(url: str, own: tuple[str, ...]) -> None:
    doubt = RedisEndpoint.of_url(url).doubt()
    assert (doubt.is_settled, doubt.own) == (not own, own)
    assert doubt.is_settled or doubt.address == ("example.org", 6379)


def fail() -> None:
    raise ConnectionResetError


async def fail_async() -> None:
    raise ConnectionResetError


async def test_a_failure_is_explained_when_it_is_raised(listener: Listener) -> None:
    listener.answer = lambda _: b"+PONG\r\n"
    doubts = [Doubt(listener.address, POSTGRES) for _ in range(2)]
    with pytest.raises(ConnectionResetError):
        doubts[0].settle(fail, PATIENCE)
    with pytest.raises(ConnectionResetError):
        await doubts[1].settle_async(fail_async(), PATIENCE)
    for doubt in doubts:
        assert "db: a Redis server without TLS answers there" in str(doubt.explain("db"))


async def test_an_attempt_that_hangs_is_explained_before_it_ends(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener.answer = lambda _: b"+PONG\r\n"
    monkeypatch.setattr(strangers, "PATIENT_SHARE", 0.0)
    doubt, other = (Doubt(listener.address, POSTGRES) for _ in range(2))

    def hang() -> None:
        while doubt.explain("db") is None:
            time.sleep(0.001)
        raise TimeoutError

    async def hang_async() -> None:
        while other.explain("db") is None:  # noqa: ASYNC110  # it is found out in a thread
            await asyncio.sleep(0.001)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        doubt.settle(hang, PATIENCE)
    with pytest.raises(TimeoutError):
        await other.settle_async(hang_async(), PATIENCE)


async def test_a_server_that_has_worked_is_not_doubted(listener: Listener) -> None:
    listener.answer = lambda _: b"+PONG\r\n"
    doubt, other = (Doubt(listener.address, POSTGRES) for _ in range(2))
    assert doubt.settle(lambda: "connected", PATIENCE) == "connected"
    assert await other.settle_async(asyncio.sleep(0, "connected"), PATIENCE) == "connected"
    for each in (doubt, other):
        with pytest.raises(ConnectionResetError):
            each.settle(fail, PATIENCE)
        assert each.explain("db") is None
    assert listener.questions == []


def test_the_right_server_that_takes_the_place_of_another_is_not_doubted(listener: Listener) -> None:
    listener.answer = lambda _: b"+PONG\r\n"
    doubt = Doubt(listener.address, POSTGRES)
    with pytest.raises(ConnectionResetError):
        doubt.settle(fail, PATIENCE)
    doubt.settle(lambda: None, PATIENCE)
    assert doubt.explain("db") is None


def test_without_a_thread_to_ask_with_the_failure_is_raised(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_new_thread(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(strangers, "start_new_thread", start_new_thread)
    doubt = Doubt(listener.address, POSTGRES)
    with pytest.raises(ConnectionResetError):
        doubt.settle(fail, PATIENCE)
    assert doubt.explain("db") is None
