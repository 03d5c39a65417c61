"""The usual limit in one piece: one rule with its own limit, counted in memory, everything but the key fixed.

It asks and writes the fields of the response in one go, because that is what nearly every request needs, and in the middle
of an application every function that is called costs more than what it does. Anything out of the ordinary is left to the
general way, `Exchange.ask` and `Writer.fields`; a property test holds both to the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headgate import MemoryStore
from headgate.clock import MICROSECONDS
from headgate.decision import Decision
from headgate.http.headers import ROUND_UP, Field, Writer

if TYPE_CHECKING:
    from headgate import AsyncLimiter
    from headgate.http.limit import RequestLimit

AtOnce = Callable[[Any], tuple[Decision, list[Field] | None, int]]
"""Takes a request; returns the decision, its fields (`None` if the general way has to write them), and the time (us)."""


def asking_at_once(limit: RequestLimit[Any], limiter: AsyncLimiter, writer: Writer) -> AtOnce | None:
    """Return what asks this limiter about requests in one go; `None` if the limit is not a usual one."""
    hit, usual = _immediate_hit(limiter), writer.usual
    if hit is None or usual is None or not limit.is_plain:
        return None
    key_of, address_of, cost, clock_ns = limit.key, limit.address, limit.cost, limit.clock_ns
    in_seconds = writer.style.x_ratelimit == "seconds"
    own_limit, policy_field, limit_field, name = usual
    start = b"%b;r=" % name
    # What of the fields is the same from second to second, and what it was made of.
    last: tuple[int, int, bytes, Field] = -1, -1, b"", (b"", b"")
    if cost > own_limit > 0:
        return None  # a policy has made the limit too small since; the general way says so to every request

    def ask(request: Any) -> tuple[Decision, list[Field] | None, int]:
        nonlocal last
        key = key_of(request)
        if key is None:
            key = address_of(request).encode()
        decision = hit(key, cost, None, None)
        now = clock_ns() // 1000
        allowed, limit, remaining, retry_us, reset_us, _, _, _, _ = decision
        if limit != own_limit or reset_us is None or not (allowed or retry_us):
            return decision, None, now
        left = b"%d" % remaining
        window = (reset_us + ROUND_UP) // MICROSECONDS
        until = window if in_seconds else (now + reset_us + ROUND_UP) // MICROSECONDS
        last_window, last_until, end, reset_field = last
        if window != last_window or until != last_until:
            end, reset_field = b";t=%d" % window, (b"x-ratelimit-reset", b"%d" % until)
            last = window, until, end, reset_field  # in one step: there may be other threads
        fields = [
            policy_field,
            (b"ratelimit", start + left + end),
            limit_field,
            (b"x-ratelimit-remaining", left),
            reset_field,
        ]
        if not allowed:
            wait = (retry_us + ROUND_UP) // MICROSECONDS
            fields.append((b"retry-after", b"%d" % wait))
            if window > wait:
                fields[1] = (b"ratelimit", b"%b;r=%b;t=%d" % (name, left, wait))
        return decision, fields, now

    return ask


def _immediate_hit(limiter: AsyncLimiter) -> Any:
    """Return the hit of a limiter that counts in memory and does nothing else: that one need not be awaited."""
    # Hooks, a clock beside the store's or a policy for its failures would be around the store's own gate.
    if type(limiter.store) is not MemoryStore or vars(limiter).get("hit") is None:
        return None
    return limiter.store.bind(limiter.name, limiter.rules).hit
