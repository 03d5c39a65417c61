"""Files that several processes read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old or the new one, never a part.

    Raises:
        OSError: It cannot be written; the old one is still there.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
