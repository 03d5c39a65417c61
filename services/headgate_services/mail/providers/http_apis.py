"""Sending through the HTTP API of Mailgun, SendGrid, Resend or Amazon SES.

Each service is an entry of `APIS`: its address, a function that builds the request, and a function that reads the id from
the response. There are no retries: a refusal of the service, including its rate limit, is reported to the caller.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.policy import SMTP
from email.utils import parseaddr
from functools import cache
from ssl import SSLContext
from typing import Any, NamedTuple, Unpack
from urllib.parse import quote, urlsplit

import httpx

from headgate_services.mail.providers.base import (
    MailOptions,
    OutgoingAttachment,
    ProviderError,
    all_recipients,
)
from headgate_services.mail.providers.mime import build_message

_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class Account:
    """Credentials for a service; each service uses some of the fields.

    Attributes:
        key: The API key; for SES, the secret access key.
        key_id: For SES, the access key id.
        session_token: For SES, the session token of temporary credentials.
        domain: For Mailgun, the sending domain.
        region: For SES, the region.
    """

    key: str = field(repr=False)
    key_id: str = ""
    session_token: str = field(default="", repr=False)
    domain: str = ""
    region: str = ""


class Mail(NamedTuple):
    """An e-mail to send."""

    to: Sequence[str]
    subject: str
    body: str
    options: MailOptions

    @property
    def attachments(self) -> Sequence[OutgoingAttachment]:
        """The attachments."""
        return self.options.get("attachments") or ()

    def mime(self) -> bytes:
        """Return the e-mail in MIME format; raises `ValueError` if a header is invalid."""
        return build_message(*self).as_bytes(policy=SMTP)

    def headers(self) -> dict[str, str]:
        """Return the threading headers."""
        found = {
            "Message-ID": self.options.get("message_id"),
            "In-Reply-To": self.options.get("in_reply_to"),
            "References": " ".join(self.options.get("references") or ()),
        }
        return {name: value for name, value in found.items() if value}


class Api(NamedTuple):
    """A mail service.

    Attributes:
        base: The base URL; `{region}` is replaced by the region of the account.
        request: Builds the request for an e-mail.
        sent_id: Reads the service's id of the e-mail from the response.
        retry_field: The response header with the wait after a 429.
    """

    base: str
    request: Callable[[str, Account, Mail], httpx.Request]
    sent_id: Callable[[httpx.Response], str | None]
    retry_field: str = "retry-after"


@dataclass(frozen=True, slots=True)
class HttpProvider:
    """Sends e-mail through a mail service, one connection per e-mail.

    Attributes:
        name: The service, a key of `APIS`.
        account: The credentials.
        base: The base URL, instead of the default.
        timeout: Time limit for a request in seconds, from connecting to the end of the response.
    """

    name: str
    account: Account
    base: str = ""
    timeout: float = 30.0

    async def send_email(
        self, to: Sequence[str], subject: str, body: str, **options: Unpack[MailOptions]
    ) -> str | None:
        """Send one e-mail, and return the service's id for it."""
        api = APIS[self.name]
        base = (self.base or api.base.format(region=self.account.region)).rstrip("/")
        try:
            request = api.request(base, self.account, Mail(to, " ".join(subject.split()), body, options))
        except ValueError as error:
            raise ProviderError(f"the message cannot be written: {error}") from error
        try:
            async with (
                asyncio.timeout(self.timeout),
                httpx.AsyncClient(timeout=None, verify=_tls_context()) as client,
            ):
                response = await client.send(request)
        except TimeoutError as error:
            raise ProviderError(f"no answer within {self.timeout:g} s") from error
        except httpx.HTTPError as error:
            raise ProviderError(f"{urlsplit(base).netloc}: {str(error) or type(error).__name__}") from error
        if not response.is_success:
            raise ProviderError(_refusal(response, api.retry_field))
        return api.sent_id(response)


def _mailgun(base: str, account: Account, mail: Mail) -> httpx.Request:
    """https://documentation.mailgun.com, POST /v3/{domain}/messages.mime"""
    return httpx.Request(
        "POST",
        f"{base}/v3/{quote(account.domain, safe='')}/messages.mime",
        headers={"Authorization": f"Basic {_encoded(f'api:{account.key}'.encode())}"},
        data={"to": all_recipients(mail.to, mail.options)},
        files={"message": ("message.eml", mail.mime(), "message/rfc822")},
    )


def _sendgrid(base: str, account: Account, mail: Mail) -> httpx.Request:
    """https://www.twilio.com/docs/sendgrid/api-reference/mail-send, POST /v3/mail/send"""
    options = mail.options
    recipients: dict[str, list[dict[str, str]]] = {"to": [], "cc": [], "bcc": []}
    seen: set[str] = set()
    for kind, addresses in zip(recipients, (mail.to, options.get("cc"), options.get("bcc")), strict=True):
        for person in map(_person, addresses or ()):
            if person["email"] not in seen:  # SendGrid refuses duplicates
                recipients[kind].append(person)
            seen.add(person["email"])
    document = {
        "personalizations": [{kind: persons for kind, persons in recipients.items() if persons}],
        "from": _person(options["from_address"]),
        "subject": mail.subject,
        "content": [
            {"type": "text/plain", "value": mail.body or " "},  # SendGrid refuses an empty text
            *([{"type": "text/html", "value": options["html_body"]}] if options.get("html_body") else ()),
        ],
        "headers": mail.headers(),
        "attachments": [
            _without_none(
                content=_encoded(file.content),
                filename=file.filename,
                type=file.content_type,
                disposition=file.disposition,
                content_id=file.content_id,
            )
            for file in mail.attachments
        ],
    }
    return _json_request(f"{base}/v3/mail/send", account, document)


def _resend(base: str, account: Account, mail: Mail) -> httpx.Request:
    """https://resend.com/docs/api-reference/emails/send-email, POST /emails"""
    options = mail.options
    document = {
        "from": options["from_address"],
        "to": list(mail.to),
        "cc": list(options.get("cc") or ()),
        "bcc": list(options.get("bcc") or ()),
        "subject": mail.subject,
        "text": mail.body,
        "html": options.get("html_body"),
        "headers": mail.headers(),
        "attachments": [
            _without_none(
                content=_encoded(file.content),
                filename=file.filename,
                content_type=file.content_type,
                content_id=file.content_id,
            )
            for file in mail.attachments
        ],
    }
    return _json_request(f"{base}/emails", account, document)


def _ses(base: str, account: Account, mail: Mail) -> httpx.Request:
    """https://docs.aws.amazon.com/ses/latest/APIReference-V2, POST /v2/email/outbound-emails"""
    document = {
        "FromEmailAddress": mail.options["from_address"],
        "Destination": {
            "ToAddresses": list(mail.to),
            "CcAddresses": list(mail.options.get("cc") or ()),
            "BccAddresses": list(mail.options.get("bcc") or ()),
        },
        "Content": {"Raw": {"Data": _encoded(mail.mime())}},
    }
    body = json.dumps(document).encode()
    url = f"{base}/v2/email/outbound-emails"
    fields = {"content-type": "application/json", "host": urlsplit(url).netloc}
    if account.session_token:
        fields["x-amz-security-token"] = account.session_token
    signed = sign_request("POST", url, fields, body, account, "ses", datetime.now(UTC))
    return httpx.Request("POST", url, headers=signed, content=body)


APIS = {
    "mailgun": Api("https://api.mailgun.net", _mailgun, lambda response: _member(response, "id")),
    "sendgrid": Api(
        "https://api.sendgrid.com",
        _sendgrid,
        lambda response: response.headers.get("x-message-id"),
        "x-ratelimit-reset",
    ),
    "resend": Api("https://api.resend.com", _resend, lambda response: _member(response, "id")),
    "ses": Api("https://email.{region}.amazonaws.com", _ses, lambda response: _member(response, "MessageId")),
}
"""The services, by their name in `EMAIL_PROVIDER`."""


def sign_request(
    method: str,
    url: str,
    fields: Mapping[str, str],
    body: bytes,
    account: Account,
    service: str,
    now: datetime,
) -> dict[str, str]:
    """Return header fields with an AWS Signature Version 4 over all of them, for a URL without a query."""
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    fields = {**{name.lower(): value.strip() for name, value in fields.items()}, "x-amz-date": moment}
    names = ";".join(sorted(fields))
    canonical = "\n".join(
        [
            *(method, urlsplit(url).path or "/", ""),
            *(f"{name}:{fields[name]}" for name in sorted(fields)),
            *("", names, hashlib.sha256(body).hexdigest()),
        ]
    )
    scope = f"{moment[:8]}/{account.region}/{service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{account.key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}".encode(), "sha256").hex()
    credential = f"Credential={account.key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**fields, "authorization": f"AWS4-HMAC-SHA256 {credential}"}


def _json_request(url: str, account: Account, document: Mapping[str, Any]) -> httpx.Request:
    """Return a POST request with the members of a document that are not empty."""
    members = {name: value for name, value in document.items() if value not in (None, [], {})}
    return httpx.Request("POST", url, headers={"Authorization": f"Bearer {account.key}"}, json=members)


def _refusal(response: httpx.Response, retry_field: str) -> str:
    """Return the error message for a refused e-mail, with the service's reason."""
    reason = _reason(response)[:_LONGEST_REASON]
    text = f"the service answered {response.status_code} {reason}".rstrip()
    wait = response.headers.get(retry_field)
    return (
        f"{text}; {retry_field}: {wait}"
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS and wait
        else text
    )


def _reason(response: httpx.Response) -> str:
    document = _document(response)
    errors = document.get("errors")  # SendGrid has a list
    if isinstance(errors, list):
        return "; ".join(str(error.get("message", error)) for error in errors if isinstance(error, dict))
    return str(document.get("message") or document.get("Message") or response.reason_phrase)


def _member(response: httpx.Response, name: str) -> str | None:
    value = _document(response).get(name)
    return value if isinstance(value, str) else None


def _document(response: httpx.Response) -> dict[str, Any]:
    try:
        document = response.json()
    except ValueError:
        return {}  # for example the error page of a proxy
    return document if isinstance(document, dict) else {}


def _person(address: str) -> dict[str, str]:
    name, email = parseaddr(address)
    return {"email": email or address, "name": name} if name else {"email": email or address}


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _without_none(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


@cache
def _tls_context() -> SSLContext:
    """Return the TLS context; cached, because creating it takes longer than sending an e-mail."""
    return httpx.create_ssl_context()
