"""Calls with an `Idempotency-Key`: a repeated call charges nothing and gets the answer of the first one.

A note in the store of the limiter identifies the first call with a key; its answer replaces this note. It is kept for
`KEPT_SECONDS`. If the first call has no answer, because its worker was killed or the store failed, it may have charged: a
repetition then gets 409 and charges nothing.
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
from headgate_server.notes import PAUSES, read_note, write_note
from headgate_server.problems import ApiProblem
from headgate_server.replies import Reply, json_reply, problem_reply

KEPT_SECONDS = 600.0
MAX_KEYS = 10_000
"""Keys of one caller that a worker keeps; they share the store's space with holds."""

REPLAYED = (b"idempotency-replayed", b"true")

_KEY = re.compile(rb"[\x21-\x7e]{1,255}")
_UNKNOWN_OUTCOME = 500
"""A call that failed with this status or a higher one may have charged."""


class IdempotentCalls:
    """Answer calls that have an `Idempotency-Key`.

    Args:
        problem_from: Returns the problem for an exception.
        monotonic: A monotonic clock in seconds.
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
        """Return the answer to this call, or to the first one with the same key.

        Args:
            notes: The notes of the limiter's store.
            key: The value of the header field.
            caller: The owner of the key; callers with different tokens do not share keys.
            path: The path of the call; with another path or body the key is refused.
            body: The raw body.
            work: Makes the call.

        Raises:
            ApiProblem: 400 if the key is invalid, 409 if the first call has no answer, 422 if it was another call, 429 if
                the caller has used too many keys, 501 if the store keeps no notes.
            StoreError: The store cannot be reached; nothing was charged.
        """
        if _KEY.fullmatch(key) is None:
            raise ApiProblem(400, "an Idempotency-Key has 1 to 255 visible ASCII characters")
        if notes is None:
            raise ApiProblem(501, "the store of this limiter does not support Idempotency-Key")
        name = f"call/{sha256(b'%b %b' % (caller.encode(), key)).hexdigest()}"
        call = sha256(b"%b\n%b" % (path.encode("utf-8", "surrogatepass"), body)).hexdigest()
        claim = json.dumps([call, secrets.token_hex(8)])
        kept, now = self._kept_for(caller), self._monotonic()
        wait = ceil(kept[0] - now) if len(kept) >= MAX_KEYS else 0
        stored = await (read_note(notes, name) if wait else write_note(notes, name, claim, KEPT_SECONDS))
        if stored is None:
            after = ((b"retry-after", b"%d" % wait),)
            raise ApiProblem(429, f"this caller has used {MAX_KEYS} Idempotency-Keys; wait", after)
        if stored != claim:
            if json.loads(stored)[0] != call:
                raise ApiProblem(422, "this Idempotency-Key was used for another call; use a new one")
            return await _first_answer(notes, name)
        kept.append(now + KEPT_SECONDS)
        try:
            reply = json_reply(await work())
        except Exception as error:  # the same as without a key, and stored
            problem = self._problem_from(error)
            if problem.status >= _UNKNOWN_OUTCOME:
                raise problem from error
            reply = problem_reply(problem)
        answer = json.dumps([call, reply.status, reply.body.decode()])
        await write_note(notes, name, answer, KEPT_SECONDS, replaces=claim)
        return reply

    def _kept_for(self, caller: str) -> deque[float]:
        """Return the expiry times of a caller's live keys."""
        kept, now = self._kept.setdefault(caller, deque()), self._monotonic()
        while kept and kept[0] <= now:
            kept.popleft()
        return kept


async def _first_answer(notes: AsyncNotes, name: str) -> Reply:
    for pause in (*PAUSES, None):
        match json.loads(await read_note(notes, name) or "null"):
            case [_, status, body]:
                plain = json_reply(None) if status == 200 else problem_reply(ApiProblem(status, ""))
                return Reply(status, (*plain.fields, REPLAYED), body.encode())
        if pause is not None:
            await asyncio.sleep(pause)
    raise ApiProblem(
        409,
        "the first call with this Idempotency-Key has no answer yet, or its answer was lost and it may have counted; "
        "use a new key to count again",
        ((b"retry-after", b"1"),),
    )
