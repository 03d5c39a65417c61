"""A fake of the four mail services, with requests, responses and errors as in their documentation."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from tests.unit.kv.http_server import served

KEY = "key-s3cret"
PATHS = {
    "/v3/example.org/messages.mime": "mailgun",
    "/v3/mail/send": "sendgrid",
    "/emails": "resend",
    "/v2/email/outbound-emails": "ses",
}
SECRETS = {
    "mailgun": f"Basic {base64.b64encode(f'api:{KEY}'.encode()).decode()}",
    "sendgrid": f"Bearer {KEY}",
    "resend": f"Bearer {KEY}",
    "ses": "AWS4-HMAC-SHA256 Credential=AKID/",
}

Reply = tuple[int, dict[str, str], Any]
RATE_LIMITS: dict[str, Reply] = {
    "mailgun": (429, {"Retry-After": "7"}, {"message": "Too many requests"}),
    "sendgrid": (
        429,
        {"X-RateLimit-Limit": "500", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1392815263"},
        {"errors": [{"field": None, "message": "too many requests"}]},
    ),
    "resend": (
        429,
        {"retry-after": "1", "ratelimit-limit": "2"},
        {"statusCode": 429, "name": "rate_limit_exceeded", "message": "Too many requests"},
    ),
    "ses": (
        429,
        {"x-amzn-ErrorType": "TooManyRequestsException"},
        {"message": "Maximum sending rate exceeded."},
    ),
}
ACCEPTED: dict[str, Reply] = {
    "mailgun": (200, {}, {"id": "<20260101.1@example.org>", "message": "Queued. Thank you."}),
    "sendgrid": (202, {"X-Message-Id": "14c5d75ce93.dfd.64b469"}, None),
    "resend": (200, {}, {"id": "49a3999c-0ce1-4ea6-ab68-afcd6dc2e794"}),
    "ses": (200, {}, {"MessageId": "010001801e4c-5f2b"}),
}


@dataclass
class MailApis:
    """The services.

    Attributes:
        url: Where they are.
        requests: The header fields (lower case) and body of each request, by service.
        failures: The answer to the next requests of a service, instead of taking the e-mail.
        is_endless: While it is set, answers arrive byte by byte and never end.
    """

    url: str = ""
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    failures: dict[str, Reply] = field(default_factory=dict)
    is_endless: bool = False

    def last(self) -> Any:
        """Return the JSON document of the last request."""
        return json.loads(self.requests[-1][2])

    def last_form(self) -> dict[str, list[bytes]]:
        """Return the fields of the last request, which was a multipart form."""
        _, fields, body = self.requests[-1]
        head = f"Content-Type: {fields['content-type']}\r\n\r\n".encode()
        found: dict[str, list[bytes]] = {}
        for part in message_from_bytes(head + body, policy=default).iter_parts():
            name = str(part.get_param("name", header="content-disposition"))
            content = part.get_payload(decode=True) or part.get_payload(0).as_bytes()  # type: ignore[union-attr]
            found.setdefault(name, []).append(content)  # type: ignore[arg-type]
        return found

    async def answer(self, request: Request) -> Response:
        """Take an e-mail, or say why not."""
        service, fields, body = PATHS[request.url.path], dict(request.headers), await request.body()
        self.requests.append((service, fields, body))
        if self.is_endless:
            return StreamingResponse(self._endless())
        status, extra, document = self.failures.get(service, ACCEPTED[service])
        if not fields.get("authorization", "").startswith(SECRETS[service]):
            status, document = 401, {}
        if service != "mailgun":
            assert fields["content-type"] == "application/json"
            json.loads(body)
        return Response(None, status, extra) if document is None else JSONResponse(document, status, extra)

    async def _endless(self) -> AsyncIterator[bytes]:
        while self.is_endless:
            yield b" "
            await asyncio.sleep(0)


def read_mime(content: bytes) -> EmailMessage:
    """Return a message as a mail server reads it."""
    message = message_from_bytes(content, policy=default)
    assert isinstance(message, EmailMessage)
    return message


@contextmanager
def mail_apis() -> Iterator[MailApis]:
    """Run the services on a free port until the block ends."""
    apis = MailApis()
    app = FastAPI()
    app.add_api_route("/{path:path}", apis.answer, methods=["POST"])
    with served(app) as apis.url:
        yield apis
        apis.is_endless = False
