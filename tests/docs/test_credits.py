"""The recipe of docs/how-to/credits.md pays every job exactly once, also if they start at the same time."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headgate.testing.contract.races import in_threads

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "credits.md"
UNITS, JOBS = 100, 30


@pytest.fixture
def billing(headgate_postgres_url: str) -> dict[str, Any]:
    """The code of the page, on new tables in a database of the tests."""
    text = PAGE.read_text("utf-8")
    (tables,) = re.findall(r'connection.execute\("""\n(.*?)"""\)', text, re.DOTALL)
    (code,) = re.findall(r'```python title="billing.py"\n(.*?)```', text, re.DOTALL)
    with psycopg.connect(headgate_postgres_url) as connection:
        connection.execute("DROP TABLE IF EXISTS included, credits, jobs")
        connection.execute(tables.encode())
    names: dict[str, Any] = {"psycopg": psycopg, "url": headgate_postgres_url}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_parallel_jobs_use_the_quota_and_the_balance_exactly(billing: dict[str, Any]) -> None:
    def run(number: int) -> list[str]:
        paid = []
        for _ in range(JOBS // 6):
            try:
                paid.append(billing["start_job"]("acme", UNITS))
            except billing["OutOfCredits"]:
                paid.append("nothing")
        return paid

    paid = Counter(source for sources in in_threads(6, run) for source in sources)
    assert paid == {"quota": 10, "credits": 5, "nothing": 15}
    with psycopg.connect(billing["url"]) as connection:
        assert connection.execute("SELECT balance FROM credits").fetchone() == (0,)
        assert connection.execute("SELECT count(*), sum(units) FROM jobs").fetchone() == (15, 1_500)
    assert billing["rates"].check("acme", 0).remaining == 60 - 15
