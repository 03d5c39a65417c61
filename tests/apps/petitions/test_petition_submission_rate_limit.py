"""The route: order of refusals, problem bodies, counts."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from uuid import UUID

import httpx
import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from headgate.http import Proxies
from headgate_services.petitions.api.dependencies import get_rate_limiter
from headgate_services.petitions.api.problems import cycle_of
from headgate_services.petitions.config import PetitionQueueConfig, PetitionRateLimitConfig
from headgate_services.petitions.domain.errors import DatabaseUnavailableError
from headgate_services.petitions.infrastructure.adapters.persistence import PetitionRecords
from headgate_services.petitions.infrastructure.stubs import RateLimiterStub
from tests.apps.petitions.conftest import Start
from tests.apps.petitions.support import PATH, TABLE, put_bucket, rows, someone

THREE = PetitionRateLimitConfig(limit_per_hour=3)


@pytest.mark.requirement("A-03", "A-83")
async def test_429_returned_when_rate_limited(start: Start) -> None:
    service = await start()
    service.app.dependency_overrides[get_rate_limiter] = RateLimiterStub.at_limit
    assert (await service.submit(someone())).status_code == 429


async def test_an_accepted_submission_says_what_is_left(start: Start) -> None:
    service, submitter = await start(rate_limit=THREE), someone()
    answers = [await service.submit(submitter) for _ in range(4)]
    left = [answer.headers.get("x-ratelimit-remaining") for answer in answers]
    assert (left, answers[0].headers["x-ratelimit-limit"]) == (["2", "1", "0", None], "3")
    reset = datetime.fromtimestamp(int(answers[1].headers["x-ratelimit-reset"]), UTC)
    assert reset == datetime(2026, 3, 2, 11, 0, tzinfo=UTC)


async def test_parallel_submissions_each_say_what_is_left_after_them(start: Start) -> None:
    service, submitter = await start(rate_limit=PetitionRateLimitConfig(5)), someone()
    answers = await asyncio.gather(*(service.submit(submitter) for _ in range(8)))
    left = [int(answer.headers["x-ratelimit-remaining"]) for answer in answers if answer.status_code == 201]
    assert sorted(left) == [0, 1, 2, 3, 4]


@pytest.mark.requirement("A-04")
async def test_retry_after_header_present(start: Start) -> None:
    """Waiting as long as it says is enough; a second less is not."""
    service, submitter = await start(rate_limit=THREE), someone()
    service.calendar.set(10, 0, 10)
    await service.submit_many(submitter, 3)
    service.calendar.advance(minutes=10, seconds=0.5)
    answer = await service.submit(submitter)
    wait = int(answer.headers["retry-after"])
    assert wait == 50 * 60 - 10
    service.calendar.advance(seconds=wait - 1)
    assert (await service.submit(submitter)).status_code == 429
    service.calendar.advance(seconds=1)
    assert (await service.submit(submitter)).status_code == 201


@pytest.mark.requirement("A-05")
async def test_retry_after_is_one_in_the_last_second(start: Start) -> None:
    service, submitter = await start(rate_limit=THREE), someone()
    await service.submit_many(submitter, 3)
    service.calendar.advance(minutes=59, seconds=59.9)
    answer = await service.submit(submitter)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


@pytest.mark.requirement("A-10")
async def test_rate_limit_remaining_in_response(start: Start) -> None:
    service, submitter = await start(rate_limit=THREE), someone()
    await service.submit_many(submitter, 3)
    assert (await service.submit(submitter)).json()["rate_limit_remaining"] == 0


@pytest.mark.requirement("A-06", "A-07", "A-08", "A-09", "A-11", "A-12", "A-13", "A-14", "A-15", "A-16")
@pytest.mark.requirement("A-17", "A-40")
async def test_rfc_7807_error_format_with_governance_extensions(start: Start) -> None:
    service, submitter = await start(rate_limit=THREE), someone()
    await service.submit_many(submitter, 3)
    with capture_logs([merge_contextvars]) as logs:
        answer = await service.submit(submitter, headers={"X-Correlation-ID": "trace-7"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-correlation-id"] == "trace-7"
    last = service.rows("SELECT max(sequence) FROM ledger.governance_events")[0][0]
    assert answer.json() == {
        "type": "urn:archon72:petition:rate-limit-exceeded",
        "title": "Rate Limit Exceeded",
        "status": 429,
        "detail": "Maximum 3 petitions per hour exceeded",
        "instance": PATH,
        "trace_id": "trace-7",
        "rate_limit_remaining": 0,
        "rate_limit_reset": "2026-03-02T11:00:00Z",
        "rate_limit_limit": 3,
        "rate_limit_current": 3,
        "rate_limit_scope": "submitter",
        "actor": f"submitter:{submitter}",
        "cycle_id": cycle_of(datetime.now(UTC)),
        "as_of_seq": last,
    }
    [line] = [line for line in logs if line["event"] == "rate_limit_exceeded"]
    assert line["trace_id"] == "trace-7"
    assert cycle_of(datetime(2026, 3, 31, tzinfo=UTC)) == "2026-Q1"
    assert cycle_of(datetime(2026, 4, 1, tzinfo=UTC)) == "2026-Q2"


@pytest.mark.requirement("A-17")
async def test_problem_json_for_whoever_asks_for_it(start: Start) -> None:
    service, submitter = await start(rate_limit=THREE), someone()
    await service.submit_many(submitter, 3)
    answer = await service.submit(submitter, headers={"Accept": "application/problem+json"})
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.requirement("A-09")
async def test_instance_is_the_path_alone(start: Start) -> None:
    service = await start()
    service.app.dependency_overrides[get_rate_limiter] = RateLimiterStub.at_limit
    answer = await service.client.post(f"{PATH}?secret=1", json={"type": "META", "text": "x"})
    assert answer.json()["instance"] == PATH


@pytest.mark.requirement("A-52", "A-58")
async def test_201_returned_when_within_limit(start: Start) -> None:
    service, submitter = await start(), someone()
    answer = await service.submit(submitter, type="GRIEVANCE", text="Höre")
    assert answer.status_code == 201
    body = answer.json()
    assert (body["state"], body["type"]) == ("RECEIVED", "GRIEVANCE")
    assert body["realm"] == "realm_accurate_guidance_counsel"
    assert body["created_at"].endswith("Z")
    again = await service.submit(submitter, text="Höre")
    assert again.json()["content_hash"] == body["content_hash"]
    assert again.json()["petition_id"] != body["petition_id"]


@pytest.mark.requirement("A-20", "A-57", "A-79")
async def test_submission_recorded_after_success(start: Start) -> None:
    service, submitter = await start(), someone()
    await service.submit_many(submitter, 2)
    found = service.rows(f"SELECT bucket_minute, count FROM {TABLE} WHERE submitter_id = %s", submitter)
    assert found == [(service.calendar.at, 2)]
    stub = RateLimiterStub()
    service.app.dependency_overrides[get_rate_limiter] = lambda: stub
    await service.submit(submitter)
    assert stub.get_count(submitter) == 1


@pytest.mark.requirement("A-56", "A-57")
async def test_refused_petitions_are_neither_kept_nor_counted(start: Start, shared_url: str) -> None:
    service, submitter = await start(rate_limit=THREE), someone()
    assert (await service.submit(submitter, realm="nowhere")).status_code == 400
    assert (await service.submit(submitter, text=" ")).status_code == 422
    assert (service.count(submitter), service.petitions(submitter)) == (0, 0)
    put_bucket(shared_url, submitter, service.calendar.at, 3)
    assert (await service.submit(submitter)).status_code == 429
    assert (service.count(submitter), service.petitions(submitter)) == (3, 0)


@pytest.mark.requirement("A-57")
async def test_a_failed_save_counts_nothing_and_leaves_no_event(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, submitter = await start(), someone()
    monkeypatch.setattr(PetitionRecords, "append", _unavailable)
    assert (await service.submit(submitter)).status_code == 503
    assert (service.count(submitter), service.petitions(submitter)) == (0, 0)


async def test_a_failed_count_leaves_no_petition_and_no_event(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, submitter = await start(), someone()
    monkeypatch.setattr(service.container.rate_limiter, "record_submission", _unavailable)
    assert (await service.submit(submitter)).status_code == 503
    assert service.petitions(submitter) == 0
    query = "SELECT 1 FROM ledger.governance_events WHERE payload->>'submitter_id' = %s"
    assert service.rows(query, str(submitter)) == []


async def test_a_petition_and_its_event_are_kept_together(start: Start) -> None:
    service, submitter = await start(), someone()
    kept = (await service.submit(submitter, headers={"X-Correlation-ID": "trace-8"})).json()
    query = "SELECT event_type, branch, actor_id, payload FROM ledger.governance_events WHERE trace_id = %s"
    [(event_type, branch, actor, payload)] = service.rows(query, kept["petition_id"])
    assert (event_type, branch, actor) == ("petition.submission.received", "petition", "petition-system")
    assert payload["content_hash"] == kept["content_hash"]
    assert (payload["submitter_id"], payload["correlation_id"]) == (str(submitter), "trace-8")


@pytest.mark.requirement("A-01")
async def test_submitters_are_independent(start: Start) -> None:
    service, ann, ben = await start(rate_limit=THREE), someone(), someone()
    assert await service.submit_many(ann, 4) == [201, 201, 201, 429]
    assert await service.submit_many(ben, 4) == [201, 201, 201, 429]


@pytest.mark.requirement("A-59")
async def test_only_the_submitters_own_limit_applies_by_default(start: Start, empty_url: str) -> None:
    service = await start(url=empty_url)
    minute = service.calendar.at
    query = f"INSERT INTO {TABLE} (submitter_id, bucket_minute, count) SELECT gen_random_uuid(), %s, 6 "
    service.rows(f"{query} FROM generate_series(1, 200)", minute)
    assert (await service.submit(someone())).status_code == 201
    buckets = service.rows(f"SELECT count(*), sum(count) FROM {TABLE}")
    assert buckets == [(201, 1201)]  # one counter for the new one: none for its realm, none for all


async def test_realm_and_global_limits_over_http(start: Start, empty_url: str) -> None:
    limits = PetitionRateLimitConfig(realm_limit=2, global_limit=3)
    service = await start(url=empty_url, rate_limit=limits)
    statuses = [(await service.submit(someone())).status_code for _ in range(2)]
    refused = await service.submit(someone())
    assert [*statuses, refused.status_code] == [201, 201, 429]
    assert (refused.json()["rate_limit_scope"], refused.json()["rate_limit_limit"]) == ("realm", 2)
    other = "realm_threat_anomaly_detection"
    assert (await service.submit(someone(), realm=other)).status_code == 201
    refused = await service.submit(someone(), realm=other)
    assert (refused.status_code, refused.json()["rate_limit_scope"]) == (429, "global")


@pytest.mark.requirement("A-08", "A-41")
async def test_another_window_is_named_and_ends_when_it_says(start: Start) -> None:
    limits = PetitionRateLimitConfig(limit_per_hour=1, window_minutes=1)
    service, submitter = await start(rate_limit=limits), someone()
    service.calendar.set(10, 0, 20)
    refused = (await service.submit_many(submitter, 2), await service.submit(submitter))[1]
    assert refused.json()["detail"] == "Maximum 1 petitions per minute exceeded"
    assert refused.json()["rate_limit_reset"] == "2026-03-02T10:01:00Z"
    assert refused.headers["retry-after"] == "40"
    service.calendar.advance(seconds=40)
    assert (await service.submit(submitter)).status_code == 201


# --- The order -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A-43", "A-46", "A-53", "A-54", "A-55")
async def test_a_full_queue_comes_before_the_limit(start: Start, empty_url: str) -> None:
    queue = PetitionQueueConfig(threshold=5, hysteresis=2, retry_after_seconds=77)
    service, submitter = (
        await start(url=empty_url, queue=queue, rate_limit=PetitionRateLimitConfig(5)),
        someone(),
    )
    assert await service.submit_many(submitter, 5) == [201] * 5
    answer = await service.submit(submitter)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "77")
    body = answer.json()
    assert body.pop("trace_id") == answer.headers["x-correlation-id"]
    assert body == {
        "type": "https://archon72.io/errors/queue-overflow",
        "title": "Queue Overflow",
        "status": 503,
        "detail": "Petition queue capacity exceeded. Please retry later.",
        "instance": PATH,
        "queue_depth": 5,
        "threshold": 5,
    }
    assert service.refusals(submitter) == []
    assert service.petitions(submitter) == 5
    assert await service.metric("petition_queue_rejections_total") == 1
    assert await service.metric("petition_queue_depth", state="RECEIVED") == 5


async def test_limit_then_halt_then_realm(start: Start, empty_url: str) -> None:
    service, submitter, fresh = await start(url=empty_url, rate_limit=THREE), someone(), someone()
    kept = (await service.submit(submitter)).json()["petition_id"]
    await service.submit_many(submitter, 2)
    await service.container.records.halt("maintenance")
    with capture_logs() as logs:
        refused = await service.submit(submitter, realm="nowhere")
    assert refused.status_code == 429
    assert refused.json()["as_of_seq"] == 3
    assert service.refusals(submitter) == []  # halted means no writes
    assert "rate_limit_witness_skipped" in [line["event"] for line in logs]
    halted = await service.submit(fresh, realm="nowhere")
    assert (halted.status_code, halted.headers["retry-after"]) == (503, "3600")
    assert halted.json()["type"] == "https://archon72.io/errors/system-halted"
    assert (halted.json()["title"], halted.json()["detail"]) == ("System Halted", "maintenance")
    assert (await service.client.get(f"{PATH}/{kept}")).status_code == 200
    await service.container.records.resume()
    unknown = await service.submit(fresh, realm="nowhere")
    assert (unknown.status_code, unknown.json()["title"]) == (400, "Invalid Realm")
    assert "nowhere" in unknown.json()["detail"]
    assert (await service.submit(fresh)).status_code == 201


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "OTHER"},
        {"text": ""},
        {"text": "x" * 10_001},
        {"text": "a\0b"},
        {"text": "\ud800"},
        {"realm": "r" * 101},
        {"realm": "a\0"},
        {"submitter_id": "me"},
        {"notification_preferences": {"channel": "WEBHOOK"}},
        {"notification_preferences": {"channel": "WEBHOOK", "webhook_url": "http://x.example"}},
    ],
    ids=str,
)
async def test_what_cannot_be_a_petition_is_422(start: Start, fields: dict[str, object]) -> None:
    service = await start()
    body = json.dumps({"type": "GENERAL", "text": "x", **fields})
    answer = await service.client.post(PATH, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["detail"]


async def test_an_empty_text_is_named_as_such(start: Start) -> None:
    service = await start()
    [problem] = (await service.submit(someone(), text="")).json()["detail"]
    assert problem["msg"] == "String should have at least 1 character"
    schema = (await service.client.get("/openapi.json")).json()["components"]["schemas"]["SubmissionRequest"]
    assert (schema["properties"]["text"]["minLength"], schema["properties"]["text"]["maxLength"]) == (
        1,
        10_000,
    )


async def test_a_huge_request_is_413_and_documented(start: Start) -> None:
    service = await start()
    answer = await service.client.post(PATH, content=b" " * 300_000)
    assert (answer.status_code, answer.json()) == (413, {"detail": "Request body is above 262144 bytes"})
    schema = (await service.client.get("/openapi.json")).json()
    posts = [path["post"] for path in schema["paths"].values() if "post" in path]
    assert all("413" in post["responses"] for post in posts)
    assert list(schema["components"]["schemas"]["TooLargeBody"]["properties"]) == list(answer.json())


async def test_preferences_are_kept(start: Start) -> None:
    service, submitter = await start(), someone()
    wish = {"channel": "WEBHOOK", "webhook_url": "https://x.example/hook"}
    assert (await service.submit(submitter, notification_preferences=wish)).status_code == 201
    query = "SELECT notification_preferences FROM petition_submissions WHERE submitter_id = %s"
    assert service.rows(query, submitter) == [({**wish, "enabled": True},)]


# --- Nobody in particular --------------------------------------------------------------------------------------------


async def test_anonymous_petitions_count_by_address(start: Start) -> None:
    service = await start(rate_limit=PetitionRateLimitConfig(2), proxies=Proxies(("192.0.2.1",)))

    async def submit(address: str) -> httpx.Response:
        return await service.submit(None, headers={"X-Forwarded-For": address})

    assert [(await submit("198.51.100.7")).status_code for _ in range(3)] == [201, 201, 429]
    assert (await submit("198.51.100.8")).status_code == 201
    assert [(await submit(f"2001:db8::{host}")).status_code for host in range(1, 4)] == [201, 201, 429]
    counted = UUID((await submit("198.51.100.7")).json()["actor"].removeprefix("submitter:"))
    assert service.count(counted) == 2
    assert service.petitions(counted) == 0  # kept without a submitter


async def test_forwarded_addresses_of_strangers_are_not_believed(start: Start) -> None:
    service = await start(rate_limit=PetitionRateLimitConfig(1))
    headers = [{"X-Forwarded-For": f"198.51.100.{host}"} for host in range(2)]
    assert [(await service.submit(None, headers=each)).status_code for each in headers] == [201, 429]


async def test_anonymous_petitions_can_share_a_count_or_be_refused(start: Start, empty_url: str) -> None:
    proxies = Proxies(("192.0.2.1",))
    shared = await start(
        url=empty_url, rate_limit=PetitionRateLimitConfig(1), anonymous="shared", proxies=proxies
    )
    headers = [{"X-Forwarded-For": f"198.51.100.{host}"} for host in range(2)]
    assert [(await shared.submit(None, headers=each)).status_code for each in headers] == [201, 429]
    closed = await start(url=empty_url, anonymous="refuse")
    answer = await closed.submit(None)
    assert (answer.status_code, answer.json()["title"]) == (400, "Invalid Petition Submission")


# --- When the database fails -----------------------------------------------------------------------------------------


async def test_a_refusal_that_cannot_be_witnessed_stays_a_refusal(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, submitter = await start(rate_limit=THREE), someone()
    await service.submit_many(submitter, 4)
    seen = (await service.submit(submitter)).json()["as_of_seq"]
    monkeypatch.setattr(PetitionRecords, "append_unless_halted", _unavailable)
    with capture_logs() as logs:
        answer = await service.submit(submitter)
    assert (answer.status_code, answer.json()["as_of_seq"]) == (429, seen)
    [line] = [line for line in logs if line["event"] == "rate_limit_witness_failed"]
    assert (line["log_level"], line["submitter_id"], line["refusals"]) == ("error", str(submitter), 1)


# --- Documentation ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A-87")
async def test_the_429_is_documented(start: Start) -> None:
    service = await start()
    schema = (await service.client.get("/openapi.json")).json()
    refusal = schema["paths"][PATH]["post"]["responses"]["429"]
    assert "Retry-After" in refusal["headers"]
    fields = schema["components"]["schemas"]["RateLimitProblem"]["properties"]
    service.app.dependency_overrides[get_rate_limiter] = RateLimiterStub.at_limit
    assert set((await service.submit(someone())).json()) == set(fields)


# --- Neighbours ------------------------------------------------------------------------------------------------------


async def test_a_petition_can_be_read_and_withdrawn_by_its_submitter_only(start: Start) -> None:
    service, submitter = await start(), someone()
    kept = (await service.submit(submitter)).json()["petition_id"]
    read = (await service.client.get(f"{PATH}/{kept}")).json()
    assert (read["petition_id"], read["state"], read["co_signer_count"]) == (kept, "RECEIVED", 0)
    assert read["fate_reason"] is None

    async def withdraw(requester: UUID) -> httpx.Response:
        body = {"requester_id": str(requester), "reason": "settled"}
        return await service.client.post(f"{PATH}/{kept}/withdraw", json=body)

    assert (await withdraw(someone())).status_code == 403
    done = await withdraw(submitter)
    assert (done.status_code, done.json()["state"]) == (200, "ACKNOWLEDGED")
    assert done.json()["fate_reason"] == "WITHDRAWN: settled"
    assert done.json()["status_token"] != read["status_token"]
    assert (await withdraw(submitter)).status_code == 400
    assert service.count(submitter) == 1


async def test_an_unknown_petition_is_404(start: Start) -> None:
    service = await start()
    for answer in (
        await service.client.get(f"{PATH}/{someone()}"),
        await service.client.get(f"{PATH}/{someone()}/status"),
        await service.client.post(f"{PATH}/{someone()}/withdraw", json={"requester_id": str(someone())}),
    ):
        assert answer.status_code == 404
        assert answer.json()["type"] == "https://archon72.io/errors/petition-not-found"


async def test_a_status_that_is_waited_for_comes_when_it_changes(start: Start) -> None:
    service, submitter = await start(status_wait_seconds=600), someone()
    kept = (await service.submit(submitter)).json()["petition_id"]
    token = (await service.client.get(f"{PATH}/{kept}/status")).json()["status_token"]
    question = service.client.get(f"{PATH}/{kept}/status", params={"token": token})
    withdrawal = service.client.post(f"{PATH}/{kept}/withdraw", json={"requester_id": str(submitter)})
    news, _ = await asyncio.gather(question, withdrawal)
    assert (news.status_code, news.json()["fate_reason"]) == (200, "WITHDRAWN: no reason given")


async def test_a_known_status_is_304(start: Start) -> None:
    service, submitter = await start(status_wait_seconds=0), someone()
    kept = (await service.submit(submitter)).json()["petition_id"]
    status = (await service.client.get(f"{PATH}/{kept}/status")).json()
    assert status["state"] == "RECEIVED"
    unchanged = await service.client.get(f"{PATH}/{kept}/status", params={"token": status["status_token"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert unchanged.headers["x-status-token"] == status["status_token"]
    await service.client.post(f"{PATH}/{kept}/withdraw", json={"requester_id": str(submitter)})
    news = await service.client.get(f"{PATH}/{kept}/status", params={"token": status["status_token"]})
    assert (news.status_code, news.json()["state"]) == (200, "ACKNOWLEDGED")


async def test_a_trace_id_that_is_no_word_is_replaced(start: Start) -> None:
    service = await start()
    for given in ("", "a b", "x" * 200):
        answer = await service.client.get("/health", headers={"X-Correlation-ID": given})
        assert UUID(answer.headers["x-correlation-id"])


@pytest.mark.requirement("A-13")
async def test_an_unexpected_error_has_its_trace_id_on_the_answer_and_in_the_log(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await start()
    monkeypatch.setattr(type(service.container.submissions), "get", _broken)
    with capture_logs(processors=[merge_contextvars]) as logs:
        answer = await service.client.get(f"{PATH}/{someone()}", headers={"X-Correlation-ID": "find-me"})
    assert (answer.status_code, answer.headers["x-correlation-id"]) == (500, "find-me")
    assert (answer.json()["trace_id"], answer.json()["title"]) == ("find-me", "Internal Server Error")
    [line] = [line for line in logs if line["event"] == "request_failed"]
    assert (line["trace_id"], line["log_level"], line["exc_info"]) == ("find-me", "error", True)


async def test_the_ledger_takes_additions_only(start: Start) -> None:
    service = await start()
    await service.submit(someone())
    for statement in ("UPDATE {} SET actor_id = 'x'", "DELETE FROM {}", "TRUNCATE {}"):
        with pytest.raises(Exception, match="append-only"):
            rows(service.url, statement.format("ledger.governance_events"))


async def _broken(*arguments: object, **options: object) -> None:
    raise RuntimeError("nobody foresaw this")


async def _unavailable(*arguments: object, **options: object) -> None:
    raise DatabaseUnavailableError(30)
