"""The PostgreSQL of the demo: new every time, from files that were made once."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from headgate_services.demo.postgres import running_postgres, template_folder


@pytest.fixture
def template(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    path = template_folder()
    assert path is not None
    assert folder in path.parents
    return path


def files_of(url: str) -> Path:
    return Path(parse_qs(urlsplit(url).query)["host"][0]) / "data"


def tables(url: str) -> int:
    """Make a table, and return how many of ours there are now."""
    with psycopg.connect(url) as connection:
        connection.execute(sql.SQL("CREATE TABLE {} ()").format(sql.Identifier(uuid4().hex)))
        found = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone()
    assert found is not None
    return int(found[0])


def test_files_are_made_once_and_every_server_is_new(template: Path) -> None:
    with running_postgres(None) as first:
        assert tables(first) == 1
    assert not files_of(first).exists()
    (template / "made-before").touch()
    with running_postgres(None) as second, running_postgres(None) as third:
        for url in (second, third):
            assert (files_of(url) / "made-before").exists()
            assert tables(url) == 1


def test_a_broken_template_is_made_anew(template: Path) -> None:
    template.mkdir(parents=True)
    (template / "PG_VERSION").write_text("7")
    with running_postgres(None) as url:
        assert tables(url) == 1
    assert (template / "global" / "pg_control").exists()


def test_no_place_for_a_template_is_no_problem(template: Path) -> None:
    template.parent.write_text("a file, where a folder should be")
    with running_postgres(None) as url:
        assert tables(url) == 1


def test_only_what_is_kept_waits_for_the_disk(template: Path, folder: Path) -> None:
    """Else Ctrl-C takes seconds on a busy machine, for files that are then removed."""
    for keep, waits in ((None, "off"), (folder, "on")):
        with running_postgres(keep) as url, psycopg.connect(url) as connection:
            assert connection.execute("SHOW fsync").fetchone() == (waits,)
