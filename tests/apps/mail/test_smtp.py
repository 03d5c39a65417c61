"""Sending through a real SMTP server, good, slow and bad."""

from __future__ import annotations

import base64
import email
import email.policy
import socket
import ssl
from email.message import EmailMessage
from typing import Any

import pytest

from headgate_services.mail.providers import OutgoingAttachment, ProviderError
from headgate_services.mail.providers.smtp import SmtpProvider
from tests.apps.mail.conftest import Start
from tests.apps.mail.support import CERTIFICATE, MailServer, mail_server


def settings(port: int, **more: Any) -> dict[str, Any]:
    """Return the settings of a service that sends through a server on this machine."""
    return {
        "real_provider": True,
        "email_provider": "smtp",
        "email_domain": "mail.test",
        "smtp_host": "127.0.0.1",
        "smtp_port": port,
        "smtp_use_tls": False,
        "global_send_rate_limit_per_minute": 2,
        **more,
    }


def parsed(server: MailServer) -> EmailMessage:
    content = server.received[-1].content
    assert isinstance(content, bytes)
    message = email.message_from_bytes(content, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    return message


@pytest.mark.requirement("N-28")
async def test_a_mail_arrives_as_it_was_written(start: Start) -> None:
    async with mail_server() as server:
        service = await start(**settings(server.port))
        file = {
            "filename": "Grüße.txt",
            "content_type": "text/plain; charset=utf-8",
            "content_base64": base64.b64encode("schöne Grüße".encode()).decode(),
        }
        sent = await service.send(
            "a@example.com",
            "b@example.org",
            subject="Grüße\naus Köln",
            body="Hallo *Welt* ☀\n.\n",
            attachments=[file],
        )
        assert sent.json()["status"] == "sent"
        message = parsed(server)
        assert server.received[-1].rcpt_tos == ["a@example.com", "b@example.org"]
        assert server.received[-1].mail_from == message["From"] == "post@mail.test"
        assert message["To"] == "a@example.com, b@example.org"
        assert message["Subject"] == "Grüße aus Köln"
        assert (
            message["Message-ID"] == sent.json()["provider_message_id"] == f"<{sent.json()['id']}@mail.test>"
        )
        text, html = message.get_body(("plain",)), message.get_body(("html",))
        assert text is not None
        assert html is not None
        assert text.get_content().splitlines() == ["Hallo *Welt* ☀", "."]
        assert html.get_content().splitlines() == ["<p>Hallo <em>Welt</em> ☀<br />", ".</p>"]
        [attachment] = message.iter_attachments()
        assert attachment.get_filename() == "Grüße.txt"
        assert attachment.get_content() == "schöne Grüße"
        assert (await service.counts())["per-minute"] == 1


async def test_a_reply_names_what_it_answers(start: Start) -> None:
    """surroundings 1.6, 8: there, the reply headers never reached the provider."""
    async with mail_server() as server:
        service = await start(**settings(server.port, global_send_rate_limit_per_minute=0))
        first = (await service.send()).json()
        ids = [first["provider_message_id"]]
        for _ in range(2):
            service.clock.advance(1)
            reply = (await service.send(reply_to_thread_id=first["thread_id"])).json()
            assert reply["thread_id"] == first["thread_id"]
            assert parsed(server)["In-Reply-To"] == ids[-1]
            assert str(parsed(server)["References"]).split() == ids
            ids.append(reply["provider_message_id"])


@pytest.mark.requirement("N-31")
async def test_a_refused_recipient_fails_the_send_for_all(start: Start) -> None:
    async with mail_server() as server:
        service = await start(**settings(server.port))
        server.refused = {"nobody@example.com"}
        for _ in range(3):
            failed = (await service.send("ann@example.com", "nobody@example.com")).json()
            assert failed["status"] == "failed"
            assert failed["provider_message_id"] is None
            assert failed["error"] == (
                "Provider smtp failed (the server answered 550 5.1.1 no such user); "
                "the message was recorded but not delivered"
            )
        assert server.tries == 0
        assert await service.send_many(3) == [201, 201, 429]


@pytest.mark.requirement("N-31")
async def test_a_connection_dropped_halfway_fails_the_send(start: Start) -> None:
    async with mail_server() as server:
        service = await start(**settings(server.port))
        server.drops = True
        for _ in range(3):
            assert (await service.send()).json()["status"] == "failed"
        assert server.tries == 3
        assert await service.counts() == {"per-minute": 0, "per-hour": 0}
        server.drops = False
        assert await service.send_many(3) == [201, 201, 429]


@pytest.mark.requirement("N-31")
async def test_a_server_that_never_answers_fails_the_send(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, since nobody has to accept for that
        service = await start(**settings(silent.getsockname()[1], smtp_timeout=0.05))
        failed = (await service.send()).json()
        assert failed["status"] == "failed"
        assert "no answer within 0.05 s" in failed["error"]
        assert (await service.counts())["per-minute"] == 0


async def test_a_server_that_never_answers_to_the_data_fails_the_send(start: Start) -> None:
    async with mail_server() as server:
        service = await start(**settings(server.port, smtp_timeout=0.3))
        server.gate.clear()
        assert "no answer within 0.3 s" in (await service.send()).json()["error"]
        server.gate.set()


@pytest.mark.requirement("N-31")
async def test_no_server_at_all_fails_the_send(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    service = await start(**settings(port))
    failed = (await service.send()).json()
    assert failed["status"] == "failed"
    assert f"127.0.0.1:{port}" in failed["error"]


async def test_starttls_with_credentials(start: Start) -> None:
    async with mail_server(tls=True, password="right") as server:
        secure = {
            "smtp_host": "localhost",
            "smtp_use_tls": True,
            "smtp_ca_file": str(CERTIFICATE),
            "smtp_username": "post",
        }
        good = await start(**settings(server.port, smtp_password="right", **secure))
        assert (await good.send()).json()["status"] == "sent"
        assert server.received[-1].mail_from == "post@mail.test"
        bad = await start(**settings(server.port, smtp_password="wrong", **secure))
        failed = (await bad.send()).json()
        assert failed["status"] == "failed"
        assert "535" in failed["error"]
        assert "wrong" not in failed["error"]


async def test_a_server_without_starttls_is_sent_nothing(start: Start) -> None:
    async with mail_server() as server:
        service = await start(**settings(server.port, smtp_use_tls=True))
        assert (await service.send()).json()["status"] == "failed"
        assert server.tries == 0


async def test_a_certificate_of_unknown_origin_is_not_trusted(start: Start) -> None:
    async with mail_server(tls=True) as server:
        service = await start(**settings(server.port, smtp_host="localhost", smtp_use_tls=True))
        failed = (await service.send()).json()
        assert failed["status"] == "failed"
        assert "CERTIFICATE_VERIFY_FAILED" in failed["error"]


async def test_implicit_tls() -> None:
    async with mail_server(implicit_tls=True) as server:
        provider = SmtpProvider(
            "localhost",
            server.port,
            tls=ssl.create_default_context(cafile=str(CERTIFICATE)),
            implicit_tls=True,
        )
        answer = await provider.send_email(
            ["a@example.com"], "Hi", "x", from_address="post@mail.test", message_id="<1@mail.test>"
        )
        assert answer == "<1@mail.test>"
        assert len(server.received) == 1


async def test_everything_that_a_mail_can_have() -> None:
    async with mail_server() as server:
        provider = SmtpProvider("127.0.0.1", server.port)
        files = [
            OutgoingAttachment("logo.png", "image/png", b"\x89PNG", "inline", "logo"),
            OutgoingAttachment("odd.bin", "nonsense", b"\x00\x01"),
            OutgoingAttachment("mail.eml", "message/rfc822", b"Subject: x\n\ny"),
        ]
        await provider.send_email(
            ["jürgen@bücher.example"],
            "Hi",
            "text",
            from_address="post@mail.test",
            cc=["cc@example.com"],
            bcc=["bcc@example.com"],
            attachments=files,
            html_body="<p>text</p>",
        )
        message = parsed(server)
        assert server.received[-1].rcpt_tos == ["jürgen@bücher.example", "cc@example.com", "bcc@example.com"]
        assert message["Cc"] == "cc@example.com"
        assert "bcc@example.com" not in server.text()
        html = message.get_body(("html",))
        assert html is not None
        assert html.get_content().strip() == "<p>text</p>"
        assert [(part.get_filename(), part.get_content_type()) for part in message.iter_attachments()] == [
            ("logo.png", "image/png"),
            ("odd.bin", "application/octet-stream"),
            ("mail.eml", "application/octet-stream"),
        ]


async def test_a_header_that_cannot_be_written_is_refused_before_anything_is_sent() -> None:
    provider = SmtpProvider("127.0.0.1", 1)
    with pytest.raises(ProviderError, match="cannot be written"):
        await provider.send_email(
            ["a@example.com\r\nBcc: b@example.com"], "Hi", "x", from_address="p@mail.test"
        )


@pytest.mark.parametrize(
    ("given", "missing"),
    [({"smtp_host": ""}, "SMTP_HOST"), ({"smtp_username": "u"}, "SMTP_PASSWORD")],
)
async def test_missing_credentials_are_met_before_the_fields_are_looked_at(
    start: Start, given: dict[str, str], missing: str
) -> None:
    service = await start(**settings(25, **given))
    refused = await service.client.post("/v1/messages", json={})
    assert refused.status_code == 422
    assert refused.json() == {"detail": f"EMAIL_PROVIDER is smtp, but these are not set: {missing}"}
    assert (await service.client.get("/v1/inboxes")).status_code == 200
