"""Other ways to start and end the demo."""

from __future__ import annotations

import signal
from pathlib import Path

from headgate_server.hosting import listen
from tests.demo.support import BLOCK_ENDS_WITH, Block, demo, first_tick, until_ended


def test_killed_it_leaves_no_process(folder: Path) -> None:
    with demo("--port", "0", "--no-traffic", environment={"TMPDIR": str(folder)}) as program:
        program.wait_for_output(BLOCK_ENDS_WITH)
        processes = program.descendants()
        assert program.tell(signal.SIGKILL) == -signal.SIGKILL
        until_ended(processes)


def test_a_taken_port_and_no_traffic() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with demo("--port", str(port), "--no-traffic") as program:
            block = Block(program.wait_for_output(BLOCK_ENDS_WITH))
            assert not block.urls["dashboard"].endswith(f":{port}")
            assert "Traffic is off" in block.text
            tick = first_tick(block.urls["dashboard"], lambda tick: bool(tick["demo"]["services"]))
            assert [service["sent"] for service in tick["demo"]["services"]] == [0, 0, 0, 0]
            assert program.tell(signal.SIGHUP) == 0  # the terminal was closed
            assert program.problems == ""


def test_being_told_to_stop_while_starting_stops_it() -> None:
    with demo() as program:
        program.wait_for_output("Starting")
        assert program.tell(signal.SIGINT) == 0
        assert program.problems == ""
