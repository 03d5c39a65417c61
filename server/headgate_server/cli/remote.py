"""The running server that a command asks, through the client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from headgate import ConfigError, StoreMisconfigured
from headgate.client import ServerStore
from headgate_server.cli.common import TOKEN_VARIABLE, Failure

PATIENCE = 10.0
"""Seconds without an answer, or without an event, after which a server is given up."""


def open_server(url: str, token: str | None = None) -> ServerStore:
    """Return a server by its URL; without a token, that of the environment is sent.

    Raises:
        Failure: The URL or the token cannot be used.
    """
    try:
        return ServerStore(url, token=token or os.environ.get(TOKEN_VARIABLE), deadline=PATIENCE)
    except ConfigError as error:
        raise Failure(str(error), code=2) from error


@contextmanager
def understood(server: ServerStore) -> Iterator[None]:
    """Raise StoreMisconfigured if an answer has not the form that it should have."""
    try:
        yield
    except (LookupError, msgspec.ValidationError) as error:
        raise StoreMisconfigured(
            f"{server.endpoint.name} did not answer as a Headgate server does"
        ) from error
