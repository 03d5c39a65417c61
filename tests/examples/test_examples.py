"""The programs under `examples/`, each started as its first line says and asked over a socket."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import httpx

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ADDRESS = re.compile(r"http://127\.0\.0\.1:([1-9]\d*)")


@contextmanager
def running(name: str) -> Iterator[httpx.Client]:
    """Start an example, wait until it prints its address, and yield a client."""
    command = [sys.executable, "-u", str(EXAMPLES / name)]
    with subprocess.Popen(
        command, env={**os.environ, "PORT": "0"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if found := ADDRESS.search(line):
                    break
            else:
                raise AssertionError("".join(said))
            with httpx.Client(base_url=found.group(), timeout=30) as client:
                yield client
        finally:
            process.kill()


def guesses(client: httpx.Client, place: Literal["data", "params"]) -> list[int]:
    """Log in twice with the right password and four times with a wrong one; return the statuses."""
    words = ["open sesame", "open sesame", "a", "b", "c", "d"]
    return [client.request("POST", "/login", **{place: {"password": word}}).status_code for word in words]


def test_flask() -> None:
    with running("flask_app.py") as client:
        assert client.get("/").text == "99 left\n"
        assert guesses(client, "data") == [200, 200, 401, 401, 401, 429]
        assert "ratelimit" not in client.get("/health").headers
        reports = client.get("/api/reports", params={"pages": 15})
        assert reports.headers["x-ratelimit-remaining"] == "5"
        assert client.get("/api/reports", params={"pages": 15}).json()["status"] == 429
        assert client.get("/api/reports", params={"pages": 21}).status_code == 413


def test_django() -> None:
    with running("django_app.py") as client:
        assert client.get("/").text == "99 left\n"
        assert guesses(client, "data") == [200, 200, 401, 401, 401, 429]
        assert [client.get("/search").status_code for _ in range(6)] == [200] * 5 + [429]
        assert "ratelimit" not in client.get("/health").headers
        assert client.get("/reports", params={"pages": 15}).headers["x-ratelimit-remaining"] == "5"
        assert "throttled" in client.get("/reports", params={"pages": 15}).json()["detail"]


def test_fastapi() -> None:
    with running("fastapi_app.py") as client:
        assert client.get("/").json() == "99 left"
        assert guesses(client, "params") == [200, 200, 401, 401, 401, 429]
        assert "ratelimit" not in client.get("/health").headers


def test_aiohttp() -> None:
    with running("aiohttp_app.py") as client:
        assert client.get("/").text == "99 left\n"
        assert guesses(client, "data") == [200, 200, 401, 401, 401, 429]
        assert "ratelimit" not in client.get("/health").headers


def test_litestar() -> None:
    with running("litestar_app.py") as client:
        assert guesses(client, "params") == [201, 201, 401, 401, 401, 429]
        assert client.get("/").headers["x-ratelimit-remaining"] == "93"
        assert "ratelimit" not in client.get("/health").headers


def test_quart() -> None:
    with running("quart_app.py") as client:
        assert [client.get("/report").status_code for _ in range(4)] == [200, 200, 200, 429]
        assert client.get("/").headers["x-ratelimit-remaining"] == "95"
        assert "ratelimit" not in client.get("/health").headers


def test_every_example_is_started() -> None:
    here = Path(__file__)
    adapters = (
        here.parents[1] / "adapters" / "check_examples.py"
    )  # needs packages that `make setup` does not install
    tested = here.read_text(encoding="utf-8") + adapters.read_text(encoding="utf-8")
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    assert [name for name in names if f'"{name}.py"' not in tested and f'"{name}"' not in tested] == []
