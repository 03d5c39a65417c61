"""The numbers of random examples in tests. HEADGATE_TEST_EXAMPLES=10000 tries more than the time of `make test` allows."""

from __future__ import annotations

import os

USUAL = 100
EXAMPLES = int(os.environ.get("HEADGATE_TEST_EXAMPLES", USUAL))
"""The number of random examples per property."""
SEEDS = range(max(1, EXAMPLES // 100))
"""The seeds of long random scripts: only one by default."""
