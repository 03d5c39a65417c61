"""Seeds with which the simulator found something that is mended."""

from __future__ import annotations

from unittest.mock import patch

from tests.simulation.run import run
from tests.simulation.servers import PostgresServer


def test_loop_that_is_blocked_a_little_beyond_a_deadline_while_connecting_is_no_outage() -> None:
    assert run(3, "redis", ("block",)).violations == []


def test_cancelled_hold_whose_reply_cannot_be_read_is_cancelled() -> None:
    refusal, *_, nonsense, _ = PostgresServer.wrong_replies
    with patch.object(PostgresServer, "wrong_replies", (refusal, *[nonsense] * 9)):
        assert run(180, "postgres", ("wrong_reply",)).violations == []
