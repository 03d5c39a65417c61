"""How deep tests search. HEADGATE_TEST_EXAMPLES=10000 searches deeper than the budget of `make test` allows."""

from __future__ import annotations

import os

USUAL = 100
EXAMPLES = int(os.environ.get("HEADGATE_TEST_EXAMPLES", USUAL))
"""How many random examples a property tries."""
SEEDS = range(max(1, EXAMPLES // 100))
"""What long random scripts start from: one each, unless more is asked for."""
