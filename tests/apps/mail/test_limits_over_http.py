"""The scenarios of the documents, over HTTP, with a clock that moves when told to."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
from sqlalchemy import event

from headgate_services.mail import GlobalRateLimiter, RateLimitResult, sending
from headgate_services.mail.providers import ProviderError
from headgate_services.mail.rate_limiter import SendWindow
from headgate_services.mail.services import get_rate_limiter
from tests.apps.mail.conftest import Start
from tests.apps.mail.support import START, Service
from tests.apps.processes import until

PER_MINUTE = "global_send_rate_limit_per_minute"
PER_HOUR = "global_send_rate_limit_per_hour"


# --- Configuration


@pytest.mark.requirement("N-01", "N-02")
@pytest.mark.parametrize("limit", [PER_MINUTE, PER_HOUR])
async def test_n01_n02_a_limit_of_two_refuses_the_third(start: Start, limit: str) -> None:
    service = await start(**{limit: 2})
    assert await service.send_many(3) == [201, 201, 429]


@pytest.mark.requirement("N-03", "N-04")
@pytest.mark.parametrize("limits", [{}, {PER_MINUTE: 0, PER_HOUR: 0}], ids=["unset", "zero"])
async def test_n03_n04_without_limits_everything_passes_and_nothing_is_logged(
    start: Start, limits: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="headgate_services.mail.rate_limiter")
    service = await start(**limits)
    answers = [await service.send() for _ in range(200)]
    assert {answer.status_code for answer in answers} == {201}
    fields = {name for answer in answers for name in answer.headers}
    assert not any("retry-after" in name or "ratelimit" in name for name in fields)
    assert (await service.get("/v1/rate-limit")) == {"allowed": True, "retry_after": None, "windows": []}
    assert caplog.records == []


@pytest.mark.requirement("N-05")
async def test_n05_only_the_minute_is_limited(start: Start) -> None:
    service = await start(**{PER_MINUTE: 10, PER_HOUR: 0})
    for _ in range(4):
        assert await service.send_many(11) == [201] * 10 + [429]
        service.clock.advance(61)
    assert len(service.provider.calls) == 40


@pytest.mark.requirement("N-06", "N-41")
async def test_n06_only_the_hour_is_limited(start: Start) -> None:
    service = await start(**{PER_MINUTE: 0, PER_HOUR: 100})
    assert await service.send_many(100) == [201] * 100
    refused = await service.send()
    assert refused.status_code == 429
    assert refused.json()["detail"] == "Rate limit exceeded: per-hour limit reached (100/100)"


@pytest.mark.requirement("N-07")
async def test_n07_both_windows_are_enforced_independently(start: Start) -> None:
    service = await start(**{PER_MINUTE: 5, PER_HOUR: 50})
    for _ in range(10):
        assert await service.send_many(5) == [201] * 5
        refused = await service.send()
        assert refused.status_code == 429
        assert "per-minute" in refused.json()["detail"]
        service.clock.advance(61)
    refused = await service.send()
    assert refused.status_code == 429
    assert refused.json()["detail"] == "Rate limit exceeded: per-hour limit reached (50/50)"


# --- The window


@pytest.mark.requirement("N-11", "N-12")
async def test_n12_no_double_burst_where_two_minutes_meet(start: Start) -> None:
    service = await start(**{PER_MINUTE: 3})
    service.clock.set(START + 58)
    assert await service.send_many(3) == [201, 201, 201]
    service.clock.set(START + 62)
    assert await service.send_many(1) == [429]


@pytest.mark.requirement("N-13")
async def test_n13_slots_come_back_one_by_one(start: Start) -> None:
    service = await start(**{PER_MINUTE: 2})
    await service.send()
    service.clock.advance(30)
    await service.send()
    service.clock.advance(31)
    assert await service.send_many(2) == [201, 429]


@pytest.mark.requirement("N-16")
@pytest.mark.parametrize("refused_tries", [False, True], ids=["quiet", "refused-tries"])
async def test_n16_after_61_seconds_there_is_room_again(start: Start, refused_tries: bool) -> None:
    service = await start(**{PER_MINUTE: 5})
    assert await service.send_many(5) == [201] * 5
    for _ in range(60):
        service.clock.advance(1)
        if refused_tries:
            assert await service.send_many(1) == [429]
    service.clock.advance(1)
    assert await service.send_many(6) == [201] * 5 + [429]


@pytest.mark.requirement("N-17")
async def test_n17_no_database_work_for_the_check(start: Start) -> None:
    service = await start(**{PER_MINUTE: 1})
    await service.send()
    statements: list[str] = []

    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    event.listen(service.app.state.services.database.engine.sync_engine, "before_cursor_execute", note)
    await service.get("/v1/rate-limit")
    assert statements == []
    assert (await service.send()).status_code == 429
    assert [statement for statement in statements if "FROM inboxes" not in statement] == ["BEGIN"]


@pytest.mark.requirement("N-19")
async def test_n19_a_further_window_needs_no_change_in_the_route(start: Start) -> None:
    service = await start()
    daily = GlobalRateLimiter(5, 50, more=[SendWindow("per-day", 86_400, 3)], clock=service.clock)
    service.app.dependency_overrides[get_rate_limiter] = lambda: daily
    assert await service.send_many(3) == [201] * 3
    service.clock.advance(3601)
    refused = await service.send()
    assert refused.status_code == 429
    assert refused.json()["detail"] == "Rate limit exceeded: per-day limit reached (3/3)"
    assert set(await service.counts()) == {"per-minute", "per-hour", "per-day"}


# --- The limiter in its place


@pytest.mark.requirement("N-24")
async def test_n24_all_clients_share_one_budget(start: Start) -> None:
    service = await start(**{PER_MINUTE: 2})
    other = {"name": "Other", "email_username": "other"}
    other_inbox = (await service.client.post("/v1/inboxes", json=other)).json()["id"]
    assert (await service.send()).status_code == 201
    assert (await service.send(inbox_id=other_inbox)).status_code == 201
    assert (await service.send()).status_code == 429
    assert (await service.send(inbox_id=other_inbox)).status_code == 429


@pytest.mark.requirement("N-25")
async def test_n25_only_sending_is_limited(start: Start) -> None:
    service = await start(**{PER_MINUTE: 1})
    assert await service.send_many(2) == [201, 429]
    await service.messages()
    await service.get("/health")
    await service.get(f"/v1/inboxes/{service.inbox_id}")
    new = {"name": "New", "email_username": "new"}
    assert (await service.client.post("/v1/inboxes", json=new)).status_code == 201
    assert await service.send_many(1) == [429]


class CheckAndRecordOnly:
    """A limiter of somebody else's."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def check(self) -> RateLimitResult:
        return RateLimitResult(self.left > 0, None if self.left else 7, "Rate limit exceeded: none left")

    def record(self) -> None:
        self.left -= 1


@pytest.mark.requirement("N-26", "N-45")
async def test_n26_check_and_record_are_enough(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    service = await start()
    limiter = CheckAndRecordOnly(2)
    service.app.dependency_overrides[get_rate_limiter] = lambda: limiter
    assert await service.send_many(2) == [201, 201]
    refused = await service.send()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    assert refused.json() == {"detail": "Rate limit exceeded: none left"}
    assert limiter.left == 0
    assert [record.levelname for record in caplog.records if "Rate limit" in record.message] == ["WARNING"]
    assert (await service.get("/v1/rate-limit"))["retry_after"] == 7


@pytest.mark.requirement("N-24", "N-27", "N-35")
@pytest.mark.parametrize("specified", [False, True], ids=["mock", "mock-with-spec"])
async def test_n35_check_then_send_then_record(start: Start, specified: bool) -> None:
    """A mock has every attribute, `hold` included, and one with a spec even passes `isinstance`."""
    service = await start()
    calls: list[str] = []

    def check() -> RateLimitResult:
        calls.append("check")
        return RateLimitResult(True)

    limiter = create_autospec(GlobalRateLimiter, instance=True) if specified else MagicMock()
    limiter.check.side_effect = check
    limiter.record.side_effect = lambda: calls.append("record")
    service.app.dependency_overrides[get_rate_limiter] = lambda: limiter
    send_email = service.provider.send_email

    async def get_note(*args: Any, **kwargs: Any) -> str | None:
        calls.append("send_email")
        return await send_email(*args, **kwargs)

    service.provider.send_email = get_note  # type: ignore[method-assign]
    assert (await service.send()).status_code == 201
    assert calls == ["check", "send_email", "record"]
    service.provider.error = ProviderError("down")
    assert (await service.send()).json()["status"] == "failed"
    assert calls == ["check", "send_email", "record", "check", "send_email"]


# --- What counts


@pytest.mark.requirement("N-28", "N-14")
async def test_n28_an_accepted_send_adds_one_to_both_windows(start: Start) -> None:
    service = await start(**{PER_MINUTE: 5, PER_HOUR: 50})
    for sent in range(1, 4):
        await service.send()
        assert await service.counts() == {"per-minute": sent, "per-hour": sent}


@pytest.mark.parametrize("answer", ["", None])
async def test_a_send_accepted_without_an_id_counts_and_is_pending(start: Start, answer: str | None) -> None:
    """surroundings 1.6, 6: there, one without an id was sometimes counted and sometimes not."""
    service = await start(**{PER_MINUTE: 5})
    service.provider.answer = answer
    sent = (await service.send()).json()
    assert (sent["status"], sent["provider_message_id"], sent["error"]) == ("pending", None, None)
    assert (await service.counts())["per-minute"] == 1


@pytest.mark.requirement("N-29", "N-33", "N-34")
async def test_n29_n34_a_blocked_domain_never_reaches_the_limiter(start: Start) -> None:
    service = await start(**{PER_MINUTE: 1}, outbound_domain_blocklist=r"evil\.com")
    for _ in range(10):
        assert (await service.send("x@evil.com")).status_code == 403
    assert await service.send_many(2) == [201, 429]
    assert (await service.send("x@evil.com")).status_code == 403
    assert len(service.provider.calls) == 1


@pytest.mark.requirement("N-34")
async def test_n34_the_limiter_is_not_asked_about_a_blocked_domain(start: Start) -> None:
    service = await start(outbound_domain_blocklist=r"evil\.com")
    limiter = MagicMock()
    service.app.dependency_overrides[get_rate_limiter] = lambda: limiter
    assert (await service.send("x@evil.com")).status_code == 403
    assert limiter.mock_calls == []


@pytest.mark.requirement("N-30", "N-43")
async def test_n30_refusals_do_not_move_the_moment_when_capacity_returns(start: Start) -> None:
    service = await start(**{PER_MINUTE: 2})
    await service.send_many(2)
    waits = []
    for _ in range(30):
        service.clock.advance(1)
        waits.append(int((await service.send()).headers["retry-after"]))
    assert waits == list(range(60, 30, -1))
    assert (await service.counts())["per-minute"] == 2


@pytest.mark.requirement("N-23", "N-31")
@pytest.mark.parametrize("error", [ProviderError("down"), RuntimeError("bug")], ids=["refused", "crashed"])
async def test_n31_a_send_that_the_provider_failed_is_not_counted(start: Start, error: Exception) -> None:
    service = await start(**{PER_MINUTE: 1, PER_HOUR: 1})
    service.provider.error = error
    for _ in range(10):
        failed = await service.send()
        assert failed.status_code == 201
        assert failed.json()["status"] == "failed"
        assert "fake" in failed.json()["error"]
        assert "recorded but not delivered" in failed.json()["error"]
    assert await service.counts() == {"per-minute": 0, "per-hour": 0}
    service.provider.error = None
    assert await service.send_many(2) == [201, 429]
    assert (await service.messages())["total"] == 11


@pytest.mark.requirement("N-23")
async def test_n23_a_send_counts_from_when_the_provider_had_it(start: Start) -> None:
    service = await start(**{PER_MINUTE: 5})
    await _send_slowly(service, 5, seconds=25)
    service.clock.advance(37)  # 62 s after they were admitted, 37 s after the provider had them
    assert await service.send_many(1) == [429]
    service.clock.advance(24)
    assert await service.send_many(6) == [201] * 5 + [429]


@pytest.mark.requirement("N-23")
async def test_n23_a_send_that_outlasts_its_window_counts_when_it_is_done(start: Start) -> None:
    service = await start(**{PER_MINUTE: 1})
    slow = asyncio.create_task(_send_slowly(service, 1, seconds=0))
    await service.provider.called.wait()
    service.clock.advance(90)
    service.provider.gate.set()
    await slow
    assert (await service.counts())["per-minute"] == 1
    service.clock.advance(59)
    assert await service.send_many(1) == [429]


@pytest.mark.requirement("N-01", "N-23")
async def test_a_provider_slower_than_the_window_cannot_pass_the_limit(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends that outlast the window would free their units while the provider may still accept the e-mails."""
    service = await start(**{PER_MINUTE: 5})
    loop = asyncio.get_running_loop()
    loop_time = loop.time
    service.provider.gate.clear()
    slow = [asyncio.create_task(service.send()) for _ in range(5)]
    await until(lambda: len(service.provider.calls) == 5)
    service.clock.advance(61)
    monkeypatch.setattr(loop, "time", lambda: loop_time() + 61)
    quick = [asyncio.create_task(service.send()) for _ in range(5)]
    await until(lambda: len(service.provider.calls) == 10)
    service.provider.gate.set()
    answers = [(await send).json() for send in (*slow, *quick)]
    assert [answer["status"] for answer in answers] == ["failed"] * 5 + ["sent"] * 5
    assert "no answer in time" in answers[0]["error"]
    assert (await service.counts())["per-minute"] == 5


@pytest.mark.requirement("N-33")
async def test_a_send_that_is_late_before_the_provider_is_asked_never_reaches_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await start(**{PER_MINUTE: 5})
    loop = asyncio.get_running_loop()
    loop_time = loop.time
    convert = sending.to_html

    def convert_slowly(markdown: str) -> str | None:
        monkeypatch.setattr(loop, "time", lambda: loop_time() + 51)
        return convert(markdown)

    monkeypatch.setattr(sending, "to_html", convert_slowly)
    assert (await service.send()).json()["status"] == "failed"
    assert service.provider.calls == []
    assert (await service.counts())["per-minute"] == 0


async def _send_slowly(service: Service, number: int, *, seconds: float) -> None:
    """Send e-mails at once; the provider accepts them after `seconds`."""
    service.provider.gate.clear()
    sends = [asyncio.create_task(service.send()) for _ in range(number)]
    if seconds:
        await until(lambda: len(service.provider.calls) == number)
        service.clock.advance(seconds)
        service.provider.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*sends)] == [201] * number


@pytest.mark.requirement("N-32")
async def test_n32_one_request_is_one_unit_however_many_recipients(start: Start) -> None:
    service = await start(**{PER_MINUTE: 2})
    assert (await service.send(*(f"u{i}@example.com" for i in range(20)))).status_code == 201
    assert await service.send_many(2) == [201, 429]


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"reply_to_thread_id": "nowhere"}, 404),
        ({"attachments": [{"filename": "a", "content_type": "b/c", "content_base64": "!"}]}, 400),
        ({"attachments": [{"filename": "a", "content_type": "b/c", "content_base64": ""}]}, 422),
    ],
    ids=["thread", "not-base64", "empty"],
)
async def test_what_is_found_wrong_after_the_limit_gives_the_unit_back(
    start: Start, wrong: dict[str, Any], status: int
) -> None:
    service = await start(**{PER_MINUTE: 1, PER_HOUR: 1})
    for _ in range(3):
        assert (await service.send(**wrong)).status_code == status
    assert await service.counts() == {"per-minute": 0, "per-hour": 0}
    assert await service.send_many(2) == [201, 429]
    assert (await service.send(**wrong)).status_code == 429
    assert len(service.provider.calls) == 1


async def test_a_send_counts_even_if_it_cannot_be_stored(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """surroundings 1.6, 7: the e-mail was sent, even if the database fails."""
    service = await start(**{PER_MINUTE: 1})

    async def fail(*args: object, **columns: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("headgate_services.mail.sending.add_message", fail)
    with pytest.raises(OSError, match="disk full"):
        await service.send()
    monkeypatch.undo()
    assert await service.send_many(1) == [429]


# --- Order


@pytest.mark.requirement("N-33", "N-36", "N-44")
async def test_n33_n36_n44_a_refusal_leaves_nothing_behind(start: Start) -> None:
    service = await start(**{PER_MINUTE: 1})
    await service.send()
    before = await stored(service)
    file = {"filename": "a.txt", "content_type": "text/plain", "content_base64": "aGk="}
    for _ in range(5):
        assert (await service.send(attachments=[file])).status_code == 429
    assert await stored(service) == before
    assert len(service.provider.calls) == 1
    service.clock.advance(3600)
    await service.get("/v1/rate-limit")
    assert len(service.provider.calls) == 1


async def stored(service: Service) -> tuple[int, int]:
    threads = await service.get("/v1/threads", inbox_id=service.inbox_id)
    return (await service.messages())["total"], threads["count"]


# --- The 429 answer


@pytest.mark.requirement("N-37", "N-38", "N-39", "N-40")
async def test_n40_retry_after_is_when_the_oldest_send_leaves(start: Start) -> None:
    service = await start(**{PER_MINUTE: 3})
    await service.send()
    service.clock.advance(5)
    await service.send_many(2)
    service.clock.advance(15)
    refused = await service.send()
    assert refused.status_code == 429
    assert refused.headers["content-type"] == "application/json"
    assert refused.json() == {"detail": "Rate limit exceeded: per-minute limit reached (3/3)"}
    assert refused.headers["retry-after"] == "41"
    service.clock.advance(20)
    assert await service.send_many(1) == [429]
    service.clock.advance(20)
    assert await service.send_many(1) == [429]  # one second less than was said
    service.clock.advance(1)
    assert await service.send_many(2) == [201, 429]


@pytest.mark.requirement("N-39")
async def test_n39_retry_after_is_a_whole_number_of_at_least_one(start: Start) -> None:
    service = await start(**{PER_MINUTE: 1})
    service.clock.advance(0.7)
    await service.send()
    service.clock.advance(19.8)
    assert (await service.send()).headers["retry-after"] == "41"  # 40.5 s
    service.clock.advance(40.499_999)
    assert (await service.send()).headers["retry-after"] == "1"  # a microsecond
    service.clock.advance_us(1)
    assert await service.send_many(1) == [201]


@pytest.mark.requirement("N-41")
async def test_n41_the_hourly_limit_is_named(start: Start) -> None:
    service = await start(**{PER_HOUR: 10})
    await service.send_many(10)
    service.clock.advance(600)
    refused = await service.send()
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "3001"
    assert "per-hour limit reached (10/10)" in refused.json()["detail"]


@pytest.mark.requirement("N-42")
async def test_n42_both_exhausted_give_the_longer_wait(start: Start) -> None:
    service = await start(**{PER_MINUTE: 2, PER_HOUR: 2})
    await service.send_many(2)
    service.clock.advance(10)
    refused = await service.send()
    assert refused.headers["retry-after"] == "3591"
    assert refused.json()["detail"] == (
        "Rate limit exceeded: per-minute limit reached (2/2); per-hour limit reached (2/2)"
    )


# --- The usage endpoint


async def test_usage_shows_limits_counts_and_waits_of_both_windows(start: Start) -> None:
    """surroundings 1.6, 14: proposed there, never built."""
    service = await start(**{PER_MINUTE: 2})
    await service.send()
    assert await service.get("/v1/rate-limit") == {
        "allowed": True,
        "retry_after": None,
        "windows": [
            {"name": "per-minute", "limit": 2, "count": 1, "remaining": 1, "retry_after": None},
            {"name": "per-hour", "limit": None, "count": 1, "remaining": None, "retry_after": None},
        ],
    }
    await service.send()
    for _ in range(3):
        usage = await service.get("/v1/rate-limit")
    assert (usage["allowed"], usage["retry_after"]) == (False, 61)
    assert [window["retry_after"] for window in usage["windows"]] == [61, None]


async def test_every_answer_to_a_send_says_what_is_left(start: Start) -> None:
    service = await start(global_send_rate_limit_per_minute=2, global_send_rate_limit_per_hour=50)
    answers = [await service.send("ann@example.com") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201, 201, 429]
    assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["1", "0", "0"]
    assert answers[0].headers["ratelimit"] == '"per-minute";r=1, "per-hour";r=49'
    assert answers[0].headers["ratelimit-policy"] == '"per-minute";q=2;w=60, "per-hour";q=50;w=3600'


async def test_a_send_that_failed_leaves_what_there_was(start: Start) -> None:
    service = await start(global_send_rate_limit_per_minute=2)
    service.provider.error = RuntimeError("no")
    answer = await service.send("ann@example.com")
    assert (answer.json()["status"], answer.headers["x-ratelimit-remaining"]) == ("failed", "2")
