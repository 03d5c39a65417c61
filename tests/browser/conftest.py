"""Fixtures: a real browser, servers, and pages that must not report errors.

Playwright is imported inside functions, because a plain `pytest` loads this file and must not need Playwright.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.serving import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_MS = 20_000
"""Time limit of expectations; generous, because the machine may be busy."""


def find_browser() -> str:
    """Return the browser to drive: HEADGATE_TEST_BROWSER, or the first that is installed."""
    wanted = os.environ.get("HEADGATE_TEST_BROWSER")
    found = wanted or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(
            f"no browser: none of {', '.join(NAMES)} is installed; install one (on Debian: apt-get install chromium) "
            "or set HEADGATE_TEST_BROWSER to its path"
        )
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    path = find_browser()
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        # The sandbox of Chromium does not work for root, the usual user in containers.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@dataclass
class PageErrors:
    """Errors that pages reported, and patterns of expected errors."""

    reported: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)

    def expect(self, pattern: str) -> None:
        """Expect at least one error that matches this pattern."""
        self.expected.append(pattern)

    def allow(self, pattern: str) -> None:
        """Ignore errors that match this pattern."""
        self.allowed.append(pattern)

    def listen(self, page: Page, origin: str) -> None:
        """Collect console errors (including violations of the content security policy) and requests to other hosts."""

        def on_console(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.reported.append(message.text)

        def on_request(request: Request) -> None:
            if not request.url.startswith((origin, "data:")):
                self.reported.append(f"request to another host: {request.url}")

        page.on("console", on_console)
        page.on("request", on_request)
        page.on("pageerror", lambda error: self.reported.append(f"uncaught: {error}"))
        page.on("dialog", lambda dialog: self.reported.append(f"dialog of a script: {dialog.message}"))

    def check(self) -> None:
        """Fail on unexpected errors, and on expected errors that are missing."""
        for pattern in self.expected:
            assert any(re.search(pattern, text) for text in self.reported), f"no page reported {pattern}"
        known = re.compile("|".join([*self.expected, *self.allowed]) or r"(?!)")
        unexpected = [text for text in self.reported if not known.search(text)]
        assert unexpected == []


@pytest.fixture
def page_errors() -> Iterator[PageErrors]:
    """Fail a test if a page reported an error that the test does not expect."""
    page_errors = PageErrors()
    yield page_errors
    page_errors.check()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start servers: `serving(policy, demo=False, token=None)`."""
    with ExitStack() as stack:
        yield lambda policy, **more: stack.enter_context(Server(tmp_path, policy, **more))


@pytest.fixture
def look(browser: Browser, page_errors: PageErrors) -> Iterator[Callable[..., Page]]:
    """Open the dashboard of a server: `look(server, color_scheme=…, viewport=…)`. `live=False`: do not wait for its data."""
    from playwright.sync_api import expect

    with ExitStack() as stack:

        def look(server: Server, *, live: bool = True, **context: Any) -> Page:
            page = stack.enter_context(browser.new_context(**context)).new_page()
            page.set_default_timeout(TIMEOUT_MS)
            page_errors.listen(page, server.url)
            page.goto(server.url)
            if live:
                expect(page.locator("#connection")).to_have_text("Live")
            return page

        yield look
