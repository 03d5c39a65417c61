"""The providers with an HTTP API, against a server that speaks as the real ones do."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from headgate_services.mail.providers import OutgoingAttachment, ProviderError
from headgate_services.mail.providers.base import MailOptions
from headgate_services.mail.providers.http_apis import APIS, Account, HttpProvider, sign_request
from tests.apps.mail.conftest import Start
from tests.apps.mail.mail_apis import ACCEPTED, KEY, RATE_LIMITS, MailApis, mail_apis, read_mime

PICTURE = OutgoingAttachment("sun.png", "image/png", b"\x89PNG", "inline", "sun")
OPTIONS: MailOptions = {
    "from_address": "post@example.org",
    "message_id": "<1@example.org>",
    "in_reply_to": "<0@example.org>",
    "references": ["<0@example.org>"],
    "cc": ["Bob <bob@example.com>"],
    "bcc": ["eve@example.com"],
    "attachments": [PICTURE],
    "html_body": "<p>Hi</p>",
}
IDS = {
    "mailgun": "<20260101.1@example.org>",
    "sendgrid": "14c5d75ce93.dfd.64b469",
    "resend": "49a3999c-0ce1-4ea6-ab68-afcd6dc2e794",
    "ses": "010001801e4c-5f2b",
}
CREDENTIALS: dict[str, dict[str, Any]] = {
    "mailgun": {"mailgun_api_key": KEY, "mailgun_domain": "example.org"},
    "sendgrid": {"sendgrid_api_key": KEY},
    "resend": {"resend_api_key": KEY},
    "ses": {"aws_access_key_id": "AKID", "aws_secret_access_key": KEY, "aws_region": "eu-west-1"},
}


@pytest.fixture
def apis() -> Iterator[MailApis]:
    with mail_apis() as apis:
        yield apis


def provider(name: str, apis: MailApis, **options: Any) -> HttpProvider:
    account = Account(KEY, key_id="AKID", domain="example.org", region="eu-west-1")
    return HttpProvider(name, account, apis.url, **options)


async def send(name: str, apis: MailApis) -> str | None:
    return await provider(name, apis).send_email(["Ann <ann@example.com>"], "Hello", "Hi", **OPTIONS)


async def test_mailgun_gets_the_message_and_all_recipients(apis: MailApis) -> None:
    await send("mailgun", apis)
    form = apis.last_form()
    assert form["to"] == [b"ann@example.com", b"bob@example.com", b"eve@example.com"]
    check_mime(form["message"][0])


async def test_ses_gets_the_message_and_all_recipients(apis: MailApis) -> None:
    await send("ses", apis)
    document = apis.last()
    assert document["FromEmailAddress"] == "post@example.org"
    assert document["Destination"] == {
        "ToAddresses": ["Ann <ann@example.com>"],
        "CcAddresses": ["Bob <bob@example.com>"],
        "BccAddresses": ["eve@example.com"],
    }
    check_mime(base64.b64decode(document["Content"]["Raw"]["Data"]))


def check_mime(content: bytes) -> None:
    message = read_mime(content)
    assert message["To"] == "Ann <ann@example.com>"
    assert message["Cc"] == "Bob <bob@example.com>"
    assert message["In-Reply-To"] == "<0@example.org>"
    assert b"eve@" not in content
    html = message.get_body(("html",))
    assert html is not None
    assert html.get_content().strip() == "<p>Hi</p>"
    assert [part.get_content() for part in message.iter_attachments()] == [b"\x89PNG"]


async def test_sendgrid_gets_the_parts(apis: MailApis) -> None:
    await send("sendgrid", apis)
    assert apis.last() == {
        "personalizations": [
            {
                "to": [{"email": "ann@example.com", "name": "Ann"}],
                "cc": [{"email": "bob@example.com", "name": "Bob"}],
                "bcc": [{"email": "eve@example.com"}],
            }
        ],
        "from": {"email": "post@example.org"},
        "subject": "Hello",
        "content": [
            {"type": "text/plain", "value": "Hi"},
            {"type": "text/html", "value": "<p>Hi</p>"},
        ],
        "headers": {
            "Message-ID": "<1@example.org>",
            "In-Reply-To": "<0@example.org>",
            "References": "<0@example.org>",
        },
        "attachments": [
            {
                "content": "iVBORw==",
                "filename": "sun.png",
                "type": "image/png",
                "disposition": "inline",
                "content_id": "sun",
            }
        ],
    }


async def test_sendgrid_gets_every_address_once_and_no_empty_text(apis: MailApis) -> None:
    same = ["ann@example.com", "Ann <ann@example.com>"]
    await provider("sendgrid", apis).send_email(same, "x", "", from_address="post@example.org", cc=same)
    document = apis.last()
    assert document["personalizations"] == [{"to": [{"email": "ann@example.com"}]}]
    assert document["content"] == [{"type": "text/plain", "value": " "}]


async def test_resend_gets_the_parts(apis: MailApis) -> None:
    await send("resend", apis)
    document = apis.last()
    assert (document["from"], document["to"]) == ("post@example.org", ["Ann <ann@example.com>"])
    assert (document["cc"], document["bcc"]) == (["Bob <bob@example.com>"], ["eve@example.com"])
    assert (document["text"], document["html"]) == ("Hi", "<p>Hi</p>")
    assert document["headers"]["References"] == "<0@example.org>"
    assert document["attachments"] == [
        {"content": "iVBORw==", "filename": "sun.png", "content_type": "image/png", "content_id": "sun"}
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mailgun", "Too many requests; retry-after: 7"),
        ("sendgrid", "too many requests; x-ratelimit-reset: 1392815263"),
        ("resend", "Too many requests; retry-after: 1"),
        ("ses", "Maximum sending rate exceeded."),
    ],
)
async def test_a_rate_limit_of_the_service_is_an_error_in_its_words(
    name: str, said: str, apis: MailApis
) -> None:
    apis.failures[name] = RATE_LIMITS[name]
    with pytest.raises(ProviderError) as caught:
        await send(name, apis)
    assert str(caught.value) == f"the service answered 429 {said}"
    assert len(apis.requests) == 1  # not sent again


@pytest.mark.parametrize("name", APIS)
async def test_an_answer_that_is_no_json_is_an_error_or_an_unknown_id(name: str, apis: MailApis) -> None:
    apis.failures[name] = (502, {}, ["a proxy's page"])
    with pytest.raises(ProviderError, match="answered 502 Bad Gateway"):
        await send(name, apis)
    apis.failures[name] = (ACCEPTED[name][0], {}, None)
    assert await send(name, apis) is None


async def test_no_connection_is_an_error() -> None:
    gone = HttpProvider("resend", Account(KEY), "http://127.0.0.1:1")
    with pytest.raises(ProviderError, match=r"127\.0\.0\.1:1: "):
        await gone.send_email(["a@b.c"], "x", "y", from_address="post@b.c")


async def test_the_timeout_is_for_the_whole_request_not_for_each_step(apis: MailApis) -> None:
    apis.is_endless = True
    async with asyncio.timeout(60):
        with pytest.raises(ProviderError, match=r"no answer within 0\.1 s"):
            await provider("resend", apis, timeout=0.1).send_email(
                ["a@b.c"], "x", "y", from_address="post@b.c"
            )


@pytest.mark.parametrize("name", ["mailgun", "ses"])
async def test_a_header_that_cannot_be_written_is_an_error(name: str, apis: MailApis) -> None:
    with pytest.raises(ProviderError, match="cannot be written"):
        await provider(name, apis).send_email(["a\r\nBcc: b@c.d"], "x", "y", from_address="post@b.c")
    assert apis.requests == []


@pytest.mark.parametrize(
    ("method", "signature"),
    [
        ("GET", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        ("POST", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
    ],
)
def test_signatures_are_those_of_the_test_suite_of_aws(method: str, signature: str) -> None:
    account = Account("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "AKIDEXAMPLE", region="us-east-1")
    fields = {"Host": "example.amazonaws.com"}
    now = datetime(2015, 8, 30, 12, 36, tzinfo=UTC)
    signed = sign_request(method, "https://example.amazonaws.com/", fields, b"", account, "service", now)
    assert signed["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, "
        f"SignedHeaders=host;x-amz-date, Signature={signature}"
    )


@pytest.mark.parametrize("name", APIS)
async def test_the_service_sends_and_counts_only_what_was_taken(
    name: str, start: Start, apis: MailApis
) -> None:
    service = await start(
        real_provider=True,
        email_provider=name,
        email_domain="example.org",
        email_api_base=apis.url,
        global_send_rate_limit_per_minute=1,
        **CREDENTIALS[name],
    )
    apis.failures[name] = RATE_LIMITS[name]
    refused = (await service.send()).json()
    assert refused["status"] == "failed"
    assert f"Provider {name} failed (the service answered 429" in refused["error"]
    del apis.failures[name]
    sent = (await service.send()).json()
    assert (sent["status"], sent["provider_message_id"]) == ("sent", IDS[name])
    assert (await service.send()).status_code == 429
