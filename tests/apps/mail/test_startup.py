"""Starting the service as a user would, in a process of its own."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from headgate.testing.servers import RedisServer
from headgate_services.common.settings import SettingsError
from headgate_services.mail import Settings, create_app, main
from tests.apps.mail.support import environment, launch, service_process

PER_MINUTE = "GLOBAL_SEND_RATE_LIMIT_PER_MINUTE"
PER_HOUR = "GLOBAL_SEND_RATE_LIMIT_PER_HOUR"


async def refusal(folder: Path, **variables: str) -> str:
    """Return what a service that cannot start says.

    Its port is taken: had it come as far as opening it, it would complain of that.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await launch(folder, "--host", "127.0.0.1", "--port", str(port), **variables)
        _, error = await process.communicate()
    assert process.returncode not in (0, None)
    text = error.decode()
    assert "Traceback" not in text
    assert "address already in use" not in text
    assert "Uvicorn" not in text
    return text


@pytest.mark.requirement("N-08")
async def test_n08_a_negative_limit_stops_start_up(tmp_path: Path) -> None:
    said = await asyncio.gather(
        *(refusal(tmp_path, **{variable: "-1"}) for variable in (PER_MINUTE, PER_HOUR))
    )
    for variable, text in zip((PER_MINUTE, PER_HOUR), said, strict=True):
        assert text.startswith(f"{variable}: ")
        assert len(text.splitlines()) == 1


@pytest.fixture
def main_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """Return a function that starts a service which must not come as far as the server, and returns what it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "headgate_services.common.starting.serve",
        lambda *args, **options: pytest.fail("the server was started"),
    )
    monkeypatch.setattr("logging.basicConfig", lambda **options: None)

    def start(**variables: str) -> str:
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        assert main("127.0.0.1", 0) == 2
        return capsys.readouterr().err

    return start


@pytest.mark.requirement("N-10")
@pytest.mark.parametrize("variable", [PER_MINUTE, PER_HOUR])
@pytest.mark.parametrize("value", ["abc", "1.5"])
def test_n10_a_limit_that_is_no_whole_number_stops_start_up(
    main_says: Callable[..., str], variable: str, value: str
) -> None:
    assert main_says(**{variable: value}).startswith(f"{variable}: ")


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
    main_says: Callable[..., str], variables: dict[str, str], named: str
) -> None:
    Path("text.txt").write_text("This is no database, and will not become one by being opened. " * 20)
    said = main_says(**variables)
    assert said.startswith(named)
    assert "hush" not in said


def test_a_database_of_a_newer_version_stops_start_up(main_says: Callable[..., str], tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "mail.db")) as connection:
        connection.execute("CREATE TABLE headgate_mail_migrations (number INTEGER, name TEXT)")
        connection.execute("INSERT INTO headgate_mail_migrations VALUES (9999, 'future')")
        connection.commit()
    assert "newer version" in main_says(DATABASE_URL="sqlite:///mail.db")


@pytest.mark.requirement("N-24")
def test_nx12_a_bad_store_is_found_at_start_up_not_on_the_first_request() -> None:
    with pytest.raises(SettingsError, match="RATE_LIMIT_STORE"):
        create_app(Settings(global_send_rate_limit_per_minute=1, rate_limit_store="carrier://pigeon"))


@pytest.mark.requirement("N-02", "N-45")
async def test_the_service_as_its_users_run_it_before_and_after_a_restart(tmp_path: Path) -> None:
    """NL-2 overcome: the count is in a file. Also surroundings 1.6, 12: there, DEBUG was printed whatever LOG_LEVEL said."""
    variables = {PER_MINUTE: "", PER_HOUR: 2, "RATE_LIMIT_STORE": "sqlite:///limits.db"}
    runs = []
    for level in ("info", "debug"):
        async with (
            service_process(tmp_path, LOG_LEVEL=level, **variables) as service,
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


def test_a_store_that_refuses_stops_start_up_and_one_that_is_down_does_not(
    main_says: Callable[..., str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(options=("--requirepass", "s3cret")) as redis:
        url = f"redis://:hunter2@127.0.0.1:{redis.port}"
        said = main_says(RATE_LIMIT_STORE=url, GLOBAL_SEND_RATE_LIMIT_PER_MINUTE="5")
    assert said.startswith("RATE_LIMIT_STORE: ")
    assert "hunter2" not in said
    monkeypatch.setattr("headgate_services.common.starting.serve", lambda *args, **options: 0)
    assert main("127.0.0.1", 0) == 0
    assert "Rate limit store unavailable" in caplog.text


async def test_a_service_that_was_stopped_ends_with_0(tmp_path: Path) -> None:
    async with service_process(tmp_path) as service:
        service.process.terminate()
        assert await service.process.wait() == 0
    assert "shutdown complete" in "".join(service.log)
