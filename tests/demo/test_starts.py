"""Other ways to start the demo: on a port that is taken, without traffic, with data that is kept."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx

from headgate_server.hosting import listen
from tests.demo.support import BLOCK_ENDS_WITH, Block, ask_like_curl, demo, first_tick, until_ended


def test_killed_it_leaves_no_process_and_what_was_kept_is_there_again(folder: Path) -> None:
    keep = ("--no-traffic", "--keep", str(folder))
    with demo("--port", "0", *keep, environment={"TMPDIR": str(folder)}) as first:
        block = Block(first.wait_for_output(BLOCK_ENDS_WITH))
        petition = ask_like_curl(block.curl_lines[2]).json()["petition_id"]
        with demo("--port", "0", *keep) as second:
            assert second.wait() == 1
            assert second.problems == f"headgate: {folder}: another demo is using this folder\n"
        processes = first.descendants()
        assert first.tell(signal.SIGKILL) == -signal.SIGKILL
        until_ended(processes)

    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with demo("--port", str(port), *keep) as again:
            block = Block(again.wait_for_output(BLOCK_ENDS_WITH))
            assert not block.urls["dashboard"].endswith(f":{port}")
            assert "Traffic is off" in block.text
            tick = first_tick(block.urls["dashboard"], lambda tick: bool(tick["demo"]["services"]))
            assert [service["sent"] for service in tick["demo"]["services"]] == [0, 0, 0, 0]
            kept = f"{block.urls['petitions']}/v1/petition-submissions/{petition}"
            assert httpx.get(kept, timeout=30, trust_env=False).status_code == 200
            assert again.tell(signal.SIGHUP) == 0  # the terminal was closed
            assert again.problems == ""


def test_being_told_to_stop_while_starting_stops_it() -> None:
    with demo() as program:
        program.wait_for_output("Starting")
        assert program.tell(signal.SIGINT) == 0
        assert program.problems == ""
