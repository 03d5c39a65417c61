"""Positions of the values of a TOML text."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.policy import PolicyError, parse_policy
from headgate.policy.positions import Path, positions

TEXT = '''# a comment with "quotes" and [brackets]
title = "top"

[limiters."a.b"]   # a quoted name
rules = [ "5/minute",  # five
  { quota = '10/s', tiers = { pro = "20/s" } },
]
multi = """
[not.a.table]
x = 1"""
dotted.key = 3

[[limiters.x.overrides]]
key = "first"
[[limiters.x.overrides]]
key = 'second'
[limiters.x.overrides.rules]
hourly = "9/hour"
'''


def test_positions_of_a_document() -> None:
    found = positions(TEXT)
    assert found["title",] == (2, 9)
    assert found["limiters", "a.b"] == (4, 1)
    assert found["limiters", "a.b", "rules", 0] == (5, 11)
    assert found["limiters", "a.b", "rules", 1, "quota"] == (6, 13)
    assert found["limiters", "a.b", "rules", 1, "tiers", "pro"] == (6, 37)
    assert found["limiters", "a.b", "dotted", "key"] == (11, 14)
    assert found["limiters", "x", "overrides", 0, "key"] == (14, 7)
    assert found["limiters", "x", "overrides", 1, "key"] == (16, 7)
    assert found["limiters", "x", "overrides", 1, "rules", "hourly"] == (18, 10)
    assert not any("not" in path for path in found)


@pytest.mark.parametrize("name", [r'"l\u006fgin"', r'"a\"b"', '"tab\\t"', "'a\\b'", '""'])
def test_an_error_in_a_table_with_a_quoted_name_has_its_position(name: str) -> None:
    with pytest.raises(PolicyError, match=r"^policy:5:10: "):
        parse_policy(f'[limiters.a]\nrules = ["5/minute"]\n\n[limiters.{name}]\nrules = ["5/fortnight"]\n')


def leaves(value: object, path: Path = ()) -> dict[Path, object]:
    """Return every value except tables and arrays, by path."""
    if isinstance(value, dict):
        return {p: v for key, item in value.items() for p, v in leaves(item, (*path, key)).items()}
    if isinstance(value, list):
        return {p: v for index, item in enumerate(value) for p, v in leaves(item, (*path, index)).items()}
    return {path: value}


def written_key(name: str) -> str:
    """Return a name as TOML, in quotes and with escapes if it needs them."""
    return name if re.fullmatch("[a-z0-9_-]+", name) else json.dumps(name)


def written(value: object) -> str:
    """Return a value as TOML, arrays over several lines with comments."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{written_key(key)} = {written(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[ # ]\n" + "".join(f"  {written(item)}, # ,\n" for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


NAMES = st.text("abc_-9", min_size=1, max_size=5) | st.text("a\"'\\\n .]#=é", max_size=5)
VALUES = st.recursive(
    st.integers(-99, 99) | st.text("ab ,#[]{}=.", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, st.integers(0, 9), max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=4), max_size=4))
def test_the_positions_of_random_documents(
    document: dict[str, dict[str, object]],
) -> None:
    text = "".join(
        f"[{written_key(table)}]\n"
        + "".join(f"{written_key(key)} = {written(value)}\n" for key, value in pairs.items())
        for table, pairs in document.items()
    )
    assert tomllib.loads(text) == document
    found = positions(text)
    lines = text.split("\n")
    for path, value in leaves(document).items():
        line, column = found[path]
        assert lines[line - 1][column - 1 :].startswith(written(value))
