"""Bucket tables without a database: validation, and encoding of keys and names."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import pytest

from headgate import (
    ConfigError,
    calendar,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.stores.postgres import BucketTable
from headgate.stores.postgres.sql import migrations, query

NO_CONNECTION: Any = None
"""Stands for a connection, which an invalid call never uses."""
SCOPED = (sliding_window("10/hour", scope="user"), sliding_window("100/hour", scope="realm"))


@pytest.mark.parametrize(
    ("rules", "options", "problem"),
    [
        ((), {}, "needs a rule"),
        ((token_bucket("5/minute"),), {}, "is a token_bucket"),
        ((fixed_window("5/minute"),), {}, "is a fixed_window"),
        ((sliding_log("5/minute"),), {}, "is a sliding_log"),
        ((concurrent(5, lease="60s"),), {}, "is a concurrent"),
        ((calendar("5/day"),), {}, "is a calendar"),
        (
            ("5/minute", sliding_window("90/minute", unit="tokens", name="t")),
            {},
            "one unit, not 'requests', 'tokens'",
        ),
        (("5/minute", "50/hour"), {}, "buckets of one width, not 1 s for .* 60 s for"),
        (("5/minute",), {"key_type": "integer"}, "key_type must be"),
        (("5/minute",), {"table": ""}, "name of a table or column must be"),
        (("5/minute",), {"table": ("public", "x\0")}, "name of a table or column must be"),
        (("5/minute",), {"key": 5}, "name of a table or column must be"),
        (SCOPED, {"key_type": "bigint", "plain": "user"}, "supports one scope only"),
        ((sliding_window("5/minute", scope="a:b"),), {}, "must not contain ':'"),
    ],
)
def test_invalid_options_are_refused(rules: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        BucketTable(*rules, **{"table": "t", **options})


@pytest.mark.parametrize(
    ("key_type", "key"),
    [
        ("uuid", "nobody"),
        ("uuid", 5),
        ("uuid", None),
        ("bigint", "5"),
        ("bigint", True),
        ("bigint", 2**63),
        ("text", 5),
    ],
)
def test_a_key_of_another_type_is_refused(key_type: Any, key: Any) -> None:
    with pytest.raises(ConfigError, match="a key must be"):
        BucketTable("5/minute", table="t", key_type=key_type).check(NO_CONNECTION, key)


@pytest.mark.parametrize(
    "key", [None, "ada", {}, {"user": "ada"}, {"user": "ada", "realm": "x", "team": "y"}]
)
def test_a_key_without_the_scopes_is_refused(key: Any) -> None:
    table = BucketTable(*SCOPED, table="t", plain="user")
    with pytest.raises(ConfigError, match="count by 'realm', 'user'"):
        table.check(NO_CONNECTION, key)


def test_a_cost_by_unit_is_refused() -> None:
    table: Any = BucketTable("5/minute", table="t")
    with pytest.raises(ConfigError, match="a cost is a whole number"):
        table.check(NO_CONNECTION, "a", {"requests": 1})


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ConfigError, match="with a time zone"):
        BucketTable("5/minute", table="t").check(NO_CONNECTION, "a", now=datetime(2026, 1, 1))  # noqa: DTZ001


def test_invalid_cleanup_options_are_refused() -> None:
    table: Any = BucketTable("5/minute", table="t")
    with pytest.raises(ConfigError, match="older_than is a timedelta, not 3600"):
        table.cleanup(None, older_than=3600)
    with pytest.raises(ConfigError, match="batch must be a whole number from 1 to "):
        table.cleanup(None, batch=0)


def test_scopes_are_encoded_as_documented() -> None:
    """The encoding is part of the table's contents: a change would lose counts."""
    rules = (*SCOPED, sliding_window("1000/hour", scope="*"))
    key = {"user": "6b1f29cc-1a8b-4a53-9a40-0f0f6f2c1d11", "realm": "north"}
    texts = BucketTable(*rules, table="t", plain="user")
    assert texts._keys(key) == ["6b1f29cc-1a8b-4a53-9a40-0f0f6f2c1d11", "@realm:north", "@*"]
    uuids = BucketTable(*rules, table="t", key_type="uuid", plain="user")._keys(key)
    assert uuids == [
        UUID("6b1f29cc-1a8b-4a53-9a40-0f0f6f2c1d11"),
        UUID("11b308a1-c075-8ca8-96d9-1e02c650a08b"),
        UUID("21535b47-498d-8d02-82c6-c87f02253861"),
    ]
    assert [uuid.version for uuid in uuids if isinstance(uuid, UUID)] == [4, 8, 8]


def test_table_names_are_quoted_as_sql_identifiers() -> None:
    assert BucketTable("5/minute", table='a"b').table == '"a""b"'
    assert BucketTable("5/minute", table=("my schema", "t")).table == '"my schema"."t"'


def test_queries_have_names_and_migrations_have_numbers() -> None:
    assert query("clean") == "SELECT headgate_clean_v1($1, $2)"
    number, name, text = migrations()[0]
    assert (number, name) == (1, "create tables")
    assert "CREATE TABLE headgate_states" in text
    with pytest.raises(KeyError):
        query("nothing")
