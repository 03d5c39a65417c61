"""The demo in a child process."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import httpx

PATIENCE = 60.0  # seconds until something has to have happened; it takes a few on an idle machine
BLOCK_ENDS_WITH = "Ctrl-C stops everything."
T = TypeVar("T")


class Program:
    """A running `headgate` command and its output so far."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "default", "-m", "headgate_server.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            # These tests may run under nohup, where the demo would rightly not heed the end of a terminal.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        self._printed = {"stdout": "", "stderr": ""}
        self._open_streams = 2
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._printed
        ]
        for reader in self._readers:
            reader.start()

    @property
    def output(self) -> str:
        return self._printed["stdout"]

    @property
    def problems(self) -> str:
        return self._printed["stderr"]

    def wait_for_output(self, text: str) -> str:
        """Wait until the output contains a text, and return the output."""
        with self._changed:
            found = self._changed.wait_for(lambda: text in self.output or self._open_streams == 0, PATIENCE)
        assert found, f"did not print {text!r}:\n{self.output}\n{self.problems}"
        assert text in self.output, f"ended without {text!r}:\n{self.output}\n{self.problems}"
        return self.output

    def descendants(self) -> list[int]:
        """Return the processes that it has started, and theirs."""
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
        pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
        found = [self.process.pid]
        for parent in found:  # grows meanwhile
            found += [pid for pid, its_parent in pairs if its_parent == parent]
        return found[1:]

    def tell(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end of the process and its output, and return the exit code."""
        code = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return code

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _read(self, name: str) -> None:
        for line in getattr(self.process, name):
            with self._changed:
                self._printed[name] += line
                self._changed.notify_all()
        with self._changed:
            self._open_streams -= 1
            self._changed.notify_all()


def demo(*options: str, environment: dict[str, str] | None = None) -> Program:
    """Start `headgate demo` with these options; by default on any free port."""
    return Program("demo", *(options or ("--port", "0")), environment=environment)


def eventually(answer: Callable[[], T]) -> T:
    """Call a function until its result is true, and return the result."""
    deadline = time.monotonic() + PATIENCE
    while not (value := answer()):
        assert time.monotonic() < deadline, "it did not happen"
    return value


def until_ended(pids: Iterable[int]) -> None:
    """Wait for the end of these processes."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([descriptor], [], [], PATIENCE)
        finally:
            os.close(descriptor)
        assert ended, f"process {pid} is still there"


class Block:
    """The parsed output of the demo."""

    def __init__(self, output: str) -> None:
        self.text = output
        self.urls = dict(re.findall(r"^  (\w+) +(http://\S+?)/?(?: .*)?$", output, re.MULTILINE))
        self.policy = re.findall(r"^  policy +(\S.*)$", output, re.MULTILINE)[0]
        self.curl_lines = re.findall(r"^  (curl .*)$", output, re.MULTILINE)


def ask_like_curl(line: str) -> httpx.Response:
    """Send the request of a curl line; it may use -s, -i, -H and -d only."""
    words = iter(shlex.split(line)[1:])
    url, body, headers = "", None, {}
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = next(words)
        elif word not in ("-s", "-si"):
            assert word.startswith("http://"), word
            url = word
    method = "GET" if body is None else "POST"
    return httpx.request(method, url, content=body, headers=headers, timeout=PATIENCE, trust_env=False)


def ticks(url: str) -> Iterator[dict[str, Any]]:
    """Yield the events that the dashboard gets once a second."""
    with httpx.stream("GET", f"{url}/v1/events", timeout=PATIENCE, trust_env=False) as response:
        event = ""
        for line in response.iter_lines():
            if line.startswith("event:"):
                event = line.removeprefix("event:").strip()
            elif line.startswith("data:") and event == "tick":
                yield json.loads(line.removeprefix("data:"))


def first_tick(url: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first of them that is as wanted."""
    deadline = time.monotonic() + PATIENCE
    for tick in ticks(url):
        if wanted(tick):
            return tick
        assert time.monotonic() < deadline, f"not so: {tick}"
    raise AssertionError("the stream has ended")
