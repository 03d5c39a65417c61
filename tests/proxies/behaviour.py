"""What every proxy does with the server; each test is one line of the table in `docs/how-to/proxies.md`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.proxies.programs import LIMIT, Ports, Setting, wait_until


class ProxyBehaviour:
    """Tests for one proxy; the fixture `proxy` starts it once for all of them."""

    policy: Callable[[], str]
    """Returns the policy of the server."""

    command: Callable[[Path, Ports], Sequence[str]]
    """Writes the configuration of the proxy, and returns the command that starts it."""

    down: int
    """The status while the server is down."""

    hanging: int | None
    """The status while the server does not answer; `None` if that takes too long for a test."""

    shows_admitted = True
    """Whether admitted responses have our fields."""

    def test_limit_is_exact_under_parallel_load(self, proxy: Setting) -> None:
        assert proxy.statuses("parallel", 3 * LIMIT, at_once=8) == {200: LIMIT, 429: 2 * LIMIT}

    def test_fields_are_on_both_answers(self, proxy: Setting) -> None:
        admitted = proxy.get("fields")
        assert (admitted.status_code, admitted.text) == (200, "the application")
        if self.shows_admitted:
            assert f"r={LIMIT - 1};" in admitted.headers["ratelimit"]
            assert f"q={LIMIT};" in admitted.headers["ratelimit-policy"]
        else:
            assert "ratelimit" not in admitted.headers
        assert "retry-after" not in admitted.headers
        proxy.statuses("fields", LIMIT - 1)
        refused = proxy.get("fields")
        assert refused.status_code == 429
        assert 3_500 < int(refused.headers["retry-after"]) <= 3_661
        assert "r=0;" in refused.headers["ratelimit"]
        assert f"q={LIMIT};" in refused.headers["ratelimit-policy"]

    def test_body_and_status_of_the_application_arrive(self, proxy: Setting) -> None:
        answer = proxy.client.post("/", content=b"x" * 10_000, headers={"x-user": "body"})
        assert (answer.status_code, answer.text) == (200, "the application")
        forbidden = proxy.get("body", "/forbidden")
        assert (forbidden.status_code, forbidden.text) == (403, "the application")

    def test_edited_policy_applies_under_traffic(self, proxy: Setting) -> None:
        assert proxy.statuses("edit", LIMIT + 1) == {200: LIMIT, 429: 1}
        policy = proxy.headgate.config.read_text()
        proxy.headgate.config.write_text(policy.replace(f'"{LIMIT}/hour"', f'"{LIMIT + 3}/hour"'))
        seen: list[int] = []

        def has_changed() -> bool:
            seen.append(proxy.get("edit").status_code)
            return seen.count(200) == 3

        try:
            wait_until(has_changed)
            assert set(seen) == {200, 429}
            assert proxy.get("edit").status_code == 429
        finally:
            proxy.headgate.config.write_text(policy)
        wait_until(lambda: proxy.get("edit-back").status_code == 429)

    def test_server_killed_and_started_again(self, proxy: Setting) -> None:
        assert proxy.statuses("restart", 4) == {200: 4}
        proxy.headgate.kill()
        try:
            assert proxy.statuses("restart", 3, at_once=3) == {self.down: 3}
        finally:
            proxy.headgate.start()
        assert proxy.statuses("restart", LIMIT) == {200: LIMIT - 4, 429: 4}

    def test_server_that_does_not_answer(self, proxy: Setting) -> None:
        if self.hanging is None:
            return
        proxy.headgate.signal(signal.SIGSTOP)
        try:
            assert proxy.get("hang").status_code == self.hanging
        finally:
            proxy.headgate.signal(signal.SIGCONT)
        wait_until(lambda: proxy.get("after").status_code == 429)
