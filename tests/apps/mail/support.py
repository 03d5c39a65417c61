"""The mail service in this process, and fake providers and mail servers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session
from fastapi import FastAPI

from headgate.testing import FakeClock
from headgate_services.mail import Settings, create_app
from tests.apps.processes import client_of

CERTIFICATE = Path(__file__).with_name("certificate.pem")

START = 1_700_000_040.0
"""The start of a calendar minute."""


# --- Providers -------------------------------------------------------------------------------------------------------


class FakeProvider:
    """Accepts every e-mail at once, unless configured otherwise.

    Attributes:
        calls: The arguments of each call.
        error: Raised by every call while it is set.
        answer: The id to return; by default a new one each time.
        gate: Calls wait for this event; set by default.
        called: Set by the first call.
    """

    name = "fake"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.answer: str | None = "new"
        self.gate = asyncio.Event()
        self.gate.set()
        self.called = asyncio.Event()

    async def send_email(self, to: Sequence[str], subject: str, body: str, **rest: Any) -> str | None:
        self.calls.append({"to": list(to), "subject": subject, "body": body, **rest})
        self.called.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return f"fake-{len(self.calls)}" if self.answer == "new" else self.answer


# --- The service in this process -------------------------------------------------------------------------------------


@dataclass
class Service:
    """A running service, and a client to call it with."""

    app: FastAPI
    client: httpx.AsyncClient
    clock: FakeClock
    provider: FakeProvider
    inbox_id: str = ""

    async def send(self, *to: str, **fields: Any) -> httpx.Response:
        """Send an e-mail, by default from the demo inbox to somebody at example.com."""
        return await self.client.post("/v1/messages", json=self.mail(*to, **fields))

    def mail(self, *to: str, **fields: Any) -> dict[str, Any]:
        """Return the body of a request to send an e-mail."""
        recipients = list(to or ("ann@example.com",))
        return {"inbox_id": self.inbox_id, "to": recipients, "subject": "Hello", "body": "Hi", **fields}

    async def send_many(self, count: int) -> list[int]:
        """Send e-mails one after the other, and return their statuses."""
        return [(await self.send()).status_code for _ in range(count)]

    async def messages(self) -> dict[str, Any]:
        """Return the stored messages of the inbox."""
        return await self.get("/v1/messages", inbox_id=self.inbox_id)

    async def counts(self) -> dict[str, int]:
        """Return the count of each window."""
        usage = await self.get("/v1/rate-limit")
        return {window["name"]: window["count"] for window in usage["windows"]}

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Return the JSON of a successful GET request."""
        answer = await self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@asynccontextmanager
async def running(
    *,
    provider: FakeProvider | None = None,
    real_provider: bool = False,
    clock: FakeClock | None = None,
    **settings: Any,
) -> AsyncIterator[Service]:
    """Run the service with these settings and an inbox to send from."""
    clock = clock or FakeClock(START)
    provider = provider or FakeProvider()
    app = create_app(Settings(**settings), clock=clock, provider=None if real_provider else provider)
    async with client_of(app) as client:
        service = Service(app, client, clock, provider)
        if key := settings.get("api_key"):
            client.headers["X-API-Key"] = key
        if inboxes := (await service.get("/v1/inboxes"))["items"]:
            service.inbox_id = inboxes[0]["id"]
        elif settings.get("email_domain"):
            new = {"name": "Post", "email_username": "post"}
            service.inbox_id = (await client.post("/v1/inboxes", json=new)).json()["id"]
        yield service


# --- Mail servers ----------------------------------------------------------------------------------------------------


class MailServer:
    """A real SMTP server with configurable behaviour.

    Attributes:
        received: The accepted e-mails.
        tries: The number of e-mails it was given, including refused ones.
        refused: Unknown recipients.
        gate: Senders wait for this event after their data; set by default.
        drops: Whether it closes the connection after the data.
    """

    def __init__(self) -> None:
        self.received: list[Envelope] = []
        self.tries = 0
        self.refused: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.drops = False
        self.port = 0

    async def handle_RCPT(  # noqa: N802  # aiosmtpd's name
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.refused:
            return "550 5.1.1 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
        self.tries += 1
        if self.drops:
            assert isinstance(server.transport, asyncio.Transport)
            server.transport.abort()
            return "421 gone"
        await self.gate.wait()
        self.received.append(envelope)
        return "250 OK"

    def text(self) -> str:
        """Return the source of the last e-mail."""
        content = self.received[-1].content
        assert isinstance(content, bytes)
        return content.decode()


@asynccontextmanager
async def mail_server(
    *, tls: bool = False, implicit_tls: bool = False, password: str = ""
) -> AsyncIterator[MailServer]:
    """Run an SMTP server on a free port during the block."""
    commanded = MailServer()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    loop = asyncio.get_running_loop()

    def authenticate(*given: Any) -> AuthResult:
        login = given[-1]
        right = isinstance(login, LoginPassword) and login.password == password.encode()
        return AuthResult(success=right, handled=False)

    def connection() -> SMTP:
        return SMTP(
            commanded,
            hostname="localhost",
            loop=loop,
            enable_SMTPUTF8=True,
            tls_context=context if tls else None,
            require_starttls=tls,
            authenticator=authenticate if password else None,
            auth_required=bool(password),
            auth_require_tls=tls,
        )

    server = await loop.create_server(connection, "127.0.0.1", 0, ssl=context if implicit_tls else None)
    commanded.port = server.sockets[0].getsockname()[1]
    try:
        yield commanded
    finally:
        server.close()
        await server.wait_closed()
