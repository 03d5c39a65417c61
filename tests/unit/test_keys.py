"""Keys of limiters, and their names in a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import ConfigError, Limiter, SQLiteStore, fixed_window, sliding_log, sliding_window
from headgate.keys import LONGEST_KEY, SHARED_KEY, Key, key_picker, key_to_data, storage_key, storage_prefix
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore

PLAIN = sliding_window("5/minute")
USER = sliding_window("5/minute", scope="user")
REALM = sliding_window("5/minute", scope="realm")
SHARED = sliding_window("5/minute", scope="*")


def test_plain_key_applies_to_every_unscoped_rule() -> None:
    pick = key_picker((PLAIN, SHARED))
    assert pick("ada") == ("ada", SHARED_KEY)
    assert pick(b"ada") == (b"ada", SHARED_KEY)
    assert pick("") == ("", SHARED_KEY)


def test_scope_selects_its_entry_of_the_mapping() -> None:
    pick = key_picker((REALM, SHARED, USER, REALM))
    assert pick({"user": "ada", "realm": b"north"}) == (b"north", SHARED_KEY, "ada", b"north")


@pytest.mark.parametrize("key", [None, "anything", b"", {"any": "thing"}, 5])
def test_shared_rules_need_no_key(key: Any) -> None:
    assert key_picker((SHARED, SHARED))(key) == (SHARED_KEY, SHARED_KEY)
    assert key_picker(())(key) == ()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, r"a key is missing: write for example limiter.hit\('alice'\)"),
        (5, r"text or bytes, not 5; write str\(5\)"),
        (("a", "b"), "text or bytes, not"),
        ({"user": "ada"}, "the rules have no scope, so the key is text or bytes, not a mapping"),
    ],
)
def test_key_must_be_text_or_bytes_without_scoped_rules(key: Any, message: str) -> None:
    for rules in ((PLAIN,), (PLAIN, SHARED)):
        with pytest.raises(ConfigError, match=message):
            key_picker(rules)(key)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            None,
            r"the rules count by 'realm', 'user', so the key is a mapping like .*'realm'.*'user'.*, not None",
        ),
        ("ada", "so the key is a mapping"),
        ({}, "no entry for 'realm', 'user'"),
        ({"user": "ada"}, "no entry for 'realm'; the rules count by 'realm', 'user'"),
        ({"user": "ada", "realms": "north"}, "no entry for 'realm'"),
        ({"user": "ada", "realm": "n", "extra": "x"}, "no rule counts by 'extra'"),
        ({"user": "ada", "realm": "n", "*": "x"}, r"no rule counts by '\*'"),
        ({"user": "ada", "realm": None}, "a key is missing"),
        ({"user": "ada", "realm": 5}, "text or bytes, not 5"),
    ],
)
def test_a_missing_or_unknown_scope_is_refused(key: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        key_picker((USER, REALM, SHARED))(key)


@pytest.mark.parametrize("url", [None, "sqlite:///:memory:"])
def test_record_of_zero_units_still_checks_the_key(url: str | None) -> None:
    with Limiter(USER, name="x", store=url) as limiter, pytest.raises(ConfigError):
        limiter.record({"usr": "ada"}, 0)


def test_any_mapping_can_be_a_key() -> None:
    class Request(Mapping[str, str]):
        def __getitem__(self, name: str) -> str:
            return {"user": "ada"}[name]

        def __iter__(self) -> Any:
            return iter(["user"])

        def __len__(self) -> int:
            return 1

    assert Limiter(USER).hit(Request()).remaining == 4


# --- In a store ------------------------------------------------------------------------------------------------------

NAMES = st.text(alphabet="a1:/é*", max_size=4)
RULES = st.sampled_from(
    [
        fixed_window("5/minute"),
        sliding_log("5/minute"),
        *(fixed_window("5/minute", name=n) for n in ("1", "1:", "a")),
    ]
)
PLAIN_KEYS = st.one_of(
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(["x" * n for n in range(LONGEST_KEY - 1, LONGEST_KEY + 3)]),
    st.sampled_from([b"x" * n for n in range(LONGEST_KEY - 1, LONGEST_KEY + 3)]),
    st.just("\udc80"),
)
PLACES = st.tuples(NAMES, NAMES, RULES, PLAIN_KEYS)


def name_in_store(place: tuple[Any, ...]) -> bytes:
    namespace, limiter, rule, key = place
    return storage_key(storage_prefix(namespace, limiter, rule), key)


@given(PLACES, PLACES)
def test_storage_names_are_unique(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (name_in_store(one) == name_in_store(other)) == (one == other)


def test_a_long_key_is_replaced_by_its_digest_and_a_short_one_is_not() -> None:
    at_most, longer = "x" * LONGEST_KEY, "x" * (LONGEST_KEY + 1)
    assert storage_key(b"p", at_most) == b"pt" + at_most.encode()
    assert len(storage_key(b"p", longer)) == 34
    assert storage_key(b"p", longer)[:2] == b"pT"
    assert storage_key(b"p", longer.encode())[:2] == b"pB"


def test_digest_never_equals_the_name_of_another_key() -> None:
    digest = storage_key(b"", "x" * 1000)
    assert storage_key(b"", digest[1:]) != digest
    assert storage_key(b"", digest) != digest


@pytest.mark.parametrize(
    ("key", "document"),
    [
        ("alice", "alice"),
        ("", ""),
        (None, None),
        (b"\x00\x01\x02", {"$base64": "AAEC"}),
        (b"", {"$base64": ""}),
        ({"user": "42", "realm": b"\xff"}, {"user": "42", "realm": {"$base64": "/w=="}}),
        ({}, {}),
    ],
)
def test_keys_are_converted_to_json_values(key: Key | None, document: object) -> None:
    assert key_to_data(key) == document


def test_scope_named_like_the_bytes_marker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\$base64"):
        key_to_data({"$base64": "AAEC"})


@pytest.mark.parametrize("namespace", [None, 5, b"app", ["app"]], ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        partial(SQLiteStore, ":memory:"),
        partial(RedisStore, "redis://localhost"),
        partial(PostgresStore, "postgresql://localhost"),
    ],
    ids=["sqlite", "redis", "postgresql"],
)
def test_namespace_must_be_text(make: Callable[..., Any], namespace: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make(namespace=namespace)
    assert str(caught.value) == f"namespace= is text, not {namespace!r}"
