"""The page of a replay, opened from a file in a real browser: `tools/test_browser.sh`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from headgate_server.cli import main
from tests.browser.conftest import TIMEOUT_MS, PageErrors

HOSTILE = "<img src=x onerror=alert(1)>'\"&"
SCHEMES = ("light", "dark")

Show = Callable[..., Page]


@pytest.fixture
def page_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page of a log of three hours, with two policies, hostile keys and invalid lines."""
    monkeypatch.chdir(tmp_path)
    rules = '[{ quota = "5/minute", name = "r" }, { quota = "1/minute", name = "s", shadow = true }]'
    Path("headgate.toml").write_text(f"limiters.api.rules = {rules}\n", encoding="utf-8")
    Path("other.toml").write_text('limiters.api.rules = ["2/minute"]\n', encoding="utf-8")
    rows = [f"{second},user-{second % 7},GET,/items/{second}" for second in range(0, 10_800, 4)]
    rows += [f'{second},"{HOSTILE.replace(chr(34), chr(34) * 2)}",GET,/{HOSTILE[:6]}' for second in range(60)]
    rows += ["broken", f"x{HOSTILE[:9]},y,z,/"]
    Path("log.csv").write_text("time,client,method,path\n" + "\n".join(rows), encoding="utf-8")
    arguments = ["replay", "log.csv", "--key", "{client}", "--compare", "other.toml", "--model-retries"]
    assert main([*arguments, "--html", "page.html"]) == 0
    return tmp_path / "page.html"


@pytest.fixture
def show(browser: Browser, page_errors: PageErrors, page_file: Path) -> Iterator[Show]:
    """Open the page: `show(color_scheme=…, viewport=…)`. It must load no other resources."""
    with ExitStack() as stack:

        def show(**context: Any) -> Page:
            page = stack.enter_context(browser.new_context(**context)).new_page()
            page.set_default_timeout(TIMEOUT_MS)
            page_errors.listen(page, page_file.as_uri())
            page.goto(page_file.as_uri())
            return page

        yield show


def test_the_figures_are_shown(show: Show) -> None:
    page = show()
    expect(page.locator("[data-figure=requests]")).to_have_text("2,760")
    expect(page.get_by_role("heading", name="Headgate replay")).to_be_visible()
    expect(page.locator("#callers")).to_contain_text(HOSTILE)
    expect(page.locator("#unread")).to_contain_text("broken")
    expect(page.locator("#shadow")).to_contain_text("s")
    expect(page.locator("#changes")).to_contain_text("requests would be newly refused")
    expect(page.locator("#retries")).to_contain_text("requests admitted")
    expect(page.get_by_role("img", name="refused, in bars of")).to_have_count(2)
    assert page.locator("img[src=x]").count() == 0


def test_the_charts_are_drawn_and_have_a_data_table(show: Show) -> None:
    page = show()
    chart = page.get_by_role("img", name="api of headgate.toml")
    box = chart.bounding_box()
    assert box is not None
    assert box["width"] > 600
    assert chart.locator(".bar-refused").count() > 0
    assert chart.locator(".bar-admitted").count() > 50
    page.get_by_text("Figures as a table").first.click()
    expect(page.get_by_role("columnheader", name="Admitted").first).to_be_visible()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours_follow_the_system_setting(show: Show, scheme: str) -> None:
    page = show(color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == {"light": "rgb(245, 247, 249)", "dark": "rgb(13, 18, 22)"}[scheme]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_accessible(show: Show, page_errors: PageErrors, scheme: str, width: int) -> None:
    page = show(color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
    found = Axe().run(page)
    assert found.response["violations"] == [], found.generate_report()


def test_nothing_is_cut_off_on_a_phone(show: Show) -> None:
    page = show(viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
