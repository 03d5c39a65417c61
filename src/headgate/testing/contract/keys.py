"""Keys: different keys never share a counter."""

from __future__ import annotations

from typing import Any

import pytest

from headgate import ConfigError, Limiter
from headgate.keys import PlainKey
from headgate.testing.contract.base import Contract, each_kind

HOSTILE_KEYS: tuple[PlainKey, ...] = (
    "",
    b"",
    " ",
    "a",
    "A",
    b"a",
    "a ",
    "a\x00",
    "a\x00b",
    "\x00",
    b"\x00",
    "*",
    "%",
    "?",
    "a:b",
    "a/b",
    "a|b",
    "a{b}c",
    "{",
    "}",
    "1:a",
    "1:a1:b",
    "ta",
    "ba",
    "None",
    "a\n",
    "a\r\nSET x y",
    "'; DROP TABLE states; --",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "e\N{COMBINING ACUTE ACCENT}",
    "\N{LATIN SMALL LETTER SHARP S}",
    "ss",
    "\N{GRINNING FACE}",
    "\ud83d\ude00",  # the same emoji as two lone surrogates
    "\ud83d",
    "\ude00",
    "\udcff",
    b"\xff",
    b"\xed\xb3\xbf",
    "\N{ZERO WIDTH SPACE}",
    "\N{FULLWIDTH LATIN SMALL LETTER A}",
    *("x" * length for length in (127, 128, 129, 130, 4_096, 100_000)),
    b"x" * 129,
    "x" * 129 + "y",
    "y" + "x" * 129,
)

SIMILAR_PLACES = (
    ("", "ab", "c"),
    ("", "a", "bc"),
    ("a", "b", "c"),
    ("ab", "c", ""),
    ("", "abc", ""),
    ("1:a", "b", "c"),
    ("", "1:a", "b"),
    (":", "a", "b"),
    ("", ":a", "b"),
    ("/", "a", "b"),
    ("", "/a", "b"),
)
"""The end of a limiter's name, a rule's name, a key."""


class KeyTests(Contract):
    """Hostile, long and similar keys; limiters and rules that share a store."""

    @each_kind
    def test_every_key_is_counted_separately(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, len(HOSTILE_KEYS) + 1))
        for units, key in enumerate(HOSTILE_KEYS, start=1):
            limiter.record(key, units)
        for units, key in enumerate(HOSTILE_KEYS, start=1):
            assert (key, limiter.check(key, 0).remaining) == (key, len(HOSTILE_KEYS) + 1 - units)

    @each_kind
    def test_a_reset_clears_only_one_key(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 5))
        for key in HOSTILE_KEYS:
            limiter.hit(key, 2)
        for key in HOSTILE_KEYS[::2]:
            limiter.reset(key)
        assert [limiter.check(key, 0).remaining for key in HOSTILE_KEYS[::2]] == [5] * len(HOSTILE_KEYS[::2])
        assert [limiter.check(key, 0).remaining for key in HOSTILE_KEYS[1::2]] == [3] * len(
            HOSTILE_KEYS[1::2]
        )

    def test_names_and_keys_cannot_be_mixed_up(self) -> None:
        """However the same letters are divided between limiter, rule and key."""
        kind = self.kinds[0]
        base = self.limiter(self.rule(kind, 9)).name
        limiters = [
            (self.limiter(self.rule(kind, 99, name=rule), name=base + limiter), key)
            for limiter, rule, key in SIMILAR_PLACES
        ]
        for units, (limiter, key) in enumerate(limiters, start=1):
            limiter.record(key, units)
        assert [limiter.check(key, 0).remaining for limiter, key in limiters] == [
            99 - units for units in range(1, len(limiters) + 1)
        ]

    def test_a_different_kind_or_period_is_a_different_rule(self) -> None:
        rules = [
            self.rule(kind, 9, period, name="same")
            for kind in self.kinds
            for period in (1_000_000, 2_000_000)
        ]
        limiters = [self.limiter(rules[0])]
        limiters += [self.limiter(rule, name=limiters[0].name) for rule in rules[1:]]
        for units, limiter in enumerate(limiters, start=1):
            limiter.record("a", units)
        assert [limiter.check("a", 0).remaining for limiter in limiters] == [
            9 - units for units in range(1, len(rules) + 1)
        ]

    @each_kind
    def test_invalid_keys_are_refused(self, kind: str) -> None:
        bad_keys: list[Any] = [None, 7, ("a",), ["a"], {"user": "a"}, bytearray(b"a")]
        self._refuses(self.limiter(self.rule(kind, 5)), bad_keys)

    @each_kind
    def test_keys_that_do_not_match_the_scopes_are_refused(self, kind: str) -> None:
        self.need("several_rules")
        limiter = self.limiter(self.rule(kind, 5, scope="user"), self.rule(kind, 5, scope="realm"))
        unknown = {"user": "a", "realm": "b", "more": "c"}
        bad_keys: list[Any] = [None, "a", {}, {"user": "a"}, unknown, {"user": 1, "realm": "b"}]
        self._refuses(limiter, bad_keys)

    def _refuses(self, limiter: Limiter, keys: list[Any]) -> None:
        for key in keys:
            for call in (limiter.hit, limiter.check, limiter.hold, limiter.record, limiter.reset):
                with pytest.raises(ConfigError):
                    call(key)
