"""python -m headgate_services.tiers [--host HOST] [--port PORT] | keys create|list|revoke | load-test"""

from __future__ import annotations

import argparse
import sys

from headgate.errors import ConfigError
from headgate.observe import redact
from headgate_services.tiers import create_key, list_keys, load_test, main, revoke_key


def command(arguments: list[str] | None = None) -> int:
    """Do what the arguments say, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m headgate_services.tiers", description="An API with tiers."
    )
    parser.add_argument("--host", help="where to listen (default: HOST, or 127.0.0.1)")
    parser.add_argument("--port", type=int, help="which port; 0 for any free one (default: PORT, or 8000)")
    parser.add_argument(
        "--workers", type=int, default=1, help="how many processes share the work (default: 1)"
    )
    parser.set_defaults(command=lambda options: main(options.host, options.port, options.workers))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    keys = commands.add_parser("keys", help="API keys").add_subparsers(metavar="ACTION", required=True)
    create = keys.add_parser("create", help="make a key for a user, and print it once")
    create.add_argument("user", help="the user's id")
    create.add_argument("--tier", help="the user's tier from now on (default: the one they have, or free)")
    create.set_defaults(command=lambda options: create_key(options.user, options.tier))
    keys.add_parser("list", help="show all keys").set_defaults(command=lambda options: list_keys())
    revoke = keys.add_parser("revoke", help="end a key")
    revoke.add_argument("id", help="the key's id, as `list` shows it")
    revoke.set_defaults(command=lambda options: revoke_key(options.id))

    load = commands.add_parser("load-test", help="two instances, one Redis, flag off and on")
    load.add_argument("--redis-url", required=True, help="a Redis that nobody else is using")
    load.add_argument("--seconds", type=float, default=10.0, help="for each of the two modes (default: 10)")
    load.add_argument("--clients", type=int, default=16, help="how many requests are under way (default: 16)")
    load.set_defaults(
        command=lambda options: load_test(options.redis_url, seconds=options.seconds, clients=options.clients)
    )

    options = parser.parse_args(arguments)
    try:
        exit_code: int = options.command(options)
    except ConfigError as error:
        print(redact(str(error)), file=sys.stderr)
        return 2
    return exit_code


if __name__ == "__main__":
    sys.exit(command())
