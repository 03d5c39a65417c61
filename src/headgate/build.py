"""Selection of the compiled core or the plain Python one.

Plain Python is used if there are no compiled modules, with `HEADGATE_PURE=1`, and in subinterpreters: only one interpreter
per process can load the compiled modules. Both come from the same source files and give the same results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__all__ = ["describe", "is_compiled"]


class _PlainFinder(MetaPathFinder):
    """Import finder that prefers the source of a module to the compiled file beside it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("headgate.") or not path:
            return None
        source = Path(path[0], f"{fullname.rpartition('.')[2]}.py")
        return spec_from_file_location(fullname, source) if source.exists() else None


def is_compiled() -> bool:
    """Return whether the compiled core is in use."""
    return not (getattr(sys.modules["headgate.decision"], "__file__", None) or "").endswith(".py")


def describe() -> str:
    """Return a short text: which build of the core is in use, and why."""
    if is_compiled():
        return "compiled"
    if _is_plain_wanted():
        return "in plain Python, because HEADGATE_PURE is set"
    if any(isinstance(finder, _PlainFinder) for finder in sys.meta_path):
        return "in plain Python: another interpreter of this process has loaded the compiled core"
    return "in plain Python: it was installed without a C compiler, so it gives the same results more slowly"


def _is_plain_wanted() -> bool:
    return os.environ.get("HEADGATE_PURE", "0") not in ("", "0")


def _is_loaded_elsewhere() -> bool:
    try:
        import_module("headgate.decision")
    except ImportError as error:
        if "interpreter" not in str(error):
            raise
        return True
    return False


if _is_plain_wanted() or _is_loaded_elsewhere():
    sys.meta_path.insert(0, _PlainFinder())
