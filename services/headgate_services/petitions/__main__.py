"""python -m headgate_services.petitions [run | cleanup | halt REASON | resume]"""

from __future__ import annotations

import argparse
import sys

from headgate.observe import redact
from headgate_services.petitions import SettingsError, cleanup, halt, main, resume


def command(arguments: list[str]) -> int:
    """Do what the arguments say, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m headgate_services.petitions", description="Petitions with a limit per submitter."
    )
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser("run", help="start the service")
    run.add_argument("--host", help="where to listen (default: HOST, or 127.0.0.1)")
    run.add_argument("--port", type=int, help="which port; 0 for any free one (default: PORT, or 8000)")
    run.add_argument("--workers", type=int, default=1, help="how many processes share the work (default: 1)")
    commands.add_parser("cleanup", help="remove expired counters")
    halting = commands.add_parser("halt", help="let nothing more be submitted")
    halting.add_argument("reason", help="what clients are told")
    commands.add_parser("resume", help="let petitions be submitted again")
    parsed = parser.parse_args(arguments or ["run"])
    try:
        if parsed.command == "cleanup":
            report = cleanup()
            print(f"buckets removed: {report.deleted_count}, from before {report.cutoff.isoformat()}")
        elif parsed.command == "halt":
            halt(parsed.reason)
        elif parsed.command == "resume":
            resume()
        else:
            return main(parsed.host, parsed.port, getattr(parsed, "workers", 1))
    except SettingsError as error:
        print(redact(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
