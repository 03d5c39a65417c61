"""Times in the database: aware datetimes in UTC with microseconds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import DateTime, Dialect
from sqlalchemy.types import TypeDecorator

from headgate.clock import Clock

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def utc(clock: Clock) -> datetime:
    """Return the time of a clock."""
    return _EPOCH + timedelta(microseconds=clock.now_us())


class UtcTime(TypeDecorator[datetime]):
    """Column type for times in UTC. SQLite stores no time zone, so naive values are read as UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
