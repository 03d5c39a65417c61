"""Co-signing: the limit's mechanism, used a second time beside the first."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import httpx
import pytest

from headgate_services.petitions.application.services import RateLimitService
from headgate_services.petitions.config import PetitionRateLimitConfig
from headgate_services.petitions.infrastructure.adapters.persistence import Database, PostgresRateLimitStore
from tests.apps.petitions.conftest import Start
from tests.apps.petitions.support import PATH, Calendar, Service, rows, someone

LIMITS = PetitionRateLimitConfig(limit_per_hour=10, co_sign_limit_per_hour=2)


async def new_petition(service: Service) -> UUID:
    """Submit a petition as somebody new, and return its id."""
    return UUID((await service.submit(someone())).json()["petition_id"])


async def co_sign(service: Service, petition_id: UUID, signer: UUID, **options: Any) -> httpx.Response:
    """Co-sign a petition."""
    return await service.client.post(
        f"{PATH}/{petition_id}/co-sign", json={"signer_id": str(signer)}, **options
    )


async def test_a_co_sign_is_kept_counted_and_witnessed(start: Start) -> None:
    service, signer = await start(rate_limit=LIMITS), someone()
    petition_id = await new_petition(service)
    answer = await co_sign(service, petition_id, signer, headers={"X-Correlation-ID": "t"})
    assert (answer.status_code, answer.json()["co_signer_count"]) == (201, 1)
    assert answer.json()["signer_id"] == str(signer)
    assert (await co_sign(service, petition_id, someone())).json()["co_signer_count"] == 2
    assert (await service.client.get(f"{PATH}/{petition_id}")).json()["co_signer_count"] == 2
    events = rows(
        service.url,
        "SELECT payload FROM ledger.governance_events WHERE event_type = 'petition.co_sign.recorded' "
        "AND actor_id = %s",
        f"signer:{signer}",
    )
    assert events == [({"petition_id": str(petition_id), "signer_id": str(signer), "correlation_id": "t"},)]


@pytest.mark.requirement("A-60")
async def test_co_signs_and_submissions_do_not_eat_each_others_limit(start: Start) -> None:
    service, somebody = await start(rate_limit=LIMITS), someone()
    petitions = [await new_petition(service) for _ in range(3)]
    seen = [(await co_sign(service, petition_id, somebody)).status_code for petition_id in petitions]
    assert seen == [201, 201, 429]
    assert await service.submit_many(somebody, 11) == [201] * 10 + [429]


@pytest.mark.requirement("A-60")
async def test_a_refused_co_sign_says_everything(start: Start) -> None:
    service, signer = await start(rate_limit=LIMITS), someone()
    petitions = [await new_petition(service) for _ in range(3)]
    answers = [await co_sign(service, petition_id, signer) for petition_id in petitions]
    body = answers[2].json()
    assert (body["type"], body["status"]) == ("urn:archon72:co-sign:rate-limit-exceeded", 429)
    assert body["detail"] == "Maximum 2 co-signs per hour exceeded"
    assert body["rate_limit_reset_at"] == "2026-03-02T11:00:00Z"
    assert "rate_limit_reset" not in body
    assert {"nfr_reference", "hardening_control", "trace_id", "actor", "as_of_seq"} <= body.keys()
    assert answers[2].headers["retry-after"] == "3600"
    assert (await service.client.get(f"{PATH}/{petitions[2]}")).json()["co_signer_count"] == 0
    assert await service.metric("petition_co_sign_rate_limit_hits_total") == 1
    assert await service.metric("petition_rate_limit_hits_total", submitter_id=str(signer)) is None
    [event] = rows(
        service.url,
        "SELECT payload->>'refusals' FROM ledger.governance_events "
        "WHERE event_type = 'petition.co_sign.rate_limited' AND actor_id = %s",
        f"submitter:{signer}",
    )
    assert event == ("1",)


async def test_who_signs_comes_before_how_often(start: Start) -> None:
    """A second co-sign of one petition is a conflict, limit or not, and uses up nothing."""
    service, signer = await start(rate_limit=LIMITS), someone()
    first, second, third = [await new_petition(service) for _ in range(3)]
    seen = [
        (await co_sign(service, petition_id, signer)).status_code for petition_id in (first, first, second)
    ]
    assert seen == [201, 409, 201]
    assert (await co_sign(service, third, signer)).status_code == 429
    assert (await co_sign(service, first, signer)).json()["title"] == "Already Co-Signed"
    assert (await co_sign(service, someone(), signer)).status_code == 404
    answer = await service.client.post(f"{PATH}/{third}/co-sign", json={"signer_id": "nobody"})
    assert answer.status_code == 422


async def test_parallel_co_signs_admit_exactly_the_limit_and_each_identity_once(start: Start) -> None:
    service, signer = await start(rate_limit=LIMITS), someone()
    petitions = [await new_petition(service) for _ in range(6)]
    answers = await asyncio.gather(*(co_sign(service, petition_id, signer) for petition_id in petitions))
    assert sorted(answer.status_code for answer in answers) == [201] * 2 + [429] * 4
    other = someone()
    answers = await asyncio.gather(*(co_sign(service, petitions[0], other) for _ in range(6)))
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 5


async def test_neither_a_settled_petition_nor_a_halted_system_takes_co_signs(
    start: Start, empty_url: str
) -> None:
    service, submitter = await start(url=empty_url), someone()
    settled = (await service.submit(submitter)).json()["petition_id"]
    await service.client.post(f"{PATH}/{settled}/withdraw", json={"requester_id": str(submitter)})
    assert (await co_sign(service, settled, someone())).status_code == 400
    await service.container.records.halt("audit")
    assert (await co_sign(service, settled, someone())).json()["title"] == "System Halted"


@pytest.mark.requirement("A-60")
async def test_counters_of_other_names_count_apart_under_every_limit(
    own_database: Database, calendar: Calendar
) -> None:
    somebody = someone()
    stores = [
        PostgresRateLimitStore(own_database, counter=counter, now=calendar)
        for counter in ("submission", "co_sign", "comment")
    ]
    services = [RateLimitService(store, 5, realm_limit=3, global_limit=2) for store in stores]
    earlier = calendar().replace(hour=9)
    for service, store in zip(services, stores, strict=True):
        await service.record_submission(somebody, realm="north")
        await service.record_submission(somebody, realm="north")
        refused = await service.check_rate_limit(someone(), realm="north")
        assert (refused.allowed, refused.scope, refused.current_count) == (False, "global", 2)
        assert await store.get_submission_count(somebody, earlier) == 2
    await stores[1].increment_bucket(somebody, calendar())
    assert [await store.get_submission_count(somebody, earlier) for store in stores] == [2, 3, 2]
