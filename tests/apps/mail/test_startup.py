"""Start-up of the service."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from headgate_services.common.settings import SettingsError
from headgate_services.mail import Settings, create_app
from tests.apps.conftest import Command
from tests.apps.processes import environment, launch_program, service_process

PER_MINUTE = "GLOBAL_SEND_RATE_LIMIT_PER_MINUTE"
PER_HOUR = "GLOBAL_SEND_RATE_LIMIT_PER_HOUR"


async def refusal(folder: Path, **variables: str) -> str:
    """Return the output of a service that cannot start. Its port is taken, so opening it would be another error."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ("run", "mail", "--host", "127.0.0.1", "--port", str(port))
        process = await launch_program(*arguments, folder=folder, environment=environment(**variables))
        _, error = await process.communicate()
    assert process.returncode not in (0, None)
    text = error.decode()
    assert "Traceback" not in text
    assert "address already in use" not in text
    assert "Uvicorn" not in text
    return text


@pytest.mark.requirement("N-08")
async def test_n08_a_negative_limit_stops_start_up(tmp_path: Path) -> None:
    text = await refusal(tmp_path, **{PER_MINUTE: "-1", PER_HOUR: "-1"})
    assert [line.partition(": ")[0] for line in text.splitlines()] == [PER_MINUTE, PER_HOUR]


@pytest.mark.requirement("N-10")
@pytest.mark.parametrize("variable", [PER_MINUTE, PER_HOUR])
@pytest.mark.parametrize("value", ["abc", "1.5"])
def test_n10_a_limit_that_is_no_whole_number_stops_start_up(
    command: Command, variable: str, value: str
) -> None:
    code, output = command("run", "mail", **{variable: value})
    assert (code, output.startswith(f"{variable}: ")) == (2, True)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({PER_MINUTE: "1", "RATE_LIMIT_STORE": "carrier://pigeon"}, "RATE_LIMIT_STORE: "),
        ({PER_MINUTE: "1", "RATE_LIMIT_STORE": "sqlite:///no/folder/x.db"}, "RATE_LIMIT_STORE: "),
        ({"DATABASE_URL": "sqlite:///no/folder/x.db"}, "DATABASE_URL: "),
        ({"DATABASE_URL": "sqlite:///text.txt"}, "DATABASE_URL: file is not a database"),
        ({"DATABASE_URL": "postgresql://u:hush@127.0.0.1:1/x"}, "DATABASE_URL: "),
        ({"EMAIL_PROVIDER": "smtp", "SMTP_HOST": "localhost", "SMTP_CA_FILE": "none.pem"}, "SMTP_CA_FILE: "),
    ],
    ids=["store", "store-folder", "database-folder", "no-database", "database-server", "certificate"],
)
def test_what_cannot_be_opened_stops_start_up(
    command: Command, variables: dict[str, str], named: str
) -> None:
    Path("text.txt").write_text("This is not a database. " * 60)
    code, output = command("run", "mail", **variables)
    assert (code, output.startswith(named), "hush" in output) == (2, True, False)


def test_a_database_of_a_newer_version_stops_start_up(command: Command, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "mail.db")) as connection:
        connection.execute("CREATE TABLE headgate_mail_migrations (number INTEGER, name TEXT)")
        connection.execute("INSERT INTO headgate_mail_migrations VALUES (9999, 'future')")
        connection.commit()
    code, output = command("run", "mail", DATABASE_URL="sqlite:///mail.db")
    assert (code, "newer version" in output) == (2, True)


@pytest.mark.requirement("N-24")
def test_nx12_a_bad_store_is_found_at_start_up_not_on_the_first_request() -> None:
    with pytest.raises(SettingsError, match="RATE_LIMIT_STORE"):
        create_app(Settings(global_send_rate_limit_per_minute=1, rate_limit_store="carrier://pigeon"))


@pytest.mark.requirement("N-02", "N-45")
async def test_the_service_as_its_users_run_it_before_and_after_a_restart(tmp_path: Path) -> None:
    """NL-2: the count is in a file. LOG_LEVEL applies (surroundings 1.6, 12), and SIGTERM gives the exit code 0."""
    variables = {PER_MINUTE: "", PER_HOUR: 2, "RATE_LIMIT_STORE": "sqlite:///limits.db"}
    runs = []
    for level in ("info", "debug"):
        async with (
            service_process("mail", tmp_path, LOG_LEVEL=level, **variables) as service,
            httpx.AsyncClient(base_url=service.url) as client,
        ):
            assert (await client.get("/health")).json() == {"status": "ok"}
            [inbox] = (await client.get("/v1/inboxes")).json()["items"]
            assert inbox["email_address"] == "demo@demo.nornweave.local"
            mail = {"inbox_id": inbox["id"], "to": ["a@example.com"], "subject": "Hi", "body": ""}
            answers = [await client.post("/v1/messages", json=mail) for _ in range(3)]
            assert 3000 < int(answers[-1].headers["retry-after"]) <= 3605  # in buckets of five seconds
            assert (await client.get("/v1/demo/outbox")).json()["total"] == 2
        log = "".join(service.log)
        assert service.process.returncode == 0
        assert "Application shutdown complete" in log
        assert "Traceback" not in log
        runs.append((service.log, [answer.status_code for answer in answers]))
    (quiet_log, before), (chatty_log, after) = runs
    assert (before, after) == ([201, 201, 429], [429, 429, 429])
    assert sum(" WARNING " in line for line in quiet_log) == 1
    assert not any(" DEBUG " in line for line in quiet_log)
    debug = [line for line in chatty_log if " DEBUG " in line]
    assert debug
    assert [line for line in debug if " DEBUG headgate" not in line] == []


@pytest.mark.requirement("N-17")
def test_n17_no_client_of_a_server_is_even_loaded(tmp_path: Path) -> None:
    program = (
        "import sys; from headgate_services.mail import Settings, create_app; "
        "create_app(Settings(global_send_rate_limit_per_minute=5)); "
        "print(sorted({'redis', 'psycopg', 'asyncpg'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "[]\n"
