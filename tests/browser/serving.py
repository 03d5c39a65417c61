"""A server in a separate process, for browser tests; also the program that runs in that process.

python serving.py POLICY PORT [demo]
"""

from __future__ import annotations

import hashlib
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from headgate_server import serve

LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")


class Server:
    """`headgate_server.serve` on a free local port; a restart uses the same port.

    Args:
        folder: The folder of its policy file, also the base of relative paths.
        policy: The text of the policy file.
        demo: Whether it shows a demo with one service.
        token: The token for requests to its API.
    """

    def __init__(self, folder: Path, policy: str, *, demo: bool = False, token: str | None = None) -> None:
        self._folder = folder
        self._demo = demo
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.policy_file = folder / "headgate.toml"
        self.policy_file.write_text(policy, encoding="utf-8")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, and return when it listens."""
        command = [sys.executable, __file__, str(self.policy_file), str(self._port)]
        self._process = subprocess.Popen(
            [*command, "demo"] if self._demo else command, cwd=self._folder, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        found = next(filter(None, map(LISTENING.search, self._process.stdout)), None)
        assert found, f"the server did not start, exit code {self._process.wait()}"
        self._port = int(found[1])

    def stop(self) -> None:
        """Stop it like Ctrl-C, and wait until it has exited."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=30)
        self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def post(self, path: str, body: object) -> Any:
        """Send a POST request to the API, and return the answer."""
        response = httpx.post(f"{self.url}{path}", json=body, headers=self._headers)
        response.raise_for_status()
        return response.json()

    def hit(self, limiter: str, key: object, times: int = 1) -> None:
        """Hit a limiter several times."""
        calls = [{"limiter": limiter, "operation": "hit", "key": key}] * times
        answers = self.post("/v1/batch", {"calls": calls})["answers"]
        assert [answer["status"] for answer in answers] == [200] * times

    def tick(self) -> Any:
        """Return the data of the next `tick` event of the API."""
        with httpx.stream("GET", f"{self.url}/v1/events", headers=self._headers) as response:
            lines = response.iter_lines()
            next(line for line in lines if line == "event: tick")
            return httpx.Response(200, content=next(lines).removeprefix("data:")).json()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def token_table(name: str, token: str, *may: str) -> str:
    """Return the lines of a policy file that give permissions to a token."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[server.tokens.{name}]\nsha256 = "{digest}"\nmay = {list(may)}\n'


class OneService:
    """A demo with one service and no counts."""

    traffic = True

    def services(self) -> list[dict[str, object]]:
        return [{"name": "mail", "url": "http://127.0.0.1:8001", "sent": 120, "refused": 7}]


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], port=int(sys.argv[2]), demo=OneService() if "demo" in sys.argv else None))
