"""What the demo says, in plain ASCII and without colours: it must be readable everywhere, and easy to paste from."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

ABOUT = {
    "mail": "60 e-mails a minute in all",
    "telegram": "30 messages a minute for each user",
    "tiers": "10, 60 or 300 requests a minute, by API key",
    "petitions": "10 petitions a minute for each submitter",
}


class Progress:
    """Says what is starting, what it took, and what went wrong later."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line at once, also into a pipe. A closed pipe is ignored."""
        with suppress(OSError):
            print(line, flush=True)

    def problem(self, line: str) -> None:
        """Print a line about something that went wrong."""
        with suppress(OSError):
            print(f"headgate demo: {line}", file=sys.stderr, flush=True)

    def ready(self, part: str) -> None:
        """Say that a part is there."""
        self.say(f"  {part:<30} {time.monotonic() - self._begin:5.1f} s")


def welcome(
    dashboard: str, services: dict[str, str], policy: Path, api_key: str, submitter_id: str, traffic: bool
) -> str:
    """Return the block that says what runs where, what to try, and how to stop it."""
    json = "-H 'Content-Type: application/json'"
    petition = f'{{"type": "GENERAL", "text": "More benches", "submitter_id": "{submitter_id}"}}'
    return "\n".join(
        [
            "",
            "The demo is running, on this machine only.",
            "",
            f"  {'dashboard':<11}{dashboard + '/':<26}who asks, who is refused, and why",
            *(f"  {name:<11}{url:<26}{ABOUT[name]}" for name, url in services.items()),
            f"  {'policy':<11}{policy}",
            "             edit it, and the change applies at once",
            "",
            "Try, several times each:",
            "",
            f'  curl -s {dashboard}/v1/limiters/login/hit {json} -d \'{{"key": "you"}}\'',
            f"  curl -si {services['tiers']}/v1/whoami -H 'X-API-Key: {api_key}'",
            f"  curl -si {services['petitions']}/v1/petition-submissions {json} -d '{petition}'",
            "",
            f"Traffic is {'on' if traffic else 'off'}; the dashboard has the switch. Ctrl-C stops everything.",
        ]
    )
