"""Random traffic, policies, and the decisions of a live limiter."""

from __future__ import annotations

from hypothesis import strategies as st

from headgate.decision import Decision
from headgate.errors import CostTooHigh
from headgate.hooks import Hooks
from headgate.policy import LimiterPolicy, Version, parse_policy
from headgate.stores import Store
from headgate.stores.request import Request
from headgate_server.replay import LoggedRequest

POLICIES = (
    'rules = ["5/second"]',
    'rules = ["3/second", "10/minute burst 4"]',
    'rules = [{ quota = "4/second", kind = "sliding_log" }, { quota = "20/minute", kind = "fixed_window" }]',
    'rules = [{ quota = "3/second", tiers = { pro = "6/second" } }, { quota = "2/second", name = "s", shadow = true }]',
    'rules = [{ quota = "3/second", name = "r" }]\n[[limiters.api.overrides]]\nkey = "b"\nrules = { r = "1/second" }',
    'rules = [{ quota = "2/second", scope = "*" }]',
    'rules = ["0/minute"]',
)

steps = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3), st.integers(0, 400_000), st.integers(0, 90_000_000)),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 5),
        st.sampled_from([None, None, "pro", "other"]),
    ),
    max_size=60,
)


def policy(text: str) -> LimiterPolicy:
    return parse_policy(f"[limiters.api]\n{text}\n").limiters["api"]


def requests(
    trace: list[tuple[int, str, int, str | None]], start: int = 1_700_000_000_000_000
) -> list[LoggedRequest]:
    """Return the requests of a trace of pauses, keys, costs and tiers."""
    found = []
    at = start
    for order, (pause, key, cost, tier) in enumerate(trace):
        at += pause
        found.append(LoggedRequest(at, order, key, key, cost, tier, None, False))
    return found


def live_decisions(limiter: LimiterPolicy, store: Store, trace: list[LoggedRequest]) -> list[Decision | None]:
    """Return the decisions of a live limiter on a store, with the same requests and times."""
    gate = Version(limiter, store, None, None, Hooks(()), None).gate
    answers: list[Decision | None] = []
    for request in trace:
        try:
            answers.append(
                gate.decide(Request("hit", request.key, request.cost, request.tier, request.at))[0]
            )
        except CostTooHigh:
            answers.append(None)
    return answers
