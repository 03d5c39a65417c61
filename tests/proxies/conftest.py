"""The fixture that starts a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.proxies.programs import Setting, setting


@pytest.fixture(scope="class")
def proxy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """The proxy of a class of tests, in front of the application."""
    tests = request.cls
    with setting(tmp_path_factory.mktemp("proxy"), tests.policy(), tests.command) as found:
        yield found
