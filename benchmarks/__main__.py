"""`python -m benchmarks`: everything that needs no server."""

from __future__ import annotations

from benchmarks.core import main

if __name__ == "__main__":
    main()
