"""URLs with an ambiguous password, which a parser could treat as another part of the URL, and print."""

from __future__ import annotations

import pytest

from headgate import ConfigError, Limiter
from headgate.urls import check_credentials


@pytest.mark.parametrize(
    "url",
    [
        "redis://ada:p/w@host:6379/0",
        "redis://ada:p?w@host:6379/0",
        "redis://ada:p#w@host:6379/0",
        "postgresql://ada:p@w@host:5432/name",
        "postgresql+psycopg://ada:p@w@host:5432/name",
        "redis://ada:p%zzw@host:6379/0",
        "redis://ada:p%4@host:6379/0",
        "redis://ada:p w@host:6379/0",
        "redis://ada:p[w@host:6379/0",
        "redis://ada:123/w@host:6379/0",
        "redis://host:6379/0?password=p@w",
        "postgresql://host:port/name",
        "https://ada:p/w@host",
        "https://ada:p@w@host",
    ],
)
def test_ambiguous_password_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be separated") as refused:
        check_credentials(url)
    assert "host" not in str(refused.value).replace("the host in the URL", "")


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://ada:p@w@host:6379/0",
        "redis://ada:p%2Fw%40x@host:6379/0?socket_timeout=1",
        "redis://:p:w!$&'()*+,;=@[2001:db8::1]:6379/0",
        "unix://ada:pw@/run/redis.sock?db=0",
        "postgresql://ada@a:5432,b:5432/name?options=-csearch_path%3Dx",
        "postgresql:///name?host=/run/postgresql",
        "https://host:8080/@ada",
        "host=localhost password=p@w",
        "memory://",
        "sqlite+aiosqlite:////data/ada@example.org/my mail.db",
        "",
    ],
)
def test_unambiguous_url_is_accepted(url: str) -> None:
    check_credentials(url)


def test_error_of_a_limiter_does_not_show_an_ambiguous_url() -> None:
    with pytest.raises(ConfigError, match="%2F") as refused:
        Limiter("1/minute", name="x", store="redis://ada:hunter2secret/x@localhost:6379/0")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("reddis://:secret@host", "redis://"),
        ("sqlit:///x.db", "sqlite://"),
        ("postgress://h/d", "postgres://"),
    ],
)
def test_error_for_a_misspelt_scheme_suggests_the_correct_one(url: str, expected: str) -> None:
    scheme = url.partition(":")[0]
    with pytest.raises(ConfigError, match=f"^no store is known for '{scheme}': write {expected}$"):
        Limiter("1/minute", name="a", store=url)
