"""Many threads at once: what they do together in a second, and what CPU time of this process each decision takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


def race(
    hit: Callable[[str], Any], threads: int, calls: int, keys: Callable[[], Iterator[str]]
) -> tuple[float, float]:
    """Return decisions a second, and microseconds of CPU time for each."""
    share = max(1, calls // threads)
    start = threading.Barrier(threads + 1)

    def work() -> None:
        own = keys()
        start.wait()
        for _ in range(share):
            hit(next(own))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    began, worked = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.join()
    total = share * threads
    return total / (time.perf_counter() - began), (time.process_time() - worked) / total * 1e6
