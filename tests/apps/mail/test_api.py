"""The endpoints around the limiter."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headgate_services.mail import GlobalRateLimiter
from headgate_services.mail.providers import ProviderError
from headgate_services.mail.services import get_rate_limiter
from tests.apps.mail.conftest import Start

MEGABYTE = 1024 * 1024


def attachment(content: bytes = b"hi", **fields: Any) -> dict[str, Any]:
    encoded = base64.b64encode(content).decode()
    return {"filename": "a.txt", "content_type": "text/plain", "content_base64": encoded, **fields}


# --- Health and authentication


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"X-API-Key": "right"}, 200),
        ({"X-API-Key": "wrong"}, 401),
        ({"X-API-Key": ""}, 401),
        ({"Authorization": "Bearer right"}, 200),
        ({"Authorization": "bearer right"}, 200),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic right"}, 401),
        ({"X-API-Key": "wrong", "Authorization": "Bearer right"}, 401),
        ({"X-API-Key": "right", "Authorization": "Bearer wrong"}, 200),
    ],
)
async def test_the_api_key_is_asked_for(start: Start, headers: dict[str, str], status: int) -> None:
    service = await start(api_key="right")
    service.client.headers.pop("X-API-Key")
    answer = await service.client.get("/v1/inboxes", headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json() == {"detail": "Missing or invalid API key"}
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_key_is_asked_for_before_the_body_is_looked_at(start: Start) -> None:
    service = await start(api_key="right")
    service.client.headers["X-API-Key"] = "wrong"
    assert (await service.client.post("/v1/messages", content="{")).status_code == 401


async def test_only_paths_under_v1_need_a_key(start: Start) -> None:
    """surroundings 1.6, 11: there, /v1x needed one too."""
    service = await start(api_key="right")
    service.client.headers.pop("X-API-Key")
    assert (await service.client.get("/v1x")).status_code == 404
    assert (await service.client.get("/v1")).status_code == 401
    assert (await service.client.get("/v1/attachments/unknown/content")).status_code == 404
    assert (await service.client.get("/v1/attachments?message_id=x")).status_code == 401


async def test_browsers_may_read_every_refusal(start: Start) -> None:
    """surroundings 1.6, 11: there, a 401 came without CORS headers."""
    origin = {"Origin": "https://app.example"}
    service = await start(
        environment="production",
        api_key="right",
        cors_origins="https://app.example, https://b.example",
        global_send_rate_limit_per_minute=1,
    )
    assert await service.send_many(1) == [201]
    refused = await service.client.post("/v1/messages", json=service.mail(), headers=origin)
    assert refused.status_code == 429
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert refused.headers["access-control-expose-headers"].startswith("Retry-After, RateLimit, ")
    unknown = await service.client.get("/v1/inboxes", headers={**origin, "X-API-Key": "wrong"})
    assert unknown.status_code == 401
    assert unknown.headers["access-control-allow-origin"] == "https://app.example"
    stranger = await service.client.get("/v1/inboxes", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in stranger.headers


async def test_a_preflight_needs_no_key(start: Start) -> None:
    service = await start(api_key="right")
    service.client.headers.pop("X-API-Key")
    asked = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "X-API-Key",
    }
    answer = await service.client.options("/v1/messages", headers=asked)
    assert answer.status_code == 200
    assert "POST" in answer.headers["access-control-allow-methods"]


# --- Sending: refusals and their order


@pytest.mark.parametrize(
    "fields",
    [
        {"to": []},
        {"to": "a@example.com"},
        {"subject": ""},
        {"subject": None},
        {"body": None},
        {"inbox_id": 5},
        {"attachments": [attachment(filename="")]},
        {"attachments": [attachment(filename="x" * 256)]},
        {"attachments": [attachment(content_type="")]},
        {"attachments": [attachment(disposition="hidden")]},
        {"attachments": [attachment(color="red")]},
        {"attachments": [attachment(filename="a\r\nX-Evil: 1")]},
        {"attachments": [attachment(content_type="text/plain\nX-Evil: 1")]},
        {"attachments": [attachment(content_id="a\nb")]},
    ],
)
async def test_fields_are_checked(start: Start, fields: dict[str, Any]) -> None:
    service = await start()
    refused = await service.send(**fields)
    assert refused.status_code == 422
    assert isinstance(refused.json()["detail"], list)
    assert service.provider.calls == []


async def test_a_body_that_is_not_json_is_refused(start: Start) -> None:
    service = await start()
    for content in ("{", "[]", '"x"', "null", b"\xff\xfe", '{"subject": "\\ud800"}'):
        answer = await service.client.post(
            "/v1/messages", content=content, headers={"Content-Type": "application/json"}
        )
        assert 400 <= answer.status_code < 500, content


async def test_half_a_character_is_refused(start: Start) -> None:
    """JSON can say half of a surrogate pair; nothing that stores or sends text can."""
    service = await start()
    for fields in ({"subject": "\ud800"}, {"to": ["\ud800@x.com"]}, {"attachments": [{"\ud800": 1}]}):
        escaped = json.dumps(service.mail() | fields)
        answer = await service.client.post(
            "/v1/messages", content=escaped, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 422
        assert {"type", "loc", "msg"} == set(answer.json()["detail"][0])
    assert service.provider.calls == []


async def test_unknown_fields_are_ignored_and_an_empty_body_is_a_body(start: Start) -> None:
    service = await start()
    assert (await service.send(body="", color="red")).status_code == 201


@pytest.mark.requirement("N-27")
async def test_refusals_come_in_their_order(start: Start) -> None:
    service = await start(global_send_rate_limit_per_minute=1, outbound_domain_blocklist=r"evil\.com")
    await service.send()
    everything = {"reply_to_thread_id": "nowhere", "attachments": [attachment(content_base64="!")]}
    unknown_inbox = await service.send("x@evil.com", inbox_id="nowhere", **everything)
    assert (unknown_inbox.status_code, unknown_inbox.json()["detail"]) == (404, "Inbox nowhere not found")
    assert (await service.send("x@evil.com", **everything)).status_code == 403
    assert (await service.send(**everything)).status_code == 429
    service.clock.advance(61)
    unknown_thread = await service.send(**everything)
    assert (unknown_thread.status_code, unknown_thread.json()["detail"]) == (404, "Thread nowhere not found")
    not_base64 = await service.send(attachments=everything["attachments"])
    assert not_base64.status_code == 400
    assert not_base64.json()["detail"].startswith("Invalid base64 content in attachment 0: ")


async def test_a_thread_of_another_inbox_cannot_be_replied_to(start: Start) -> None:
    """surroundings 1.6, 8."""
    service = await start()
    thread_id = (await service.send()).json()["thread_id"]
    other = {"name": "Other", "email_username": "other"}
    other_id = (await service.client.post("/v1/inboxes", json=other)).json()["id"]
    assert (await service.send(inbox_id=other_id, reply_to_thread_id=thread_id)).status_code == 404
    assert (await service.send(reply_to_thread_id=thread_id)).status_code == 201


async def test_a_failed_message_is_stored_but_never_replied_to(start: Start) -> None:
    service = await start()
    first = (await service.send()).json()
    service.clock.advance(1)
    service.provider.error = ProviderError("down")
    failed = (await service.send(reply_to_thread_id=first["thread_id"])).json()
    service.provider.error = None
    service.clock.advance(1)
    await service.send(reply_to_thread_id=first["thread_id"])
    assert service.provider.calls[-1]["in_reply_to"] == f"<{first['id']}@demo.nornweave.local>"
    stored = await service.get(f"/v1/messages/{failed['id']}")
    assert stored["metadata"]["status"] == "failed"
    assert stored["metadata"]["error"] == failed["error"]
    assert stored["provider_message_id"] is None


# --- Attachments


async def test_attachments_reach_the_provider_and_the_store(start: Start) -> None:
    service = await start()
    inline = attachment(
        b"logo", filename="l.png", content_type="image/png", disposition="inline", content_id="l"
    )
    sent = (await service.send(attachments=[attachment(), inline])).json()
    [one, two] = service.provider.calls[0]["attachments"]
    assert (one.content, one.filename, one.disposition, one.content_id) == (
        b"hi",
        "a.txt",
        "attachment",
        None,
    )
    assert (two.content, two.disposition, two.content_id) == (b"logo", "inline", "l")
    listed = (await service.get("/v1/attachments", message_id=sent["id"]))["items"]
    assert sorted((item["filename"], item["size"]) for item in listed) == [("a.txt", 2), ("l.png", 4)]
    assert (await service.get(f"/v1/messages/{sent['id']}"))["size"] == len("Hi") + 6


async def test_a_download_is_saved_and_never_shown(start: Start) -> None:
    service = await start(api_key="k")
    page = attachment(b"<script>", filename='ev"il\u202f.html', content_type="text/html")
    sent = (await service.send(attachments=[page])).json()
    [item] = (await service.get("/v1/attachments", message_id=sent["id"]))["items"]
    service.client.headers.pop("X-API-Key")
    download = await service.client.get(f"/v1/attachments/{item['id']}/content")
    assert download.content == b"<script>"
    assert download.headers["content-type"] == "application/octet-stream"
    assert download.headers["x-content-type-options"] == "nosniff"
    assert download.headers["content-disposition"] == "attachment; filename*=UTF-8''ev%22il%E2%80%AF.html"


@pytest.mark.parametrize(
    ("files", "status", "detail"),
    [
        ([attachment(b"x" * MEGABYTE)], 201, ""),
        ([attachment(b"x" * (MEGABYTE + 1))], 413, "Attachment 0 is above 1 MB"),
        ([attachment(b"x" * MEGABYTE)] * 2, 201, ""),
        ([attachment(b"x" * MEGABYTE)] * 2 + [attachment()], 413, "Attachments are above 2 MB together"),
        ([attachment()] * 4, 422, "4 attachments are more than the 3 allowed"),
        ([attachment(), attachment(b"")], 422, "Attachment 1 has empty content"),
        ([attachment(content_base64="aGk")], 400, "Invalid base64 content in attachment 0: "),
        ([attachment(content_base64="aG k=")], 400, "Invalid base64 content in attachment 0: "),
        ([attachment(), attachment(content_base64="ä===")], 400, "Invalid base64 content in attachment 1: "),
    ],
)
async def test_the_limits_of_attachments_are_enforced(
    start: Start, files: list[dict[str, Any]], status: int, detail: str
) -> None:
    """surroundings 1.6, 9: there, none was, and the good ones before a bad one stayed behind."""
    service = await start(attachment_max_size_mb=1, attachment_max_total_size_mb=2, attachment_max_count=3)
    answer = await service.send(attachments=files)
    assert answer.status_code == status
    if status != 201:
        assert answer.json()["detail"].startswith(detail)
        assert service.provider.calls == []
        assert (await service.messages())["total"] == 0


async def test_a_request_above_all_limits_is_not_read_to_its_end(start: Start) -> None:
    service = await start(attachment_max_total_size_mb=1)
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b"x" * MEGABYTE

    answer = await service.client.post("/v1/messages", content=endless())
    assert answer.status_code == 413
    assert "Request body is above" in answer.json()["detail"]
    assert read < 10


# --- Inboxes


async def test_inboxes_are_created_listed_and_deleted(start: Start) -> None:
    service = await start(email_domain="acme.test")
    created = await service.client.post("/v1/inboxes", json={"name": "Sales", "email_username": "Sales"})
    assert created.status_code == 201
    inbox = created.json()
    assert inbox == {
        "id": inbox["id"],
        "email_address": "Sales@acme.test",
        "name": "Sales",
        "provider_config": {},
    }
    assert await service.get(f"/v1/inboxes/{inbox['id']}") == inbox
    assert (await service.get("/v1/inboxes"))["count"] == 2
    assert (await service.get("/v1/inboxes", limit=1))["count"] == 1
    assert (await service.get("/v1/inboxes", offset=2)) == {"items": [], "count": 0}
    for taken in ("Sales", "sales"):
        again = await service.client.post("/v1/inboxes", json={"name": "x", "email_username": taken})
        assert again.status_code == 409
    assert (await service.client.delete(f"/v1/inboxes/{inbox['id']}")).status_code == 204
    assert (await service.client.delete(f"/v1/inboxes/{inbox['id']}")).status_code == 404
    assert (await service.client.get(f"/v1/inboxes/{inbox['id']}")).status_code == 404


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "", "email_username": "x"},
        {"name": "x", "email_username": ""},
        {"name": "x"},
        {"name": "x", "email_username": "x", "color": "red"},
        {"name": "x", "email_username": "two words"},
        {"name": "x", "email_username": "x\r\ny"},
    ],
)
async def test_a_bad_inbox_is_refused(start: Start, fields: dict[str, str]) -> None:
    service = await start()
    assert (await service.client.post("/v1/inboxes", json=fields)).status_code == 422


async def test_an_inbox_needs_a_domain(start: Start) -> None:
    service = await start(email_provider="smtp", smtp_host="localhost")
    refused = await service.client.post("/v1/inboxes", json={"name": "x", "email_username": "x"})
    assert refused.status_code == 422
    assert "EMAIL_DOMAIN" in refused.json()["detail"]
    assert (await service.client.get("/v1/demo/outbox")).status_code == 404


# --- Messages and threads


async def test_a_stored_message_has_all_its_fields(start: Start) -> None:
    """surroundings 1.6, 13: there, subject, sender and recipients were empty."""
    service = await start()
    sent = (await service.send("a@example.com", subject="S", body="one\n\n two")).json()
    [message] = (await service.messages())["items"]
    assert message == {
        "id": sent["id"],
        "thread_id": sent["thread_id"],
        "inbox_id": service.inbox_id,
        "direction": "outbound",
        "provider_message_id": "fake-1",
        "subject": "S",
        "from_address": "demo@demo.nornweave.local",
        "to_addresses": ["a@example.com"],
        "cc_addresses": [],
        "bcc_addresses": [],
        "reply_to_addresses": [],
        "text": "one\n\n two",
        "html": "<p>one</p>\n<p>two</p>\n",
        "content_clean": "one\n\n two",
        "timestamp": "2023-11-14T22:14:00Z",
        "labels": [],
        "preview": "one two",
        "size": 9,
        "in_reply_to": None,
        "references": [],
        "metadata": {
            "status": "sent",
            "error": None,
            "message_id": f"<{sent['id']}@demo.nornweave.local>",
        },
        "created_at": "2023-11-14T22:14:00Z",
    }


async def test_messages_are_listed_searched_and_paged(start: Start) -> None:
    service = await start()
    for subject in ("Invoice 1", "Invoice 2", "Party"):
        await service.send(subject=subject)
        service.clock.advance(1)
    assert [item["subject"] for item in (await service.messages())["items"]] == [
        "Party",
        "Invoice 2",
        "Invoice 1",
    ]
    page = await service.get("/v1/messages", inbox_id=service.inbox_id, q="invoice", limit=1, offset=1)
    assert [item["subject"] for item in page["items"]] == ["Invoice 1"]
    assert (page["count"], page["total"]) == (1, 2)
    assert (await service.get("/v1/messages", inbox_id=service.inbox_id, q="%"))["total"] == 0
    thread_id = page["items"][0]["thread_id"]
    assert (await service.get("/v1/messages", thread_id=thread_id))["total"] == 1
    assert (await service.client.get("/v1/messages")).status_code == 422
    assert (await service.client.get("/v1/messages/nowhere")).status_code == 404
    for wrong in ("limit=0", "limit=x", "offset=-1", "offset=99999999999999999999"):
        answer = await service.client.get(f"/v1/messages?inbox_id=x&{wrong}")
        assert answer.status_code == 422


async def test_threads_are_listed_newest_first_and_shown_as_conversations(start: Start) -> None:
    service = await start()
    old = (await service.send(subject="Old")).json()["thread_id"]
    service.clock.advance(1)
    new = (await service.send(subject="New")).json()["thread_id"]
    service.clock.advance(1)
    await service.send(reply_to_thread_id=old, body="again")
    listed = await service.get("/v1/threads", inbox_id=service.inbox_id)
    assert [item["id"] for item in listed["items"]] == [old, new]
    assert set(listed["items"][0]) == {
        "id", "inbox_id", "subject", "summary", "last_message_at", "participant_hash"
    }  # fmt: skip
    thread = await service.get(f"/v1/threads/{old}")
    assert (thread["subject"], thread["summary"]) == ("Old", None)
    assert [(turn["role"], turn["content"]) for turn in thread["messages"]] == [
        ("assistant", "Hi"),
        ("assistant", "again"),
    ]
    assert (await service.client.get("/v1/threads/nowhere")).status_code == 404
    assert (await service.client.get("/v1/threads")).status_code == 422


# --- The demo


async def test_the_demo_shows_what_it_would_have_sent(start: Start) -> None:
    """surroundings 1.6, 10: there, every made-up id was the same."""
    service = await start(real_provider=True)
    ids = {(await service.send(attachments=[attachment()])).json()["provider_message_id"] for _ in range(3)}
    outbox = await service.get("/v1/demo/outbox", limit=2)
    assert (outbox["count"], outbox["total"]) == (2, 3)
    assert {item["id"] for item in outbox["items"]} < ids
    assert outbox["items"][0]["to_addresses"] == ["ann@example.com"]
    assert outbox["items"][0]["attachments"] == ["a.txt"]


async def test_the_demo_delivers_to_its_own_inboxes(start: Start) -> None:
    service = await start(real_provider=True)
    bob = (await service.client.post("/v1/inboxes", json={"name": "Bob", "email_username": "bob"})).json()
    sent = (await service.send("BOB@demo.nornweave.local", "bob@demo.nornweave.local", body="ping")).json()
    [copy] = (await service.get("/v1/messages", inbox_id=bob["id"]))["items"]
    assert (copy["direction"], copy["text"], copy["from_address"]) == (
        "inbound",
        "ping",
        "demo@demo.nornweave.local",
    )
    service.clock.advance(1)
    demo = "demo@demo.nornweave.local"
    await service.send(demo, inbox_id=bob["id"], reply_to_thread_id=copy["thread_id"], body="pong")
    thread = await service.get(f"/v1/threads/{sent['thread_id']}")
    assert [(turn["role"], turn["content"]) for turn in thread["messages"]] == [
        ("assistant", "ping"),
        ("user", "pong"),
    ]


async def test_the_inbound_filter_guards_the_demo_inboxes(start: Start) -> None:
    service = await start(real_provider=True, inbound_domain_blocklist=r".*\.local")
    assert (await service.send("demo@demo.nornweave.local")).json()["status"] == "sent"
    assert [item["direction"] for item in (await service.messages())["items"]] == ["outbound"]


# --- When things go wrong


async def test_nothing_is_sent_while_the_rate_limit_store_is_down(start: Start, tmp_path: Any) -> None:
    service = await start()
    limiter = GlobalRateLimiter(5, 0, store=f"sqlite:///{tmp_path / 'limits.db'}")
    await limiter.aclose()
    service.app.dependency_overrides[get_rate_limiter] = lambda: limiter
    for answer in (await service.send(), await service.client.get("/v1/rate-limit")):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert service.provider.calls == []


async def test_a_send_that_cannot_be_recorded_is_still_stored_and_told(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgetful(GlobalRateLimiterWithoutHold):
        def record(self) -> None:
            raise ConnectionError("lost")

    service = await start()
    service.app.dependency_overrides[get_rate_limiter] = Forgetful
    assert (await service.send()).json()["status"] == "sent"
    assert (await service.messages())["total"] == 1
    assert "was sent but could not be counted" in caplog.text


class GlobalRateLimiterWithoutHold:
    """As much of a limiter as the service asks for."""

    def check(self) -> Any:
        return GlobalRateLimiter().check()

    def record(self) -> None:
        """Count nothing."""
