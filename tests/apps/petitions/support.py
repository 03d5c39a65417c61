"""The petitions service in this process, and a fake calendar."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
from fastapi import FastAPI

from headgate_services.petitions import PetitionsSettings, create_app
from headgate_services.petitions.container import Container
from headgate_services.petitions.infrastructure.adapters.persistence import Database
from tests.apps.processes import client_of

PATH = "/v1/petition-submissions"
TABLE = "petition_rate_limit_buckets"


class Calendar:
    """A fake clock for the limit."""

    def __init__(self) -> None:
        self.at = datetime(2026, 3, 2, 10, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.at

    def advance(self, *, minutes: float = 0, seconds: float = 0) -> None:
        self.at += timedelta(minutes=minutes, seconds=seconds)

    def set(self, hour: int, minute: int, second: int = 0) -> None:
        self.at = self.at.replace(hour=hour, minute=minute, second=second)


@dataclass
class Service:
    """A running service, and a client to call it with."""

    app: FastAPI
    client: httpx.AsyncClient
    url: str
    calendar: Calendar

    @property
    def container(self) -> Container:
        container: Container = self.app.state.container
        return container

    async def submit(self, submitter: UUID | None, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", None)
        return await self.client.post(PATH, json=petition(submitter, **fields), headers=headers)

    async def submit_many(self, submitter: UUID | None, count: int) -> list[int]:
        return [(await self.submit(submitter)).status_code for _ in range(count)]

    async def metric(self, name: str, **labels: str) -> float | None:
        """Return the value of a series, or None."""
        for line in (await self.client.get("/metrics")).text.splitlines():
            if line.startswith(f"{name}{{") and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                return float(line.rpartition(" ")[2])
        return None

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return rows(self.url, query, *parameters)

    def count(self, submitter: UUID) -> int:
        """Return the sum of a submitter's counters."""
        return int(
            self.rows(f"SELECT coalesce(sum(count), 0) FROM {TABLE} WHERE submitter_id = %s", submitter)[0][0]
        )

    def petitions(self, submitter: UUID) -> int:
        """Return the number of stored petitions of a submitter."""
        return int(
            self.rows("SELECT count(*) FROM petition_submissions WHERE submitter_id = %s", submitter)[0][0]
        )

    def refusals(self, submitter: UUID) -> list[dict[str, Any]]:
        """Return the events of a submitter's refusals."""
        found = self.rows(
            "SELECT payload FROM ledger.governance_events WHERE event_type = 'petition.submission.rate_limited' "
            "AND actor_id = %s ORDER BY sequence",
            f"submitter:{submitter}",
        )
        return [payload for (payload,) in found]


def petition(submitter: UUID | None, **fields: Any) -> dict[str, Any]:
    """Return the body of a request to submit a petition."""
    return {"type": "GENERAL", "text": "Hear me", "submitter_id": submitter and str(submitter), **fields}


def rows(url: str, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Run a statement and return its rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(query, parameters or None)
        return cursor.fetchall() if cursor.description else []


def put_bucket(url: str, submitter: UUID, minute: datetime, count: int = 1) -> None:
    """Put a counter into the table."""
    rows(
        url,
        f"INSERT INTO {TABLE} (submitter_id, bucket_minute, count) VALUES (%s, %s, %s)",
        submitter,
        minute,
        count,
    )


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Database]:
    """Open a database as the service does."""
    database = Database(url)
    await database.open()
    try:
        yield database
    finally:
        await database.aclose()


@asynccontextmanager
async def running(url: str, **settings: Any) -> AsyncIterator[Service]:
    """Run the service with these settings in this process."""
    calendar = settings.pop("calendar", None) or Calendar()
    real_time = settings.pop("real_time", False)
    app = create_app(PetitionsSettings(database_url=url, **settings), now=None if real_time else calendar)
    async with client_of(app, "192.0.2.1") as client:
        yield Service(app, client, url, calendar)


def someone() -> UUID:
    """Return the id of a new submitter."""
    return uuid4()
