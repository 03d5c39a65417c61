"""The tutorial: each version of its file behaves as the page says, and the tests on the page pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r'^```\w+ title="(?P<title>.+)"\n(?P<text>(?:.*\n)*?)```$', re.MULTILINE)


def blocks(title: str) -> list[str]:
    """Return the texts of the blocks with this title, in order."""
    return [match["text"] for match in BLOCK.finditer(PAGE.read_text("utf-8")) if match["title"] == title]


SCRIPT, IN_MEMORY, *ON_REDIS = blocks("quotes.py")
_, TIERED, DEPLOYED = ON_REDIS


def run_python(folder: Path, *arguments: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def load(source: str) -> ModuleType:
    """Return one version of the file as a new module, with a new limiter, as in a new process."""
    module = ModuleType("quotes")
    exec(compile(source, "quotes.py", "exec"), module.__dict__)
    return module


async def statuses(app: Any, requests: int, **headers: str) -> list[int]:
    transport = httpx.ASGITransport(app, client=("192.0.2.1", 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://quotes", headers=headers) as client:
        return [(await client.get("/quote")).status_code for _ in range(requests)]


def test_script_prints_the_documented_lines(tmp_path: Path) -> None:
    (tmp_path / "quotes.py").write_text(SCRIPT, "utf-8")
    [shown] = blocks("python quotes.py")
    digits = re.compile(r"retry in [\d.]+ s")
    assert digits.sub("", run_python(tmp_path, "quotes.py")) == digits.sub("", shown)


async def test_the_fourth_request_is_refused() -> None:
    assert await statuses(load(IN_MEMORY).app, 4) == [200, 200, 200, 429]


@pytest.mark.parametrize("source", ON_REDIS, ids=["plain", "tiers", "deployed"])
async def test_two_processes_share_one_count(
    source: str, headgate_redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", headgate_redis_url)
    named = source.replace('name="quotes"', f'name="quotes of {len(source)}"')  # no counts from other tests
    assert await statuses(load(named).app, 2) + await statuses(load(named).app, 2) == [200, 200, 200, 429]


async def test_customers_have_a_higher_limit(
    headgate_redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", headgate_redis_url)
    source = TIERED.replace('name="quotes"', 'name="customers of the tutorial"')
    assert await statuses(load(source).app, 11, **{"X-API-Key": "key-of-ada"}) == [200] * 10 + [429]


async def test_without_redis_each_process_admits_half_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    quotes = load(DEPLOYED)
    codes = await statuses(quotes.app, 6, **{"X-API-Key": "key-of-ada"})
    await quotes.limiter.aclose()
    assert codes == [200] * 5 + [503]


@pytest.mark.parametrize("source", [TIERED, DEPLOYED], ids=["tiers", "deployed"])
def test_tests_in_the_tutorial_pass(source: str, tmp_path: Path) -> None:
    [tests] = blocks("test_quotes.py")
    (tmp_path / "quotes.py").write_text(source, "utf-8")
    (tmp_path / "test_quotes.py").write_text(tests, "utf-8")
    # Without the plugins of our other tests, which take seconds to import.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "REDIS_URL": "redis://127.0.0.1:1"}
    output = run_python(tmp_path, "-m", "pytest", "-q", "-p", "headgate.testing.plugin", **plugins)
    assert "3 passed" in output
