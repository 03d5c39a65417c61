"""Parts of Headgate whose packages are extras."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(part: str, extra: str) -> Iterator[None]:
    """Say which extra to install if something is missing that is imported within the block.

    Args:
        part: The module that needs it.
        extra: The extra that brings it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "headgate":
            raise
        raise ModuleNotFoundError(
            f"{part} needs the package {error.name!r}: pip install 'headgate[{extra}]'", name=error.name
        ) from error
