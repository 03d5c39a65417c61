"""A program that writes to an SQLite store until it is killed, and prints a line after every write.

The lines let its reader count the acknowledged writes. A separate module, because tests take longer to import than it runs.
"""

from __future__ import annotations

import sys

from headgate import Limiter, SQLiteStore, fixed_window, sliding_window, token_bucket

RULES = (
    fixed_window("1000000/day", name="window"),
    sliding_window("1000000/day", name="buckets"),
    token_bucket("1/day", burst=1_000_000, name="level"),
)
NOW = 1_700_000_000

if __name__ == "__main__":
    limiter = Limiter(*RULES, name="killed", store=SQLiteStore(sys.argv[1]))
    while True:
        limiter.hit("a", now=NOW)
        print(flush=True)
