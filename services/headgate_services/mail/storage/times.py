"""Times of the database: aware, in UTC, to the microsecond."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import DateTime, Dialect
from sqlalchemy.types import TypeDecorator

from headgate.clock import Clock

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def utc(clock: Clock) -> datetime:
    """Return what time it is on a clock."""
    return _EPOCH + timedelta(microseconds=clock.now_us())


class UtcTime(TypeDecorator[datetime]):
    """An instant. SQLite keeps no time zone, so all are stored in UTC, and what comes back without one is in UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
