"""SIGHUP to a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOR_COROUTINES = """
import asyncio, logging, sys
from headgate.policy import AsyncLivePolicy

async def main():
    live = AsyncLivePolicy.from_file(sys.argv[1])
    changed = asyncio.Event()
    live.on_change(changed.set)
    watching = asyncio.create_task(live.watch(3600))
    await asyncio.sleep(0)
    print("ready", live["login"].rules[0].quota, flush=True)
    await changed.wait()
    print("changed", live["login"].rules[0].quota, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print("error", live.last_error, flush=True)
    watching.cancel()

asyncio.run(main())
"""

FOR_THREADS = """
import logging, sys, threading
from headgate.policy import LivePolicy

live = LivePolicy.from_file(sys.argv[1])
changed = threading.Event()
live.on_change(changed.set)
with live.watch(3600):
    print("ready", live["login"].rules[0].quota, flush=True)
    changed.wait()
    print("changed", live["login"].rules[0].quota, flush=True)
    sys.stdin.readline()
    print("error", live.last_error, flush=True)
"""


@pytest.mark.parametrize("program", [FOR_COROUTINES, FOR_THREADS], ids=["coroutines", "threads"])
def test_a_process_reads_its_policy_again_when_told_to(tmp_path: Path, program: str) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limiters.login]\nrules = ["5/minute"]')
    logged = "import logging; logging.basicConfig(level=logging.INFO, format='%(levelname)s %(message)s')\n"
    with subprocess.Popen(
        [sys.executable, "-c", logged + program, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "ready 5/minute\n"
            file.write_text('[limiters.login]\nrules = ["7/minute"]')
            os.kill(process.pid, signal.SIGHUP)
            assert process.stdout.readline() == "changed 7/minute\n"
            assert process.stderr.readline() == (
                f"INFO {file} is in force: login: sliding_window/1m 5/minute -> 7/minute\n"
            )
            file.write_text('[limiters.login]\nrules = ["7/fortnight"]')
            os.kill(process.pid, signal.SIGHUP)
            assert process.stderr.readline().startswith(f"ERROR the policy stays as it was: {file}:2:10: ")
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline().startswith(f"error {file}:2:10: ")
            assert process.wait(30) == 0
        finally:
            process.kill()
