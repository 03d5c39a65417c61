"""`migrate`: Headgate's tables in PostgreSQL."""

from __future__ import annotations

import argparse

from headgate.stores import check_url
from headgate_server.cli.common import Commands, optional


def add(commands: Commands) -> None:
    """Add the command."""
    migrate = commands.add(
        "migrate",
        "make or update Headgate's tables in PostgreSQL",
        _migrate,
        about="Each migration is applied once, however many do this at the same time. Services with older code may go on "
        "meanwhile.",
        examples=["headgate migrate postgresql://user@localhost/limits"],
    )
    migrate.add_argument("url", metavar="URL", help="the database, as postgresql://user@host/name")


def _migrate(options: argparse.Namespace) -> None:
    check_url(options.url)
    postgres = optional("headgate.stores.postgres", "PostgreSQL", "headgate[postgres]")
    for line in postgres.migrate(options.url) or ["nothing to do"]:
        print(line)
