"""Credentials are masked in text and logs, in every form of URL and every part of a log record."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headgate.observe import RedactingFilter, redact

SCHEMES = (
    "redis",
    "rediss",
    "REDIS",
    "Redis",
    "valkey",
    "redis+sentinel",
    "redis-sentinel",
    "unix",
    "postgresql",
    "postgresql+psycopg",
    "https",
    "amqp",
)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("redis://user:pass@host:6379/0", "redis://***@host:6379/0"),
        ("redis://:pass@host:6379/0", "redis://***@host:6379/0"),
        ("redis://token@host:6379/0", "redis://***@host:6379/0"),
        ("redis:/user:pass@host:6379/0", "redis:/***@host:6379/0"),
        ("'redis:user:p@ss@host'", "'redis:***@host'"),
        (r"redis:\\user:pass@host", r"redis:\\***@host"),
        ("REDISS://user:pass@host", "REDISS://***@host"),
        ("redis://user:p@ss@host:6379/0", "redis://***@host:6379/0"),
        ("redis://user:p:a:ss@host/0", "redis://***@host/0"),
        ("redis://user:pa/ss@host/0", "redis://***@host/0"),
        ("redis://user:12/34@host/0", "redis://***@host/0"),
        ("https://user:12/34@host/0", "https://***@host/0"),
        ("redis://user:p%40ss@host/0", "redis://***@host/0"),
        ("redis://user:pa?ss#x@host/0", "redis://***@host/0"),
        ("redis://user:pa ss@host/0", "redis://***@host/0"),
        ("redis://user:pa ss@w@host/0", "redis://***@host/0"),
        ("redis://user:a://b@host/0", "redis://***@host/0"),
        ("redis://user:a,b://c@host/0", "redis://***@host/0"),
        ('redis://user:p"ss@host/0', "redis://***@host/0"),
        ("'redis://user:p'ss@host/0'", "'redis://***@host/0'"),
        ("redis://user:pass@[2001:db8::1]:6379/0", "redis://***@[2001:db8::1]:6379/0"),
        (
            "redis+sentinel://:p@ss@a:26379,b:26379,c:26379/main/0",
            "redis+sentinel://***@a:26379,b:26379,c:26379/main/0",
        ),
        ("redis+sentinel://u:one@a:1,u:two@b:2/main", "redis+sentinel://***@b:2/main"),
        ("redis://u:p@h/0,redis://u:q@i/1", "redis://***@h/0,redis://***@i/1"),
        ("redis://u:p@h/0 and redis://u:q@i/1.", "redis://***@h/0 and redis://***@i/1."),
        ("unix://user:pass@/run/redis.sock?db=0", "unix://***@/run/redis.sock?db=0"),
        ("redis://host:6379/0?password=s3cret&db=1", "redis://host:6379/0?password=***&db=1"),
        ("redis://host/0?db=1&PASSWORD=s3cret", "redis://host/0?db=1&PASSWORD=***"),
        # The `@` may end user information or be part of the value: what either reading hides is masked.
        ("redis://u:p@h?password=x@y&db=1", "redis://***?password=***&db=1"),
        ("redis://h:1/0?password=hunter2@s3cret", "redis://***?password=***"),
        ("redis:/h:1/0?password=hunter2@s3cret", "redis:/***?password=***"),
        ("to=redis%3A%2F%2Fh%3Fpassword%3Da%40b&x=1", "to=redis%3A%2F%2F***?password=***&x=1"),
        ("redis://u:hunter2secret:x@h", "redis://***@h"),
        ("redis://u:hunter2password=@h", "redis://***@h"),
        ("redis://u:hunter2token:z@h", "redis://***@h"),
        ("redis://u:a?secret:b@h/0", "redis://***@h/0"),
        ("redis:u:hunter2secret:x@h", "redis:***@h"),
        ("connecting to u:hunter2secret:x@h:6379", "connecting to ***@h:6379"),
        ("password=a:b@c:1", "password=***"),
        ("password=redis://u:p@h/0", "password=***"),
        (
            "rediss://h?ssl_password=a&sentinel_password=b",
            "rediss://h?ssl_password=***&sentinel_password=***",
        ),
        ("https://h/?api_key=k&access-key=k2&token=t", "https://h/?api_key=***&access-key=***&token=***"),
        (
            "postgresql://u:p@h1:5432,h2:5432/db?sslmode=require",
            "postgresql://***@h1:5432,h2:5432/db?sslmode=require",
        ),
        ("host=db user=app password=s3cret dbname=x", "host=db user=app password=*** dbname=x"),
        ("host=db password='two words' dbname=x", "host=db password='***' dbname=x"),
        ("PGPASSWORD=s3cret", "PGPASSWORD=***"),
        ("REDISCLI_AUTH=s3cret", "REDISCLI_AUTH=***"),
        ("Redis(host='h', password='it\\'s', db=0)", "Redis(host='h', password='***', db=0)"),
        ('{"password": "s3cret", "user": "ada"}', '{"password": "***", "user": "ada"}'),
        ('{"password":"s3cret","user":"ada"}', '{"password":"***","user":"ada"}'),
        (
            '{"url":"redis://u:p@h/0","mail":"ada@example.org"}',
            '{"url":"redis://***@h/0","mail":"ada@example.org"}',
        ),
        (r'{"url":"redis:\/\/u:p@h\/0"}', r'{"url":"redis:\/\/***@h\/0"}'),
        ("next=redis%3A%2F%2Fu%3Ap%40h%2F0&x=1", "next=redis%3A%2F%2F***%40h%2F0&x=1"),
        ("connecting to //user:pass@host:6379", "connecting to //***@host:6379"),
        ("connecting to user:pass@host:6379", "connecting to ***@host:6379"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: ***"),
        ("curl -H 'authorization: Bearer abc.def' x", "curl -H 'authorization: ***' x"),
        ("sent Bearer abcdefgh12345 to the server", "sent Bearer *** to the server"),
        ("first line redis://u:p@h\nsecond a@b", "first line redis://***@h\nsecond a@b"),
    ],
)
@pytest.mark.requirement("S-14", "S-15", "S-16")
def test_credentials_are_masked(text: str, masked: str) -> None:
    assert redact(text) == masked
    assert redact(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing to hide",
        "redis://host:6379/0",
        "redis://[::1]:6379/0 refused ada@example.org",
        "redis://host:6379 refused ada@example.org",
        "https://example.org/@ada/notes",
        "https://example.org:8080/@ada",
        "mail to ada@example.org",
        "a // b @ c",
        "https://example.org/a//b@c",
        "tokens=5 bypass=no author=ada compass:north",
        "rule=per-minute remaining=4",
        "denied by per-minute: 0 of 5 left, retry in 12 s",
        "WRONGPASS invalid username-password pair or user is disabled.",
        "12:30:05 GET /login 401",
        "API_KEY: must be set when ENVIRONMENT is production",
        "SMTP_PASSWORD: is missing.",
        "wrong password: try again",
        "authorization: the header is missing",
        "Bearer authentication is required; Basic authentication is not offered",
    ],
)
def test_text_without_credentials_is_unchanged(text: str) -> None:
    assert redact(text) == text


def test_given_secrets_are_masked_anywhere_in_the_text() -> None:
    assert redact("AUTH default hunter2", ["hunter2"]) == "AUTH default ***"
    assert redact("p%40ss and p@ss and p@ss1", ["p@ss", "p@ss1", ""]) == "*** and *** and ***"


password_text = st.text(
    alphabet=st.characters(codec="utf-8", exclude_categories=("Zs", "Zl", "Zp", "Cc", "Cs")), min_size=1
)


@given(
    scheme=st.sampled_from(SCHEMES),
    user=st.sampled_from(["", "ada", "ada.l-b_2"]),
    password=password_text | st.text(alphabet="@:/?#%&=+,;'\"[]{}()<>|\\.-0123456789ab", min_size=1),
    before=st.sampled_from(["", "Error connecting to ", "url="]),
    after=st.sampled_from(["", ". Retrying", " failed"]),
)
@example("redis", "", "@", "", "")
@example("https", "ada", "1/2", "", "")
def test_every_password_in_a_url_is_masked(
    scheme: str, user: str, password: str, before: str, after: str
) -> None:
    text = f"{before}{scheme}://{user}:{password}@db.internal:6379/0{after}"
    # On the web, `https://ada:12/@db` has the host `ada`; a password cannot be recognised there.
    assume(not (scheme == "https" and user and re.fullmatch(r"\d{1,5}([/?#].*)?/", password)))
    masked = redact(text)
    assert masked == f"{before}{scheme}://***@db.internal:6379/0{after}"


NAMES = ("password", "db_password", "secret", "token", "pass", "auth", "api_key", "Authorization", "Bearer")

password_piece = st.one_of(
    st.sampled_from([name + mark for name in NAMES for mark in ("", "=", ":", "=>", '":"')]),
    st.sampled_from(
        ["@", ":", "/", "//", "://", "?", "#", "&", "%40", "%", "\\", "'", '"', "1", "12", "***"]
    ),
    password_text,
)


@given(
    scheme=st.sampled_from(SCHEMES),
    user=st.sampled_from(["", "ada", "token"]),
    pieces=st.lists(password_piece, max_size=6),
    place=st.integers(0, 6),
    before=st.sampled_from(["", "Error connecting to ", "url=", "token: "]),
    after=st.sampled_from(["", "/0", "/0?password=x", ":6379/0. Retrying", " failed: secret=x"]),
)
@example("redis", "u", ["secret:x"], 0, "", "")
@example("redis", "u", ["1/0?password=", "@"], 2, "", "")
@example("https", "u", ["?token=", "a@"], 2, "", "/0")
def test_password_with_special_characters_is_masked(
    scheme: str, user: str, pieces: list[str], place: int, before: str, after: str
) -> None:
    password = "".join([*pieces[:place], "hunter2", *pieces[place:]])
    # On the web, every `@` of `https://ada:12/x/@db` belongs to the path.
    in_path = re.fullmatch(r"\d{1,5}\\?[/?#].*", password) and not re.search(r"[^/]@", f"{password}@")
    assume(not (scheme == "https" and user and in_path))
    masked = redact(f"{before}{scheme}://{user}:{password}@db{after}")
    assert "hunter2" not in masked
    assert redact(masked) == masked


WORDS = (
    "the",
    "password",
    "token",
    "is",
    "secret",
    "Auth",
    "API_KEY",
    "must",
    "not",
    "expire",
    "be",
    "Redis",
    "at",
)


@given(
    st.lists(st.sampled_from(WORDS), min_size=1),
    st.sampled_from(["It", "must", "is", "not", "Try", "cannot"]),
)
@example(["API_KEY"], "must")
def test_ordinary_sentences_are_unchanged(words: list[str], next_word: str) -> None:
    sentence = f"{' '.join(words)}: {next_word} {' '.join(words)}."
    assert redact(sentence) == sentence


@given(st.text(), st.lists(st.text(min_size=1), max_size=2))
def test_any_text_can_be_redacted(text: str, secrets: list[str]) -> None:
    masked = redact(text, secrets)
    assert all(secret not in masked for secret in secrets if not set(secret) & set("*"))


@pytest.mark.parametrize(
    "text",
    [
        "a" * 50_000,
        "://" * 20_000,
        "@:" * 20_000,
        "password" * 8_000,
        "redis://" * 2_000,
        "%40" + "redis%3a%2f%2f" * 2_000,
    ],
)
def test_long_lines_are_redacted_in_linear_time(text: str) -> None:
    assert redact(text + " password=x").endswith("password=***")


# --- Logs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger whose only handler redacts."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    handler.addFilter(RedactingFilter(secrets=["hunter2"]))
    logger = logging.getLogger("tests.redacted")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    yield logger, stream
    logger.removeHandler(handler)


@pytest.mark.requirement("S-15", "S-17")
def test_log_messages_and_arguments_are_masked(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    logger.info("Rate limiting: Connected to Redis at %s", "redis://user:pass@host:6379/0")
    logger.info("plain %s", "hunter2")
    logger.info("%(url)s", {"url": "redis://u:p@ss@h"})
    assert stream.getvalue().splitlines() == [
        "INFO Rate limiting: Connected to Redis at redis://***@host:6379/0",
        "INFO plain ***",
        "INFO redis://***@h",
    ]


def test_record_without_secrets_is_unchanged() -> None:
    record = logging.makeLogRecord({"msg": "%s took %d ms", "args": ("GET /", 3), "status": 200, "path": "/"})
    before = dict(vars(record))
    assert RedactingFilter().filter(record)
    assert vars(record) == before


@pytest.mark.requirement("S-16", "S-17")
def test_exceptions_with_causes_and_notes_are_masked(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    try:
        try:
            raise ConnectionError("Error 111 connecting to redis://user:inner@s3cret@host:6379")
        except ConnectionError as inner:
            inner.add_note("tried redis://user:n0te@host")
            raise RuntimeError("store redis://user:outer@s3cret@host is down") from inner
    except RuntimeError:
        logger.exception("Rate limit check failed")
    text = stream.getvalue()
    assert "Traceback" in text
    assert "direct cause" in text
    assert "redis://***@host is down" in text
    assert all(secret not in text for secret in ("inner@", "outer@", "n0te", "s3cret@"))


def test_exception_groups_and_stacks_are_masked(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    try:
        raise ExceptionGroup("several", [ValueError("redis://u:one@h"), KeyError("redis://u:two@h")])
    except ExceptionGroup:
        logger.warning("failed", exc_info=True, stack_info=True)
    assert "u:one" not in stream.getvalue()
    assert "u:two" not in stream.getvalue()
    assert "Stack (most recent call last)" in stream.getvalue()


def test_exception_without_secrets_is_unchanged() -> None:
    error = ValueError("harmless")
    record = logging.makeLogRecord({"msg": "x", "exc_info": (ValueError, error, None)})
    RedactingFilter().filter(record)
    assert record.exc_info == (ValueError, error, None)


def test_exception_with_secrets_is_replaced_by_masked_text() -> None:
    error = ValueError("redis://u:p@h")
    record = logging.makeLogRecord({"msg": "x", "exc_info": (ValueError, error, None)})
    RedactingFilter().filter(record)
    assert record.exc_info is None
    assert record.exc_text == "ValueError: redis://***@h"


class Address:
    """An object that a log converts to text."""

    def __str__(self) -> str:
        return "redis://u:p@h"


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ("redis://u:p@h", "redis://***@h"),
        (Address(), "redis://***@h"),
        (ValueError("redis://u:p@h"), "redis://***@h"),
        (["redis://u:p@h", 1], ["redis://***@h", 1]),
        (
            {"url": "redis://u:p@h", "password": "x", "port": 6379},
            {"url": "redis://***@h", "password": "***", "port": 6379},
        ),
        ({"nested": ({"token": "t"},)}, {"nested": [{"token": "***"}]}),
        (None, None),
        (3.5, 3.5),
    ],
)
def test_extra_attributes_of_a_record_are_masked(value: Any, masked: Any) -> None:
    record = logging.makeLogRecord({"msg": "x", "attached": value})
    RedactingFilter().filter(record)
    assert vars(record)["attached"] == masked


def test_text_that_was_formatted_before_is_masked() -> None:
    record = logging.makeLogRecord({"msg": "x", "exc_text": "redis://u:p@h", "stack_info": "redis://u:p@h"})
    RedactingFilter().filter(record)
    assert record.exc_text == record.stack_info == "redis://***@h"


def test_json_lines_stay_json() -> None:
    line = json.dumps({"url": "redis://u:p@h/0", "nested": {"mail": "a@b.c"}}, separators=(",", ":"))
    assert json.loads(redact(line)) == {"url": "redis://***@h/0", "nested": {"mail": "a@b.c"}}
