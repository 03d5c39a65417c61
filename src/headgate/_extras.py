"""Error message for missing optional dependencies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(part: str, extra: str) -> Iterator[None]:
    """Name the extra to install if an import within the block fails.

    Args:
        part: The module that needs the package.
        extra: The extra that contains the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "headgate":
            raise
        raise ModuleNotFoundError(
            f"{part} needs the package {error.name!r}: pip install 'headgate[{extra}]'", name=error.name
        ) from error
