"""What can go wrong before the demo runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headgate import HeadgateError


class DemoError(HeadgateError):
    """The demo cannot start; the message says why, in one line."""


@contextmanager
def naming_missing_packages() -> Iterator[None]:
    """Say what to install if an import inside of the block finds a package missing.

    Raises:
        DemoError: One is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("headgate"):
            raise
        raise DemoError(f"{error.name} is not installed: pip install 'headgate-services[all]'") from error
