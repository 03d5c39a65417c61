"""Valid policies, and the errors of invalid ones."""

from __future__ import annotations

import os
import re
import textwrap
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

import pytest

from headgate import calendar, concurrent, local, sliding_window, token_bucket
from headgate.policy import (
    Policy,
    PolicyError,
    ServerPolicy,
    TokenPolicy,
    explain,
    load_policy,
    parse_policy,
)

FULL = """
[store]
url = "sqlite:///limits.db"

[limiters.login]
rules = ["5/minute; 20/hour"]

[limiters.api]
rules = [
  "10/s burst 20",
  { quota = "100/hour", name = "hourly", tiers = { pro = "1000/hour" } },
  { quota = "50/hour", name = "candidate", shadow = true },
]
store = "memory://"
default_tier = "free"
on_store_error = { local = 0.25 }
deadline = 0.5
headers = "ietf"

[[limiters.api.overrides]]
key = "alice"
rules = { hourly = "5000/hour" }
"""


def test_the_smallest_policy() -> None:
    policy = parse_policy('[limiters.login]\nrules = ["5/minute"]')
    login = policy.limiters["login"]
    assert login.rules == (sliding_window("5/minute"),)
    assert (login.store, login.on_store_error, login.deadline) == ("memory://", "open", None)
    assert (login.headers, login.default_tier, login.shadow) == ("both", None, ())


def test_all_settings_of_limiters() -> None:
    policy = parse_policy(FULL)
    assert [rule.name for rule in policy.limiters["login"].rules] == [
        "per-minute",
        "per-hour",
    ]
    assert policy.limiters["login"].store == "sqlite:///limits.db"
    api = policy.limiters["api"]
    assert api.rules[0] == token_bucket("10/s burst 20")
    assert [rule.name for rule in api.shadow] == ["candidate"]
    assert (api.store, api.default_tier, api.on_store_error) == ("memory://", "free", local(0.25))
    assert (api.deadline, api.headers) == (0.5, "ietf")


@pytest.mark.parametrize(
    ("rule", "column", "message"),
    [
        ("5", 10, "expected a table"),
        ('"5/minute", "5/fortnight"', 22, "unit of time"),
        ('"5/minute", "6/minute"', 9, "two rules are called"),
        ('{ kind = "token_bucket" }', 10, "needs a quota"),
        ('{ quota = "5/m", kind = "leaky" }', 34, "'token_bucket'"),
        ('{ quota = "5/m burst 9", kind = "fixed_window" }', 10, "no burst"),
        ('{ quota = "5/m", kind = "sliding_log", buckets = 9 }', 59, "for sliding_window"),
        ('{ quota = "5/m", shadow = 1 }', 36, "true or false"),
        ('{ quota = "5/m", tiers = { a = "5/h" } }', 41, "period"),
        ('{ quota = "5/m", tiers = { "" = "6/m" } }', 42, "a tier needs a name"),
        ('{ kind = "concurrent", quota = 5 }', 10, "concurrent needs a lease"),
        ('{ kind = "concurrent", quota = "5", lease = "60s" }', 41, "a whole number from 0"),
        ('{ kind = "concurrent", quota = 5, lease = "soon" }', 52, "lease"),
        ('{ kind = "concurrent", quota = 5, lease = true }', 52, "a lease is text like '60s'"),
        ('{ kind = "concurrent", quota = 5, lease = "60s", tiers = { a = "9/m" } }', 73, "number from 0"),
        ('{ quota = "5/m", lease = "60s" }', 35, "lease is for concurrent, not for sliding_window"),
        ('{ quota = "5/d", timezone = "UTC" }', 38, "timezone is for calendar, not for sliding_window"),
        ('{ kind = "calendar", quota = "5/month", timezone = "Berlin" }', 61, "Berlin"),
        ('{ kind = "calendar", quota = "5/month", timezone = 2 }', 61, "expected text"),
        ('{ kind = "calendar", quota = "5/hour" }', 39, "expected day, week, month or year"),
        ('{ kind = "calendar", quota = 5 }', 39, "expected text"),
        ('{ kind = "calendar", quota = "5/month", tiers = { a = "9/day" } }', 64, "the period of '5/month'"),
        ('{ quota = "5/month" }', 20, 'in a policy file { kind = "calendar", quota = "5/month" }'),
        ('{ quota = "5/m", unit = 3 }', 34, "expected text"),
        ('{ quota = "5/m", unit = "" }', 34, "expected text"),
    ],
)
def test_an_invalid_rule_is_an_error_with_its_position(rule: str, column: int, message: str) -> None:
    with pytest.raises(PolicyError, match=rf"^headgate\.toml:2:{column}: .*{re.escape(message)}") as caught:
        parse_policy(f"[limiters.x]\nrules = [{rule}]", "headgate.toml")
    assert (caught.value.line, caught.value.column) == (2, column)


@pytest.mark.parametrize(
    ("line", "place", "message"),
    [
        ("rate = 1", "3:8", "unknown key 'rate'"),
        ('headers = "all"', "3:11", "'ietf'"),
        ("deadline = 0", "3:12", "above 0"),
        (f"deadline = {10**400}", "3:12", "at most 3600"),
        ("deadline = inf", "3:12", "at most 3600"),
        ("deadline = nan", "3:12", "at most 3600"),
        ("on_store_error = { local = 2 }", "3:18", "local = 0.25"),
        ('store = ""', "3:9", "expected text"),
        ('store = "mysql://host/limits"', "3:9", "mysql"),
        ("overrides = 5", "3:13", "array of tables"),
        ('[[limiters.x.overrides]]\nkey = "a"\nrules = { b = "1/m" }', "5:15", "no rule is called 'b'"),
        ("[[limiters.x.overrides]]\nkey = 5\nrules = {}", "4:7", "a key is text"),
        ('[[limiters.x.overrides]]\nkey = "a"', "3:1", "needs a key and rules"),
    ],
)
def test_an_invalid_setting_is_an_error_with_its_position(line: str, place: str, message: str) -> None:
    with pytest.raises(PolicyError, match=rf"^headgate\.toml:{place}: .*{re.escape(message)}"):
        parse_policy(f'[limiters.x]\nrules = ["5/m"]\n{line}', "headgate.toml")


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("[limiters.x]\nrules = 5", ":2:9", "rules is an array"),
        ("[limiters.x]\nstore = 'memory://'", ":1:1", "no rules"),
        ("[limiters]\nx = 1", ":2:5", "expected a table"),
        ("[limits.x]\nrules = []", ":1:1", "unknown key 'limits'"),
        ("[limiters.x\nrules = []", ":1:12", "Expected"),
        ("", "", "no limiters"),
    ],
)
def test_an_invalid_document_is_an_error_with_its_position(text: str, place: str, message: str) -> None:
    with pytest.raises(PolicyError, match=rf"^headgate\.toml{place}: .*{re.escape(message)}"):
        parse_policy(text, "headgate.toml")


def test_a_url_in_the_form_of_a_connection_string_is_an_error_without_its_password() -> None:
    with pytest.raises(PolicyError, match=r"^policy:3:9: ") as caught:
        parse_policy('[limiters.a]\nrules = ["5/minute"]\nstore = "host=db password=s3cret"')
    assert "s3cret" not in str(caught.value)


RULES_OF_SERVICES = """
[limiters.model]
rules = [
  { quota = "60/minute", name = "requests" },
  { quota = "20000/minute", unit = "tokens", name = "tokens" },
  { kind = "concurrent", quota = 5, lease = "60s", name = "in flight", tiers = { pro = 20 } },
  { kind = "calendar", quota = "10000/month", timezone = "Europe/Berlin", unit = "tokens", tiers = { pro = "9/month" } },
]
[[limiters.model.overrides]]
key = "alice"
rules = { "in flight" = 7, "calendar-month-tokens" = "8/month" }
"""


def test_units_concurrent_rules_and_calendars() -> None:
    limiter = parse_policy(RULES_OF_SERVICES).limiters["model"]
    of_alice = limiter.rules_for("alice", "pro", limiter.rules)
    assert [rule.quota.limit for rule in of_alice] == [60, 20_000, 7, 8]
    assert [rule.quota_for("pro").limit for rule in limiter.rules] == [60, 20_000, 20, 9]
    plain = [replace(rule, tiers=MappingProxyType({})) for rule in limiter.rules]
    assert plain == [
        sliding_window("60/minute", name="requests"),
        sliding_window("20000/minute", unit="tokens", name="tokens"),
        concurrent(5, lease="60s", name="in flight"),
        calendar("10000/month", timezone="Europe/Berlin", unit="tokens"),
    ]
    [utc] = parse_policy('[limiters.x]\nrules = [{ kind = "calendar", quota = "5/day" }]').limiters["x"].rules
    assert utc == calendar("5/day")


def test_explain_units_concurrent_rules_and_calendars() -> None:
    words = explain(parse_policy(RULES_OF_SERVICES))
    assert "at most 20,000 tokens in any minute for each key  [tokens]" in words
    assert "at most 5 held at once for each key (a place that is not renewed is freed after 1m)" in words
    assert "; tier 'pro': at most 20 held at once  [in flight]" in words
    assert "at most 10,000 tokens in a calendar month of Europe/Berlin for each key" in words


def test_an_override_of_a_concurrent_rule_is_a_number() -> None:
    with pytest.raises(PolicyError, match="a whole number from 0") as caught:
        parse_policy(RULES_OF_SERVICES.replace('"in flight" = 7', '"in flight" = "7/minute"'))
    assert caught.value.line == 11


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5_000,
        "a = " + "{ a = " * 5_000,
        "a = " + "1" * 5_000,
        f'[limiters.x]\nrules = ["5/m"]\ndeadline = 0x{"f" * 5_000}',
        f'[limiters.x]\nrules = ["{"1" * 5_000}/m"]',
    ],
    ids=["brackets", "braces", "digits", "digits that can be read but not written", "a quota"],
)
def test_too_many_brackets_or_digits_are_an_error(text: str) -> None:
    with pytest.raises(PolicyError, match=r"^headgate\.toml:"):
        parse_policy(text, "headgate.toml")


def test_environment_variables_replace_single_values() -> None:
    environment = {
        "HEADGATE_STORE__URL": "memory://",
        "HEADGATE_LIMITERS__LOGIN__RULES": '["7/minute"]',
        "HEADGATE_LIMITERS__API__DEADLINE": "2",
        "HEADGATE_UNRELATED": "x",
    }
    policy = parse_policy(FULL, environment=environment)
    assert policy.limiters["login"].rules == (sliding_window("7/minute"),)
    assert policy.limiters["login"].store == "memory://"
    assert policy.limiters["api"].deadline == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('["5/fortnight"]', "fortnight"),
        ("1" * 5_000, "rules is an array"),
        ("[" * 5_000, "rules is an array"),
    ],
    ids=["quota", "digits", "brackets"],
)
def test_the_error_of_a_variable_names_it(value: str, message: str) -> None:
    with pytest.raises(
        PolicyError, match=f"^environment variable HEADGATE_LIMITERS__LOGIN__RULES: .*{message}"
    ):
        parse_policy(FULL, environment={"HEADGATE_LIMITERS__LOGIN__RULES": value})


@pytest.mark.parametrize(
    ("text", "variable", "place"),
    [
        ('store = "memory://"\n[limiters.a]\nrules = ["5/m"]', "STORE__URL", "1:9"),
        ("[limiters]\na = 5", "LIMITERS__A__RULES", "2:5"),
        ('[[limiters.a]]\nrules = ["5/m"]', "LIMITERS__A__RULES", "1:1"),
        ('server = 5\n[limiters.a]\nrules = ["5/m"]', "SERVER__PORT", "1:10"),
        ('[limiters.a]\nrules = ["5/m"]\n[server.tokens]\nx = 5', "SERVER__TOKENS__X__SHA256", "4:5"),
    ],
)
def test_a_variable_does_not_hide_that_its_parent_is_not_a_table(
    text: str, variable: str, place: str
) -> None:
    with pytest.raises(PolicyError, match=rf"^headgate\.toml:{place}: expected a table"):
        parse_policy(text, "headgate.toml", {f"HEADGATE_{variable}": "5"})


def test_the_variable_of_a_table_applies_before_those_of_its_values() -> None:
    table = {"HEADGATE_SERVER__TOKENS": f'{{ gateway = {{ sha256 = "{DIGEST}", may = ["decide"] }} }}'}
    value = {"HEADGATE_SERVER__TOKENS__GATEWAY__MAY": '["administer"]'}
    for environment in (table | value, value | table):
        tokens = parse_policy(SERVER, environment=environment).server.tokens
        assert tokens == {"gateway": TokenPolicy(DIGEST, frozenset({"administer"}))}


def test_an_ambiguous_variable_is_an_error() -> None:
    text = "".join(f'[limiters.{name}]\nrules = ["5/minute"]\n' for name in ("a-b", "a_b", "A_b", "c"))
    meant = r"limiters\.a-b\.rules, limiters\.a_b\.rules, limiters\.A_b\.rules"
    with pytest.raises(
        PolicyError, match=rf"^environment variable HEADGATE_LIMITERS__A_B__RULES: .* {meant};"
    ):
        parse_policy(text, environment={"HEADGATE_LIMITERS__A_B__RULES": '["1/s"]'})
    text = '[limiters.log-in]\nrules = ["5/minute"]'
    policy = parse_policy(text, environment={"HEADGATE_LIMITERS__LOG_IN__RULES": '["6/minute"]'})
    assert policy.limiters["log-in"].rules[0].quota.limit == 6


def test_load_policy(tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limiters.login]\nrules = ["5/minute"]')
    assert isinstance(load_policy(file), Policy)
    with pytest.raises(PolicyError, match=re.escape(str(tmp_path / "other.toml"))):
        load_policy(tmp_path / "other.toml")
    file.write_bytes(b"\xff")
    with pytest.raises(PolicyError, match="utf-8"):
        load_policy(file)
    with pytest.raises(PolicyError, match=r"null (byte|character)"):
        load_policy("headgate\0.toml")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """Opening a pipe would wait for a writer, and reading the device never ends."""
    pipe = tmp_path / "headgate.toml"
    os.mkfifo(pipe)
    for file in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(PolicyError, match=f"^{re.escape(str(file))}: it is not a regular file"):
            load_policy(file)


def test_explain() -> None:
    text = FULL.replace(
        "sqlite:///limits.db", "redis://user:p@ss@host:6379/0?password=s3cret"
    ) + textwrap.dedent("""
        [limiters.odd]
        rules = [
          { quota = "0/minute", name = "closed" },
          { quota = "3 per 90s", kind = "fixed_window" },
          { quota = "2/ms", scope = "*", kind = "sliding_log" },
        ]
        on_store_error = "closed"
    """)
    assert explain(parse_policy(text)).split("\n") == [
        "login: counted in redis://***@host:6379/0?password=***",
        "  - at most 5 in any minute for each key  [per-minute]",
        "  - at most 20 in any hour for each key  [per-hour]",
        "  These rules are decided together: all are charged, or none.",
        "  If the store is down: everything is admitted.",
        "",
        "api: counted in memory://",
        "  - a steady 10 per second, up to 20 at once for each key  [per-second]",
        "  - at most 100 in any hour for each key; tier 'pro': at most 1,000 in any hour  [hourly]",
        "  These rules are decided together: all are charged, or none.",
        "  - shadow rule, refuses nothing: at most 50 in any hour for each key  [candidate]",
        "  Callers without a known tier have the tier 'free'.",
        "  Override for 'alice': at most 5,000 in any hour (hourly).",
        "  If the store is down: each process admits 25% of every limit.",
        "",
        "odd: counted in redis://***@host:6379/0?password=***",
        "  - at most 0 in any minute for each key  [closed]",
        (
            "  - 3 per 90 seconds for each key"
            " (in fixed windows, so up to twice as many around the end of a window)  [per-90-seconds]"
        ),
        "  - at most 2 in any millisecond for everybody together (exact to the microsecond)  [per-millisecond-shared]",
        "  These rules are decided together: all are charged, or none.",
        "  If the store is down: everything is refused.",
    ]


# Server

DIGEST = "0123456789abcdef" * 4

SERVER = f"""
[limiters.login]
rules = ["5/minute"]

[server]
host = "::1"
port = 9000
top_keys = 10
largest_body = 1000

[server.tokens.gateway]
sha256 = "{DIGEST.upper()}"
may = ["decide"]

[server.tokens.operator]
sha256 = "{DIGEST[::-1]}"
may = ["decide", "administer"]
"""


def test_the_defaults_of_the_server() -> None:
    server = parse_policy('[limiters.login]\nrules = ["5/minute"]').server
    assert server == ServerPolicy("127.0.0.1", 8080, 0, 65_536, {})


def test_all_settings_of_the_server() -> None:
    policy = parse_policy(SERVER)
    assert policy.server == ServerPolicy(
        host="::1",
        port=9000,
        top_keys=10,
        largest_body=1000,
        tokens={
            "gateway": TokenPolicy(DIGEST, frozenset({"decide"})),
            "operator": TokenPolicy(DIGEST[::-1], frozenset({"decide", "administer"})),
        },
    )


def test_settings_of_the_recording() -> None:
    text = '[limiters.login]\nrules = ["5/minute"]\n[server]\nrecord = "trace.jsonl"\n'
    usual = parse_policy(text)
    assert (usual.server.record_bytes, usual.server.record_keys) == (100_000_000, "plain")
    policy = parse_policy(text + 'record_bytes = 5000\nrecord_keys = "hashed"\n')
    assert policy.server == ServerPolicy(record="trace.jsonl", record_bytes=5000, record_keys="hashed")
    for wrong in ("record_bytes = 0", 'record_keys = "no"'):
        with pytest.raises(PolicyError, match=r"headgate\.toml:5:1"):
            parse_policy(text + wrong, "headgate.toml")


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ("port = 9000", "port = 65536", "7:8", "a whole number from 0 to 65535"),
        ("port = 9000", 'port = "9000"', "7:8", "a whole number"),
        ("port = 9000", "port = true", "7:8", "a whole number"),
        ("port = 9000", "prot = 9000", "7:8", "unknown key 'prot'"),
        ('host = "::1"', "host = 5", "6:8", "expected text"),
        ("top_keys = 10", "top_keys = -1", "8:12", "from 0 to 1000"),
        ("largest_body = 1000", "largest_body = 0", "9:16", "from 1"),
        (DIGEST.upper(), DIGEST[1:], "12:10", "64 hexadecimal digits; `headgate token` makes"),
        (DIGEST.upper(), "g" * 64, "12:10", "64 hexadecimal digits"),
        (DIGEST.upper(), DIGEST[::-1], "16:10", "'gateway' has the same token"),
        ('may = ["decide"]', 'may = ["rule"]', "13:8", "'decide', 'administer'"),
        ('may = ["decide"]', "may = []", "13:7", "may is an array"),
        ('may = ["decide"]', 'may = "decide"', "13:7", "may is an array"),
        ('may = ["decide"]\n', "", "11:1", "`headgate token`"),
        ('may = ["decide"]', 'may = ["decide"]\ncan = 1', "14:7", "unknown key 'can'"),
        (
            "[server.tokens.gateway]",
            "[server.tokens]\ngateway = 5\n[server.tokens.other]",
            "12:11",
            "a table",
        ),
    ],
)
def test_an_invalid_setting_of_the_server_is_an_error_with_its_position(
    old: str, new: str, place: str, message: str
) -> None:
    assert old in SERVER
    with pytest.raises(PolicyError, match=rf"^headgate\.toml:{place}: .*{re.escape(message)}"):
        parse_policy(SERVER.replace(old, new, 1), "headgate.toml")


def test_environment_variables_replace_values_of_the_server() -> None:
    environment = {
        "HEADGATE_SERVER__HOST": "0.0.0.0",
        "HEADGATE_SERVER__PORT": "80",
        "HEADGATE_SERVER__TOKENS__GATEWAY__MAY": '["administer"]',
        "HEADGATE_SERVER__TOKENS__NOBODY__MAY": '["administer"]',
    }
    server = parse_policy(SERVER, environment=environment).server
    assert (server.host, server.port) == ("0.0.0.0", 80)
    assert server.tokens["gateway"] == TokenPolicy(DIGEST, frozenset({"administer"}))
    assert set(server.tokens) == {"gateway", "operator"}
    smallest = '[limiters.login]\nrules = ["5/minute"]'
    tokens = f'{{ ci = {{ sha256 = "{DIGEST}", may = ["decide"] }} }}'
    server = parse_policy(smallest, environment={"HEADGATE_SERVER__TOKENS": tokens}).server
    assert server.tokens == {"ci": TokenPolicy(DIGEST, frozenset({"decide"}))}
    with pytest.raises(
        PolicyError, match="environment variable HEADGATE_SERVER__PORT: expected a whole number"
    ):
        parse_policy(smallest, environment={"HEADGATE_SERVER__PORT": "http"})


def test_explain_a_limiter_with_only_shadow_rules() -> None:
    text = '[limiters.a]\nrules = [{ quota = "5/minute", name = "candidate", shadow = true }]'
    assert explain(parse_policy(text)).split("\n")[:3] == [
        "a: counted in memory://",
        "  Nothing is refused.",
        "  - shadow rule, refuses nothing: at most 5 in any minute for each key  [candidate]",
    ]


@pytest.mark.parametrize(
    ("written", "instant"),
    [("2001-01-31", "2001-01-31T00:00+00:00"), ("2999-01-31T12:30:00+01:00", "2999-01-31T11:30+00:00")],
)
def test_a_token_expires_at_a_date_in_utc_or_at_a_time(written: str, instant: str) -> None:
    token = parse_policy(SERVER + f"expires = {written}").server.tokens["operator"]
    assert token.expires == datetime.fromisoformat(instant).timestamp()


def test_lease_of_a_limiter() -> None:
    policy = parse_policy(
        '[limiters.api]\nrules = ["1000/hour"]\nstore = "redis://localhost"\nlease = "3m"\n'
    )
    assert policy.limiters["api"].lease == "3m"
