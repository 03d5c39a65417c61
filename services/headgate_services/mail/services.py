"""Dependencies of the routes, created at start-up and injected by FastAPI, so that tests can override them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast
from uuid import uuid4

from fastapi import Depends, HTTPException, Request

from headgate import HeadgateError, Hook
from headgate.clock import Clock, WallClock
from headgate_services.common.metrics import LimiterMetrics
from headgate_services.common.settings import SettingsError
from headgate_services.mail.config import Settings
from headgate_services.mail.domain_filter import DomainFilter
from headgate_services.mail.providers import EmailProvider, build_provider
from headgate_services.mail.rate_limiter import CheckAndRecord, GlobalRateLimiter
from headgate_services.mail.storage.database import MailDatabase
from headgate_services.mail.storage.models import Base, Inbox
from headgate_services.mail.storage.times import utc

T = TypeVar("T", bound=Base)

STATUSES = ("sent", "pending", "failed")


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a running service.

    Attributes:
        provider: The provider; `None` if its credentials are missing.
        clock: The clock for the times of messages.
    """

    settings: Settings
    clock: Clock
    database: MailDatabase
    limiter: GlobalRateLimiter
    provider: EmailProvider | None
    outbound: DomainFilter
    inbound: DomainFilter
    metrics: LimiterMetrics

    async def find(self, table: type[T], name: str, row_id: str, **options: Any) -> T:
        """Return the row with an id; raises a 404 with `name` if it does not exist."""
        async with self.database.reading() as session:
            row = await session.get(table, row_id, **options)
        if row is None:
            raise HTTPException(404, f"{name} {row_id} not found")
        return row

    async def add_inbox(self, address: str, name: str) -> Inbox:
        """Store a new inbox; raises `IntegrityError` if the address is taken."""
        inbox = Inbox(
            id=str(uuid4()),
            email_address=address,
            name=name,
            provider_config={},
            created_at=utc(self.clock),
        )
        async with self.database.writing() as session:
            session.add(inbox)
        return inbox

    async def aclose(self) -> None:
        """Close the limiter and the database."""
        await self.limiter.aclose()
        await self.database.aclose()


def build_services(settings: Settings, clock: Clock | None, provider: EmailProvider | None) -> Services:
    """Create the parts of the service from its settings.

    Raises:
        SettingsError: A setting is invalid; the message names the variable.
    """
    times = WallClock() if clock is None else clock
    database = MailDatabase(settings.sqlalchemy_url(), settings.database_timeout)
    metrics = LimiterMetrics(
        "mail_messages", "E-mails that a provider was asked to send, by status", "status", STATUSES
    )
    return Services(
        settings=settings,
        clock=times,
        database=database,
        limiter=build_limiter(settings, clock, [metrics.hook]),
        provider=provider or build_provider(settings, database, times),
        outbound=DomainFilter(
            "outbound", settings.outbound_domain_allowlist, settings.outbound_domain_blocklist
        ),
        inbound=DomainFilter("inbound", settings.inbound_domain_allowlist, settings.inbound_domain_blocklist),
        metrics=metrics,
    )


def build_limiter(
    settings: Settings, clock: Clock | None = None, hooks: Iterable[Hook] = ()
) -> GlobalRateLimiter:
    """Create the limiter from the settings.

    Raises:
        SettingsError: `RATE_LIMIT_STORE` is invalid.
    """
    try:
        return GlobalRateLimiter(
            settings.global_send_rate_limit_per_minute,
            settings.global_send_rate_limit_per_hour,
            store=settings.rate_limit_store,
            clock=clock,
            hooks=hooks,
        )
    except HeadgateError as error:
        raise SettingsError(f"RATE_LIMIT_STORE: {error}") from error


# These are coroutine functions because FastAPI runs plain functions in threads.


async def get_services(request: Request) -> Services:
    """Return the parts of the running service."""
    return cast(Services, request.app.state.services)


async def get_rate_limiter(services: ServicesPart) -> CheckAndRecord:
    """Return the limiter of this process."""
    return services.limiter


async def get_provider(services: ServicesPart) -> EmailProvider:
    """Return the provider; raises a 422 if its credentials are missing."""
    if services.provider is None:
        missing = ", ".join(services.settings.missing_credentials)
        raise HTTPException(
            422, f"EMAIL_PROVIDER is {services.settings.email_provider}, but these are not set: {missing}"
        )
    return services.provider


ServicesPart = Annotated[Services, Depends(get_services)]
LimiterPart = Annotated[CheckAndRecord, Depends(get_rate_limiter)]
ProviderPart = Annotated[EmailProvider, Depends(get_provider)]
