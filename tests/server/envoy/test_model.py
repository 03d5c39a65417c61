"""Random requests: decisions equal those of a simple model with counts in a dictionary."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from headgate_server.envoy.messages import OK, OVER_LIMIT
from tests.server.envoy.asking import Service, codes, policy_with

LIMITS = {"a": 3, "b": 5, "c": 8}
RULES = ", ".join(f'{{ quota = "{limit}/hour", scope = "{scope}" }}' for scope, limit in LIMITS.items())
DESCRIPTORS = ", ".join(f'{{ key = "{scope}", scope = "{scope}" }}' for scope in LIMITS)

descriptors = st.builds(
    lambda scope, key, hits: {scope: key} | ({} if hits is None else {"hits": hits}),
    st.sampled_from([*LIMITS, "unknown"]),
    st.sampled_from(["x", "y"]),
    st.sampled_from([None, None, 0, 1, 2, 4, 2**63]),
)
requests = st.tuples(st.lists(descriptors, max_size=5), st.sampled_from([0, 0, 1, 3]))


class Model:
    """Counts of one window that never ends."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def decide(self, asked: list[dict[str, Any]], hits: int) -> list[int]:
        """Return the codes of all statuses, and charge if none refuses."""
        places: list[tuple[str, str] | None] = []
        costs: Counter[tuple[str, str]] = Counter()
        for descriptor in asked:
            scope, key = next(iter(descriptor.items()))
            place = (scope, key) if scope in LIMITS else None
            places.append(place)
            if place is not None:
                costs[place] += descriptor.get("hits", hits or 1)
        refusing = {
            place for place, cost in costs.items() if self.counts[place] + (cost or 1) > LIMITS[place[0]]
        }
        if not refusing:
            self.counts.update(costs)
        return [OVER_LIMIT if place in refusing else OK for place in places]


# A refusal charges no descriptor, also if the refused one is only checked.
@example([([{"a": "x"}], 3), ([{"a": "x"}, {"b": "x"}], 1), ([{"b": "x"}], 5)])
@example([([{"a": "x"}], 3), ([{"a": "x", "hits": 0}, {"b": "x"}], 1), ([{"b": "x"}], 5)])
# A check of no units charges nothing, and is refused if there is no room for one.
@example([([{"a": "x", "hits": 0}], 0), ([{"a": "x"}], 3), ([{"a": "x", "hits": 0}], 0)])
# Equal descriptors are charged together.
@example([([{"a": "x"}, {"a": "x"}], 1), ([{"a": "x"}, {"a": "x"}], 1), ([{"a": "x"}], 1)])
# Two keys of one scope are all or nothing, whichever refuses.
@example([([{"a": "x"}], 3), ([{"a": "x"}, {"a": "y"}], 1), ([{"a": "y"}, {"a": "x"}], 1), ([{"a": "y"}], 3)])
@example(
    [([{"a": "x", "hits": 3}, {"a": "y", "hits": 0}], 0), ([{"a": "x"}, {"a": "y"}], 1), ([{"a": "y"}], 3)]
)
@given(st.lists(requests, max_size=12))
def test_decisions_equal_those_of_the_model(trace: list[tuple[list[dict[str, Any]], int]]) -> None:
    async def run() -> None:
        service, model = Service(policy_with(DESCRIPTORS, RULES)), Model()
        for asked, hits in trace:
            before = dict(model.counts)
            expected = model.decide(asked, hits)
            response = await service.ask(*asked, hits=hits)
            found = codes(response)
            assert len(found) == len(asked)
            # A refusal may name fewer descriptors: a cost above the capacity is found before the others are asked.
            assert (OVER_LIMIT in found) is (OVER_LIMIT in expected), (asked, hits, before)
            assert response.overall_code == (OVER_LIMIT if OVER_LIMIT in expected else OK)
            assert all(
                wanted == OVER_LIMIT
                for wanted, code in zip(expected, found, strict=True)
                if code == OVER_LIMIT
            )

    asyncio.run(run())
