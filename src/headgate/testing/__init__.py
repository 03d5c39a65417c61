"""Helpers for testing code that uses Headgate, and for testing stores.

`FakeClock` and `frozen_limits` need only Headgate. The conformance kit needs pytest and Hypothesis, and is imported on first
use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from headgate.testing.clock import FakeClock
from headgate.testing.reference import ReferenceStore

if TYPE_CHECKING:
    from headgate.testing.contract import AsyncStoreContract, StoreContract
    from headgate.testing.frozen import frozen_limits

__all__ = ["AsyncStoreContract", "FakeClock", "ReferenceStore", "StoreContract", "frozen_limits"]

_KIT = "headgate.testing.contract"


def __getattr__(name: str) -> object:
    # Every run of pytest loads this package through the plugin; few runs need the names imported here.
    if name == "frozen_limits":
        return import_module("headgate.testing.frozen").frozen_limits
    if name not in ("AsyncStoreContract", "StoreContract"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _KIT not in sys.modules:
        # Let pytest rewrite the kit's assertions, so that their failures are as detailed as in test files.
        import_module("pytest").register_assert_rewrite(_KIT)
    kit: object = getattr(import_module(_KIT), name)
    return kit
