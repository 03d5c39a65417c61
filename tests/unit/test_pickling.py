"""Limiters, holds, stores and gates belong to one process: pickling one is an error that says what to do instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from headgate import AsyncLimiter, Limiter, MemoryStore, SQLiteStore, open_store, token_bucket
from headgate.client import ServerStore
from headgate.hooks import Hook
from headgate.http.asgi import RateLimitMiddleware
from headgate.policy import LivePolicy, parse_policy
from headgate.stores.kv import KVStore, MemoryKV, SQLiteKV
from headgate.testing import FakeClock

POLICY = "[limiters.x]\nrules = ['5/minute']"


def on(url: str) -> Limiter:
    return Limiter("5/minute", name="x", store=url)


SUBJECTS: dict[str, Callable[[], Any]] = {
    "limiter": lambda: Limiter("5/minute"),
    "limiter of tasks": lambda: AsyncLimiter("5/minute"),
    "limiter with hooks and clock": lambda: Limiter("5/minute", hooks=[Hook()], clock=FakeClock()),
    "limiter without rules": Limiter,
    "limiter on a file": lambda: on("sqlite:///:memory:"),
    "limiter on Redis": lambda: on("redis://db"),
    "limiter on PostgreSQL": lambda: on("postgresql://db/x"),
    "limiter of a policy": lambda: LivePolicy(parse_policy(POLICY))["x"],
    "policy": lambda: LivePolicy(parse_policy(POLICY)),
    "hold": lambda: Limiter(token_bucket("5/minute")).hold("a"),
    "hold of a limiter with hooks": lambda: Limiter("5/minute", hooks=[Hook()]).hold("a"),
    "memory store": MemoryStore,
    "file": lambda: SQLiteStore(":memory:"),
    "Redis store": lambda: open_store("redis://db"),
    "PostgreSQL store": lambda: open_store("postgresql://db/x"),
    "server": lambda: ServerStore("http://127.0.0.1:1"),
    "key-value store": lambda: KVStore(MemoryKV()),
    "key-value file": lambda: SQLiteKV(":memory:"),
    "memory gate": lambda: Limiter("5/minute").gate,
    "memory gate of tasks": lambda: AsyncLimiter("5/minute").gate,
    "file gate": lambda: on("sqlite:///:memory:").gate,
    "Redis gate": lambda: on("redis://db").gate,
    "middleware": lambda: RateLimitMiddleware(pickle.dumps, "5/minute"),
}


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_pickling_error_suggests_an_alternative(subject: str, duplicate: Callable[[Any], Any]) -> None:
    made = SUBJECTS[subject]()
    with pytest.raises(TypeError, match="create limiters and stores in each process") as caught:
        duplicate(made)
    assert "_thread" not in str(caught.value)
    assert "redis://localhost" in str(caught.value)


def test_rules_and_decisions_can_be_pickled() -> None:
    limiter = Limiter("5/minute", token_bucket("9/hour"))
    for value in (limiter.rules, limiter.rules[0].quota, limiter.hit("a")):
        assert pickle.loads(pickle.dumps(value)) == value
