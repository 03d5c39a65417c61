"""The API of rules that real services need: costs by unit, quotas of a call, confirmed and renewed holds."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.testing import FakeClock
from tests.server.support import Server

POLICY = """
[limiters.model]
rules = [
  { quota = "10/minute", name = "requests" },
  { quota = "1000/minute", name = "tokens", unit = "tokens" },
  { kind = "concurrent", quota = 2, lease = "60s", name = "in flight", tiers = { pro = 5 } },
]

[limiters.month]
rules = [{ kind = "calendar", quota = "10/month", timezone = "Europe/Berlin", name = "month" }]
"""


@pytest.fixture
def server() -> Server:
    return Server(POLICY, clock=FakeClock())


async def left(server: Server) -> list[int]:
    answer = await server.answer("/v1/limiters/model/check", {"key": "a", "cost": 0})
    return [result["remaining"] for result in answer["results"]]


async def hold(server: Server, **more: Any) -> Any:
    return await server.answer("/v1/limiters/model/hold", {"key": "a", "cost": {"tokens": 800}, **more})


async def test_a_cost_by_unit_is_held_and_settled(server: Server) -> None:
    held = await hold(server)
    assert await left(server) == [9, 200, 1]
    ended = await server.answer(f"/v1/holds/{held['hold']}/settle", {"cost": {"tokens": 312}})
    assert ended["held"] == {"requests": 1, "tokens": 800}
    assert ended["cost"] == {"requests": 1, "tokens": 312}
    assert await left(server) == [9, 688, 2]


@pytest.mark.parametrize(
    ("operation", "body", "complaint"),
    [
        ("hit", {"cost": {"tokens": 1}}, "is concurrent and counts only holds"),
        ("hold", {"cost": {"requests": 1}}, "also counts 'tokens'"),
        ("hold", {"cost": {"tokens": 1, "words": 1}}, "does not count 'words'"),
        ("record", {"cost": [1, 2]}, "2 costs for 3 rules"),
        ("hold", {"quota": {"requests": "20/hour"}}, "the period of"),
    ],
)
async def test_cost_or_quota_that_does_not_fit_the_rules_is_refused(
    server: Server, operation: str, body: dict[str, Any], complaint: str
) -> None:
    answer = await server.post(f"/v1/limiters/model/{operation}", {"key": "a", **body})
    assert answer.status_code == 422
    assert complaint in answer.json()["detail"]


async def test_without_places_there_is_nothing_to_renew(server: Server) -> None:
    held = await server.answer("/v1/limiters/month/hold", {"key": "a"})
    answer = await server.post(f"/v1/holds/{held['hold']}/renew", {})
    assert (answer.status_code, "nothing to renew" in answer.json()["detail"]) == (422, True)


async def test_rules_are_shown_as_the_policy_file_has_them(server: Server) -> None:
    limiters = (await server.client.get("/v1/limiters")).json()["limiters"]
    rules = {rule["name"]: rule for limiter in limiters for rule in limiter["rules"]}
    place, month = rules["in flight"], rules["month"]
    assert (place["quota"], place["lease"], place["tiers"]) == (2, 60, {"pro": 5})
    assert (month["quota"], month["timezone"]) == ("10/month", "Europe/Berlin")
    assert rules["tokens"]["unit"] == "tokens"


async def test_holds_are_confirmed_and_renewed_in_batches(server: Server) -> None:
    first, second = await hold(server, cost={"tokens": 1}), await hold(server, cost={"tokens": 1})
    calls = [
        {"operation": "confirm", "hold": first["hold"]},
        {"operation": "renew", "hold": second["hold"]},
        {"operation": "renew", "hold": second["hold"], "cost": 1},
        {"operation": "hit", "limiter": "month", "key": "a", "cost": [1]},
    ]
    answers = (await server.answer("/v1/batch", {"calls": calls}))["answers"]
    assert [answer["status"] for answer in answers] == [200, 200, 400, 400]
