"""The tour."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from headgate_server.cli.tour import tour


def test_the_tour_prints_real_decisions() -> None:
    lines: list[str] = []
    tour(fast=True, say=lines.append)
    text = "\n".join(lines)
    assert "60 of 120 admitted" in text
    assert "20 admitted within a tenth of a second" in text
    assert "cem still has 3 of 5" in text
    assert "settled at 300: 700 left" in text
    assert "admitted per tenth of a second: 5 1 1 1 1 1 1 1 1 1 1" in text
    assert text.count("✗ second run") == 1
    assert "\x1b[" not in text


def test_the_tour_is_coloured_on_a_terminal_only() -> None:
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    command = [sys.executable, "-m", "headgate_server.cli", "tour", "--fast"]
    process = subprocess.Popen(command, stdout=follower, env=environment)
    os.close(follower)
    output = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(leader)
    assert process.wait() == 0
    assert "\x1b[32m█████".encode() in output
    plain = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    assert b"\x1b[" not in plain
