"""Calls with an `Idempotency-Key`: sent twice, they charge once, and the second gets the answer of the first.

Two notes in the store of the limiter belong to a key: which call came first, and its answer. Both are kept for
`KEPT_SECONDS`. If the first call has no answer, because its worker was killed or the store failed, it may have charged: a
repetition is then answered with 409 and charges nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from hashlib import sha256
from math import ceil

from headgate.stores import AsyncNotes
from headgate_server.hold_notes import PAUSES, keep, look_up
from headgate_server.problems import ApiProblem
from headgate_server.replies import Reply, json_reply, problem_reply

KEPT_SECONDS = 600.0
MOST_KEYS = 10_000
"""Keys that one caller may have kept by a worker: notes take room that holds need too."""

REPLAYED = (b"idempotency-replayed", b"true")

_KEY = re.compile(rb"[\x21-\x7e]{1,255}")
_UNKNOWN_OUTCOME = 500
"""From this status on, a call that failed may have charged."""


class IdempotentCalls:
    """Answers calls that have a key.

    Args:
        problem_from: Returns the answer to a call that raised.
        monotonic: The seconds of a clock that never goes back.
    """

    def __init__(
        self, problem_from: Callable[[Exception], ApiProblem], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._problem_from = problem_from
        self._monotonic = monotonic
        self._kept: dict[str, deque[float]] = {}

    async def answer(
        self,
        notes: AsyncNotes | None,
        key: bytes,
        caller: str,
        path: str,
        body: bytes,
        work: Callable[[], Awaitable[object]],
    ) -> Reply:
        """Return the answer to a call: of this one, or of the first one with the same key.

        Args:
            notes: Of the limiter's store.
            key: The value of the header field.
            caller: Whose key it is: callers with different tokens do not share keys.
            path: What the call is for; with another path or body the key is refused.
            body: As it was sent.
            work: Makes the call.

        Raises:
            ApiProblem: 400 if this is no key, 409 if the first call has no answer, 422 if it was another call, 429 if the
                caller has used too many keys, 501 if the store keeps no notes.
            StoreError: The store cannot be asked; nothing was charged.
        """
        if _KEY.fullmatch(key) is None:
            raise ApiProblem(400, "an Idempotency-Key is 1 to 255 visible ASCII characters")
        if notes is None:
            raise ApiProblem(
                501, "the store of this limiter keeps no notes, so it cannot have an Idempotency-Key"
            )
        name = f"call/{sha256(b'%b %b' % (caller.encode(), key)).hexdigest()}"
        call = sha256(b"%b\n%b" % (path.encode("utf-8", "surrogatepass"), body)).hexdigest()
        claim = f"{call} {secrets.token_hex(8)}"
        kept, now = self._kept_for(caller), self._monotonic()
        wait = ceil(kept[0] - now) if len(kept) >= MOST_KEYS else 0
        stands = await (look_up(notes, name) if wait else keep(notes, name, claim, KEPT_SECONDS))
        if stands is None:
            after = ((b"retry-after", b"%d" % wait),)
            raise ApiProblem(429, f"{MOST_KEYS} Idempotency-Keys of this caller are kept; wait", after)
        if stands != claim:
            if stands.partition(" ")[0] != call:
                raise ApiProblem(422, "this Idempotency-Key was used for another call; use a new one")
            return await _first_answer(notes, name)
        kept.append(now + KEPT_SECONDS)
        try:
            reply = json_reply(await work())
        except Exception as error:  # the same as without a key, and noted besides
            problem = self._problem_from(error)
            if problem.status >= _UNKNOWN_OUTCOME:
                raise problem from error
            reply = problem_reply(problem)
        await keep(notes, _answer_of(name), json.dumps([reply.status, reply.body.decode()]), KEPT_SECONDS)
        return reply

    def _kept_for(self, caller: str) -> deque[float]:
        """Return when the keys of a caller end that are kept."""
        kept, now = self._kept.setdefault(caller, deque()), self._monotonic()
        while kept and kept[0] <= now:
            kept.popleft()
        return kept


async def _first_answer(notes: AsyncNotes, name: str) -> Reply:
    for pause in (*PAUSES, None):
        text = await look_up(notes, _answer_of(name))
        if text is not None:
            status, body = json.loads(text)
            plain = json_reply(None) if status == 200 else problem_reply(ApiProblem(status, ""))
            return Reply(status, (*plain.fields, REPLAYED), body.encode())
        if pause is not None:
            await asyncio.sleep(pause)
    raise ApiProblem(
        409,
        "the first call with this Idempotency-Key has no answer: it is under way, or its answer was lost and it may have "
        "counted; to count once more, use a new key",
        ((b"retry-after", b"1"),),
    )


def _answer_of(name: str) -> str:
    return f"{name}/answer"
