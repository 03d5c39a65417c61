"""Sessions on the database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from headgate_services.common.databases import SqlDatabase
from headgate_services.common.deadlines import DEFAULT_LIMIT


class MailDatabase(SqlDatabase):
    """Sessions on one database."""

    package = "headgate_services.mail.storage"
    record = "headgate_mail_migrations"

    def __init__(self, url: URL, timeout: float = DEFAULT_LIMIT) -> None:
        super().__init__(url, timeout)
        self._readers = async_sessionmaker(self.engine, expire_on_commit=False)
        self._writers = async_sessionmaker(self.writing_engine, expire_on_commit=False)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """Provide a session that only reads, from one snapshot."""
        async with self.guard(), self._readers() as session:
            yield session

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """Provide a session whose changes are committed at the end of the block, or rolled back if it raises."""
        async with self.guard(), self._writers() as session, session.begin():
            yield session
