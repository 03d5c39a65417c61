"""The joint decision of several algorithms."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.algorithms.base import Algorithm, Receipt, State
from headgate.algorithms.penalty import Penalty
from headgate.decision import Verdict


def decide_all(
    algorithms: Sequence[Algorithm],
    states: Sequence[State | None],
    now: int,
    costs: Sequence[int],
    birth: int,
    replaces: Sequence[Receipt | None] | None = None,
    *,
    is_final: bool = False,
) -> tuple[Sequence[State | None], Sequence[Verdict]]:
    """Decide several rules together: all are charged, or none.

    Each rule has its cost, and may have a receipt whose units it gives back first. Returns the states after the call (the
    identical sequence if there is nothing to write) and a verdict per rule. If another rule refuses, the verdict of a rule
    that would have admitted shows its figures without this call. If `is_final`, penalties count a refusal.
    """
    if any(isinstance(algorithm, Penalty) for algorithm in algorithms):
        costs = _costs_with_penalties(algorithms, costs, replaces)
    after: list[State | None] = []
    verdicts: list[Verdict] = []
    for algorithm, state, cost, receipt in zip(
        algorithms, states, costs, replaces or (None,) * len(states), strict=True
    ):
        new_state, verdict = (
            algorithm.decide(state, now, cost, birth)
            if receipt is None
            else algorithm.move(state, receipt, now, cost, birth)
        )
        after.append(new_state)
        verdicts.append(verdict)
    if all(verdict.allowed for verdict in verdicts):
        return after, verdicts
    if len(verdicts) == 1:
        return states, verdicts
    free = [
        algorithm.decide(state, now, 0, birth)[1] if verdict.allowed else verdict
        for algorithm, state, verdict in zip(algorithms, states, verdicts, strict=True)
    ]
    return _count_refusal(algorithms, states, free, now, birth) if is_final else (states, free)


def _costs_with_penalties(
    algorithms: Sequence[Algorithm], costs: Sequence[int], replaces: Sequence[Receipt | None] | None
) -> list[int]:
    """Return costs with 1 for penalties if any other rule has a cost, and 0 if not, or if a hold is replaced."""
    others = (
        cost for algorithm, cost in zip(algorithms, costs, strict=True) if not isinstance(algorithm, Penalty)
    )
    own = int(any(others) and not any(replaces or ()))
    return [
        own if isinstance(algorithm, Penalty) else cost
        for algorithm, cost in zip(algorithms, costs, strict=True)
    ]


def _count_refusal(
    algorithms: Sequence[Algorithm],
    states: Sequence[State | None],
    verdicts: Sequence[Verdict],
    now: int,
    birth: int,
) -> tuple[Sequence[State | None], Sequence[Verdict]]:
    """Count a refused call in the penalties of the scopes that refused it; return the states and verdicts afterwards.

    A limit of 0 refuses without an end; its refusals do not count. Neither do those of the penalty itself.
    """
    after, answers = list(states), list(verdicts)
    for i, algorithm in enumerate(algorithms):
        if not isinstance(algorithm, Penalty) or not verdicts[i].allowed:
            continue
        refusals = [verdicts[j] for j in algorithm.watched if not verdicts[j].allowed]
        if any(verdict.retry_after_us is not None for verdict in refusals):
            state = after[i] = algorithm.count(states[i], now, birth)
            answers[i] = algorithm.decide(state, now, int(state[3] > now), birth)[1]
    return after, answers
