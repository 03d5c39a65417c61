"""The `headgate` command.

Exit codes: 0 done, 1 it failed (one line on standard error says why; --debug shows the traceback), 2 it was called wrongly.
"""

from __future__ import annotations

import argparse
import importlib
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import headgate
from headgate.errors import HeadgateError
from headgate.policy import explain, load_policy
from headgate.testing.servers import RedisServer
from headgate.tour import tour

SERVICES = {
    "mail": "outbound mail gateway with a global send limit",
    "telegram": "Telegram bot webhook with a limit per user",
    "tiers": "API with token-bucket limits by tier, in Redis",
    "petitions": "petition intake with limits per submitter, in PostgreSQL",
}
"""The services that `headgate run` starts, by name."""


Commands = argparse._SubParsersAction  # what add_subparsers returns; it has no public name


class Failure(Exception):
    """Something that the user should read in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process, and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        code: int | None = options.command(options)
    except KeyboardInterrupt:
        return 130
    except (Failure, HeadgateError, OSError) as error:
        if options.debug:
            raise
        print(f"headgate: {error}", file=sys.stderr)
        return 1
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headgate",
        description="Rate limiting with exact answers on every store.",
        epilog="Begin with `headgate tour`: real decisions in your terminal, in well under a minute.",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    command = commands.add_parser("version", help="print the version")
    command.set_defaults(command=lambda options: print(f"headgate {headgate.__version__}"))

    command = commands.add_parser("tour", help="see what limiters do, in your terminal")
    command.add_argument(
        "--fast", action="store_true", help="let time pass on a fake clock instead of waiting for it"
    )
    command.set_defaults(command=lambda options: tour(fast=options.fast))

    command = commands.add_parser(
        "check",
        help="check a policy file, and say what it means",
        description="Check a policy file and say in plain words what it means. Environment variables that begin with "
        "HEADGATE_ replace single values, as they do for the server.",
    )
    command.add_argument("file", metavar="FILE", help="the policy file, usually headgate.toml")
    command.set_defaults(command=_check)

    command = commands.add_parser(
        "run",
        help="start one of the services",
        description="Start one of the services. Its settings are environment variables, listed in docs/services.",
    )
    services = command.add_subparsers(title="services", metavar="SERVICE", required=True)
    for name, purpose in SERVICES.items():
        service = services.add_parser(name, help=purpose)
        service.add_argument("--host", help="where to listen (default: the setting HOST, or 127.0.0.1)")
        service.add_argument(
            "--port", type=int, help="which port; 0 for any free one (default: PORT, or 8000)"
        )
        service.set_defaults(command=_run, service=name)
    command = commands.add_parser(
        "migrate",
        help="make or update Headgate's tables in PostgreSQL",
        description="Make or update Headgate's tables and functions in a PostgreSQL database; each migration is applied "
        "once, however many do this at the same time.",
    )
    command.add_argument("url", metavar="URL", help="the database, as postgresql://user@host/name")
    command.set_defaults(command=_migrate)

    _add_telegram(commands)
    _add_tiers(commands)
    _add_petitions(commands)
    return parser


def _add_telegram(commands: Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("telegram", help="set up the Telegram bot")
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    action = actions.add_parser("set-webhook", help="tell Telegram where the webhook is")
    action.add_argument("url", help="where the service is reached, as https://bot.example.org")
    action.set_defaults(command=lambda options: print(_service("telegram").set_webhook(options.url)))
    action = actions.add_parser("purge", help="forget what was counted for every user")
    action.set_defaults(
        command=lambda options: print(f"entries removed: {_service('telegram').purge_limits()}")
    )


def _add_tiers(commands: Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("tiers", help="API keys and load test of the tiers service")
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    keys = actions.add_parser("keys", help="API keys").add_subparsers(metavar="ACTION", required=True)
    action = keys.add_parser("create", help="make a key for a user, and print it once")
    action.add_argument("user", help="the user's id")
    action.add_argument("--tier", help="the user's tier from now on (default: the one they have, or free)")
    action.set_defaults(command=lambda options: _service("tiers").create_key(options.user, options.tier))
    action = keys.add_parser("list", help="show all keys")
    action.set_defaults(command=lambda options: _service("tiers").list_keys())
    action = keys.add_parser("revoke", help="end a key")
    action.add_argument("id", help="the key's id, as `list` shows it")
    action.set_defaults(command=lambda options: _service("tiers").revoke_key(options.id))

    action = actions.add_parser("load-test", help="two instances, one Redis, flag off and on, on loopback")
    action.add_argument("--redis-url", help="a Redis that nobody else is using (default: one of its own)")
    action.add_argument("--seconds", type=float, default=10.0, help="for each mode (default %(default)s)")
    action.add_argument("--clients", type=int, default=16, help="requests under way (default %(default)s)")
    action.set_defaults(command=_load_test)


def _add_petitions(commands: Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("petitions", help="clean up, halt and resume the petitions service")
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    action = actions.add_parser("cleanup", help="remove expired counters")
    action.set_defaults(command=_clean_up_petitions)
    action = actions.add_parser("halt", help="let nothing more be submitted")
    action.add_argument("reason", help="what clients are told")
    action.set_defaults(command=lambda options: _service("petitions").halt(options.reason))
    action = actions.add_parser("resume", help="let petitions be submitted again")
    action.set_defaults(command=lambda options: _service("petitions").resume())


def _clean_up_petitions(options: argparse.Namespace) -> None:
    report = _service("petitions").cleanup()
    print(f"buckets removed: {report.deleted_count}, from before {report.cutoff.isoformat()}")


def _migrate(options: argparse.Namespace) -> None:
    try:
        postgres = importlib.import_module("headgate.stores.postgres")
    except ModuleNotFoundError as error:
        raise Failure(f"PostgreSQL needs {error.name}: pip install 'headgate[postgres]'") from error
    for line in postgres.migrate(options.url) or ["nothing to do"]:
        print(line)


def _load_test(options: argparse.Namespace) -> int:
    load_test: Callable[..., int] = _service("tiers").load_test
    if options.redis_url is not None:
        return load_test(options.redis_url, seconds=options.seconds, clients=options.clients)
    password = secrets.token_hex(16)
    with RedisServer(options=("--requirepass", password)) as server:
        url = f"redis://:{password}@127.0.0.1:{server.port}/0"
        return load_test(url, seconds=options.seconds, clients=options.clients)


def _check(options: argparse.Namespace) -> None:
    print(explain(load_policy(options.file, os.environ)))


def _run(options: argparse.Namespace) -> int:
    exit_code: int = _service(options.service).main(options.host, options.port)
    return exit_code


def _service(name: str) -> ModuleType:
    """Import a service, whose packages are an extra."""
    try:
        return importlib.import_module(f"headgate.apps.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("headgate"):
            raise
        raise Failure(f"the {name} service needs {error.name}: pip install 'headgate[{name}]'") from error


if __name__ == "__main__":
    sys.exit(main())
