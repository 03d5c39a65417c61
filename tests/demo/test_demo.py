"""The whole demo: output, services, traffic, and its end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate_services.demo import DemoError, run_demo
from tests.demo.support import (
    BLOCK_ENDS_WITH,
    Block,
    Program,
    ask_like_curl,
    demo,
    eventually,
    first_tick,
    ticks,
    until_ended,
)

SERVICES = ["mail", "telegram", "tiers", "petitions"]


@pytest.fixture(scope="module")
def running() -> Iterator[Program]:
    # What users have in their environment is not the demo's business.
    distractions = {
        "API_KEY": "x",
        "DATABASE_URL": "mysql://nowhere/x",
        "PORT": "1",
        "HTTP_PROXY": "http://127.0.0.1:9",
    }
    with demo(environment=distractions) as program:
        yield program


@pytest.fixture
def block(running: Program) -> Block:
    return Block(running.wait_for_output(BLOCK_ENDS_WITH))


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=30, trust_env=False)


def total(tick: dict[str, Any]) -> dict[str, int]:
    return {name: sum(counts.values()) for name, counts in tick["totals"].items()}


def test_the_block_says_what_runs_where(block: Block) -> None:
    assert list(block.urls) == ["dashboard", *SERVICES]
    health = {"dashboard": "/healthz", "telegram": "/"}
    for name, url in block.urls.items():
        assert get(url + health.get(name, "/health")).status_code == 200, name
    assert "<html" in get(block.urls["dashboard"]).text


def test_progress_is_shown_part_by_part(block: Block) -> None:
    before = block.text.partition("The demo is running")[0]
    for part in ("Redis", "PostgreSQL", "programs loaded", "services and server"):
        assert f"\n  {part} " in before


def test_the_three_curl_lines_work(block: Block) -> None:
    login, whoami, petition = block.curl_lines
    decisions = [ask_like_curl(login).json() for _ in range(6)]
    assert [decision["allowed"] for decision in decisions] == [True] * 5 + [False]
    assert ask_like_curl(whoami).json()["user"] == "you"
    assert ask_like_curl(petition).status_code == 201


def test_the_page_lives(block: Block) -> None:
    """Every limiter is used, several refuse, the shadow rule would, and every service has visitors and refuses some."""

    def lives(tick: dict[str, Any]) -> bool:
        totals = tick["totals"]
        used = {name for name, counts in totals.items() if counts["admitted"]}
        refusing = {name for name, counts in totals.items() if counts["refused"]}
        services = {service["name"]: service for service in tick["demo"]["services"]}
        return (
            used == {"login", "api", "llm-tokens", "search", "exports"}
            and refusing >= {"login", "search", "exports"}
            and tick["shadow"][0]["refused"] > 0
            and bool(tick["top"])
            and all(services[name]["sent"] > 0 for name in SERVICES)
            and services["tiers"]["refused"] > 0
        )

    tick = first_tick(block.urls["dashboard"], lives)
    assert tick["demo"]["traffic"] is True
    links = {service["name"]: service["url"] for service in tick["demo"]["services"]}
    assert list(links) == SERVICES
    for name, link in links.items():
        assert link.startswith(block.urls[name])
        assert get(link).status_code == 200, link
    assert all(store["up"] for store in tick["stores"])


def test_traffic_is_switched_off_and_on(block: Block) -> None:
    url = block.urls["dashboard"]

    def switch(on: bool) -> None:
        answer = httpx.post(f"{url}/v1/demo/traffic", json={"on": on}, timeout=30, trust_env=False)
        assert answer.json() == {"on": on}

    switch(False)
    before: dict[str, Any] = {}
    for tick in ticks(url):  # requests in progress may still be counted
        if before and total(tick) == total(before) and tick["demo"] == before["demo"]:
            break
        before = tick
    assert before["demo"]["traffic"] is False
    switch(True)
    still = sum(total(before).values())
    assert first_tick(url, lambda tick: sum(total(tick).values()) > still)["demo"]["traffic"] is True


def test_an_edited_policy_applies_at_once(block: Block) -> None:
    policy = Path(block.policy)
    text = policy.read_text()
    policy.write_text(text.replace('quota = "5/minute"', 'quota = "7/minute"'))
    answer = f"{block.urls['dashboard']}/v1/limiters/login"
    assert eventually(lambda: get(answer).json()["rules"][0]["limit"] == 7)


def test_ctrl_c_stops_everything(running: Program, block: Block) -> None:
    """The last one of this file: it ends the demo that the others use."""
    processes = running.descendants()
    assert len(processes) >= 4  # Redis and PostgreSQL, and who guards them
    watching = ticks(block.urls["dashboard"])  # as an open page does
    next(watching)
    assert running.tell(signal.SIGINT) == 0
    watching.close()
    assert running.problems == ""
    assert running.output.endswith("\nStopping.\n")
    until_ended(processes)
    assert not Path(block.policy).parent.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org", ""])
def test_it_is_for_this_machine_only(host: str) -> None:
    with pytest.raises(DemoError, match=rf"this machine only: 127\.0\.0\.1, not {host!r}"):
        run_demo(host)
