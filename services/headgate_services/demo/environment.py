"""Running a piece of code under other environment variables than the process's own.

The services read their settings from the environment, once, when they are made. So that several of them can live in one
process, each is made under an environment of its own. Only while nothing else runs: the environment is the process's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let the process have these variables and no others for as long as the block lasts."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
