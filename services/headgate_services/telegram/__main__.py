"""python -m headgate_services.telegram [run | set-webhook URL | purge]"""

from __future__ import annotations

import argparse
import sys

from headgate import HeadgateError
from headgate.observe import redact
from headgate_services.telegram.app import main, purge_limits, set_webhook


def command(arguments: list[str]) -> int:
    """Do what the arguments say, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="headgate telegram", description="A Telegram bot with a limit per user."
    )
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser("run", help="serve the webhook")
    run.add_argument("--host")
    run.add_argument("--port", type=int)
    webhook = commands.add_parser("set-webhook", help="tell Telegram where the webhook is")
    webhook.add_argument("url", help="where this service is reached, as https://bot.example.org")
    commands.add_parser("purge", help="forget what was counted for every user")
    parsed = parser.parse_args(arguments or ["run"])
    try:
        if parsed.command == "set-webhook":
            print(set_webhook(parsed.url))
        elif parsed.command == "purge":
            print(f"entries removed: {purge_limits()}")
        else:
            return main(parsed.host, parsed.port)
    except HeadgateError as error:
        print(redact(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
