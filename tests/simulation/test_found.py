"""Seeds with which the simulator found defects that are fixed."""

from __future__ import annotations

from unittest.mock import patch

from tests.simulation.postgres import PostgresServer
from tests.simulation.redis import RedisServer
from tests.simulation.run import run


def test_loop_blocked_just_beyond_a_deadline_while_connecting_is_not_an_outage() -> None:
    for seed in (3, 16):
        assert run(seed, "redis", ("block",)).violations == []


def test_cancelled_hold_with_an_invalid_reply_stays_cancelled() -> None:
    refusal, *_, invalid, _ = PostgresServer.wrong_replies
    with patch.object(PostgresServer, "wrong_replies", (refusal, *[invalid] * 9)):
        for seed in range(5):
            assert run(seed, "postgres", ("wrong_reply",)).violations == []


def test_invalid_reply_of_a_cluster_node_is_a_store_error() -> None:
    with patch.object(RedisServer, "wrong_replies", RedisServer.invalid[:2] * 2):
        for seed in (3, 6, 7):
            assert run(seed, "cluster", ("wrong_reply",)).violations == []
