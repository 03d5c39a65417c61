"""A server that keeps its files, as the embedded database of a program."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from headgate.testing import postgres_server
from headgate.testing.postgres_server import NEWEST, PostgresServer
from headgate.testing.servers import ServerError


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Provide a folder that the user who runs the server can reach: for root that is another one.

    The tests share it, because creating a cluster takes a second.
    """
    folder = Path(tempfile.mkdtemp(prefix="headgate-kept-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_failed_start_signals_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no process id yet: 0 is the group of this process, and the parent of all others."""
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(postgres_server, "_signal", lambda *signal: signals.append(signal))
    server = PostgresServer(settings={"max_connections": "many"})
    with pytest.raises(ServerError, match="does not start"), server:
        pass
    assert signals == []


def test_data_survives_a_restart(folder: Path) -> None:
    with PostgresServer(folder=folder) as server, psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE kept ()")
    assert not (folder / "data" / "postmaster.pid").exists()  # it was shut down in good order
    with PostgresServer(folder=folder) as server, psycopg.connect(server.url) as connection:
        connection.execute("SELECT FROM kept")


def test_second_server_with_the_same_folder_reuses_the_first(folder: Path) -> None:
    with PostgresServer(folder=folder) as first:
        with PostgresServer(folder=folder) as second:
            psycopg.connect(second.url).close()
        psycopg.connect(first.url).close()


def test_server_starts_again_after_a_kill(folder: Path) -> None:
    server = PostgresServer(folder=folder).start()
    pids = (folder / "data" / "postmaster.pid").read_text()
    server.stop()
    (folder / "data" / "postmaster.pid").write_text(pids)
    with PostgresServer(folder=folder) as again:
        psycopg.connect(again.url).close()


def test_server_does_not_listen_on_a_port(folder: Path) -> None:
    with PostgresServer(folder=folder) as server, psycopg.connect(server.url) as connection:
        row = connection.execute("SHOW listen_addresses").fetchone()
    assert row == ("",)


def test_a_path_that_is_too_long_for_a_socket_is_refused(folder: Path) -> None:
    with pytest.raises(ServerError, match="at most 80 characters"):
        PostgresServer(folder=folder / ("x" * 80)).start()


def test_a_cluster_that_cannot_be_copied_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_server, "_templates", {NEWEST: Path("/no-such-template")})
    with pytest.raises(ServerError, match=r"cp failed: .*no-such-template"), PostgresServer():
        pass
