"""Penalties on a server."""

from __future__ import annotations

import pytest

from headgate import ConfigError, penalty
from headgate.testing import FakeClock
from headgate_server.candidates import candidate_for
from tests.server.support import Server

POLICY = """
[limiters.login]
rules = ["1/minute", { kind = "penalty", quota = "2/15m", growth = 2, longest = "1d" }]
"""


async def test_a_penalty_refuses_and_is_shown() -> None:
    server = Server(POLICY, clock=FakeClock())
    answers = [await server.hit() for _ in range(4)]
    assert [answer["denied_by"] for answer in answers] == [None, "per-minute", "penalty", "penalty"]
    shown = (await server.client.get("/v1/limiters/login")).json()["rules"][1]
    assert (shown["kind"], shown["quota"], shown["growth"], shown["longest"]) == (
        "penalty",
        "2/15m",
        2,
        86_400,
    )
    assert (
        shown["toml"] == '{ quota = "2/15m", name = "penalty", kind = "penalty", growth = 2, longest = "1d" }'
    )
    (state,) = (await server.answer("/v1/inspect", {"key": "alice"}))["limiters"]
    assert (state["results"][1]["used"], state["results"][1]["frees_after"]) == (2, 900)


@pytest.mark.parametrize("operation", ["hit", "hold"])
async def test_refusals_that_are_not_final_do_not_count(operation: str) -> None:
    server = Server(POLICY, clock=FakeClock())
    await server.hit()
    attempt = {"key": "alice", "final": False}
    for _ in range(3):
        await server.answer(f"/v1/limiters/login/{operation}", attempt)
        await server.answer("/v1/batch", {"calls": [{"operation": operation, "limiter": "login", **attempt}]})
    assert (await server.hit())["denied_by"] == "per-minute"


def test_a_penalty_has_no_candidate() -> None:
    with pytest.raises(ConfigError, match="cannot be a shadow rule"):
        candidate_for(penalty("15m", after=3), "4/15m")
