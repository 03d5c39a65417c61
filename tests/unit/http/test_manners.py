"""What clients make of the header fields of answers."""

from __future__ import annotations

import pytest

from headgate import Limiter
from headgate.http import Fields, Writer
from headgate.http.client import asked_pause
from headgate.testing import FakeClock

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({"retry-after": "30"}, 30),
        ({"Retry-After": "30"}, 30),
        ({"X-RateLimit-Remaining": "0", "X-RATELIMIT-RESET": "20"}, 20),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "Tue, 14 Nov 2023 22:14:20 GMT"}, 60),
        ({"retry-after": "Tue, 14 Nov 2023 22:14:20"}, 60),
        ({"retry-after": "Tue, 14 Nov 2023 22:00:00 GMT"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "14 Nov 9999999999999 22:14:20"}, None),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 -2999999999993"}, None),
        ({"retry-after": "99999999999"}, 86_400),
        ({"retry-after": "7", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "90"}, 7),
        ({"retry-after": "soon", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "90"}, 90),
        ({"ratelimit": '"a";r=0;t=30, "b";r=5;t=90, "c";r=0;t=45'}, 45),
        ({"ratelimit": '"a,;r=0;t=99";r=1;t=30'}, None),
        ({"ratelimit": '"a;r=0;t=30'}, None),
        ({"ratelimit": '"' + r"\"" * 50_000 + "\\"}, None),  # a pattern that tries every quote takes minutes
        ({"ratelimit": '"a";r=0'}, None),
        ({"ratelimit": '"a";r=01;t=30'}, None),
        ({"ratelimit": "limit=100, remaining=0, reset=20"}, 20),
        ({"ratelimit": "limit=100, remaining=10, reset=20"}, None),
        ({"ratelimit-remaining": "0", "ratelimit-reset": "20"}, 20),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "20"}, 20),
        ({"x-rate-limit-remaining": "0", "x-rate-limit-reset": str(int(NOW) + 20)}, 20),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": str((int(NOW) + 20) * 1000)}, 20),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "2023-11-14"}, None),
        ({"x-ratelimit-remaining": "1", "x-ratelimit-reset": "20"}, None),
        ({}, None),
    ],
)
def test_pauses_that_are_asked_for(headers: dict[str, str], pause: float | None) -> None:
    assert asked_pause(headers, NOW, True) == pause


def test_retry_after_is_for_refusals() -> None:
    assert asked_pause({"retry-after": "30"}, NOW, False) is None


@pytest.mark.parametrize(
    "fields", [Fields(x_ratelimit=None), Fields(ratelimit=None), *(Fields(None, draft) for draft in (6, 7))]
)
def test_what_our_own_edges_write_is_understood(fields: Fields) -> None:
    clock = FakeClock(NOW)
    limiter = Limiter("2/minute", name="odd;r=0;t=1", store="memory://", clock=clock)
    writer = Writer(limiter.rules, fields)
    seen = []
    for _ in range(3):
        decision = limiter.hit("a")
        written = {name.decode(): value.decode() for name, value in writer.fields(decision, clock.now_us())}
        seen.append(asked_pause(written, NOW, not decision.allowed))
    assert seen[0] is None
    assert seen[1] == 61
    assert seen[2] == 61
