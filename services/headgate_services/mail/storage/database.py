"""The connection to the database, and the two kinds of session on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sqlalchemy import URL, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from headgate_services.common.databases import create_engine
from headgate_services.common.deadlines import DEFAULT_LIMIT, within
from headgate_services.mail.storage.migrations import Migration, all_migrations, migrate


class Database:
    """Sessions on one database.

    Args:
        url: Where it is, with an asynchronous driver.
        timeout: Seconds that PostgreSQL has for a block.
    """

    def __init__(self, url: URL, timeout: float = DEFAULT_LIMIT) -> None:
        self._timeout = timeout
        self.engine = create_engine(url, timeout)
        self._readers = async_sessionmaker(self.engine, expire_on_commit=False)
        # SQLite: a transaction that reads first and writes later is refused at once if another wrote in between.
        # One that says at its beginning that it will write waits for its turn instead.
        self._writers = async_sessionmaker(
            self.engine.execution_options(begin_sqlite="BEGIN IMMEDIATE"), expire_on_commit=False
        )

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """Run a block that only reads, at one moment of what others write."""
        with within(self._timeout):
            async with self._readers() as session:
                yield session

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """Run a block whose changes are stored together when it ends, or not at all if it raises."""
        with within(self._timeout):
            async with self._writers() as session, session.begin():
                yield session

    async def ping(self) -> None:
        """Ask the database for an answer; raises what SQLAlchemy raises if there is none."""
        async with self.reading() as session:
            await session.execute(text("SELECT 1"))

    async def migrate(self, steps: Sequence[Migration] | None = None) -> list[int]:
        """Bring the tables to the form that this program needs, and return the numbers of the steps it took.

        Raises:
            MigrationError: The database is newer than this program.
        """
        writing = self.engine.execution_options(begin_sqlite="BEGIN IMMEDIATE")
        async with writing.begin() as connection:
            return await migrate(connection, all_migrations() if steps is None else steps)

    async def aclose(self) -> None:
        """Close all connections."""
        await self.engine.dispose()
