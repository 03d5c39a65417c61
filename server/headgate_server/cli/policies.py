"""`check`, `serve` and `token`: the policy file, and its server."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import secrets
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import headgate_server
from headgate_server.cli.common import (
    POLICY_FILE,
    SMALLEST_POLICY,
    Commands,
    Failure,
    add_config,
    existing_policy,
    from_to,
    port,
    redacted,
)

if TYPE_CHECKING:
    from headgate.policy import Policy

PERMISSIONS = ("decide", "administer")
"""The permissions of a token."""


def add(commands: Commands) -> None:
    """Add the commands around the policy file."""
    check = commands.add(
        "check",
        "check a policy file, and say in plain words what it means",
        _check,
        about="The first mistake is shown with line and column. A valid setting that is probably not intended "
        "is a warning. Environment variables that begin with HEADGATE_ replace "
        "single values, as they do for the server: HEADGATE_LIMITERS__LOGIN__RULES is limiters.login.rules.",
        examples=[
            "headgate check",
            "headgate check --connect other.toml",
            "cat other.toml | headgate check --json -",
            "HEADGATE_STORE__URL=redis://localhost headgate check",
        ],
    )
    check.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        default=POLICY_FILE,
        help=f"the policy file, or - for standard input (default: {POLICY_FILE})",
    )
    check.add_argument(
        "--connect", action="store_true", help="also ask every store whether it can count; fail if one cannot"
    )
    check.add_argument("--json", action="store_true", help="print what was found as JSON")

    serve = commands.add(
        "serve",
        "offer the limiters of a policy file over HTTP, with a dashboard",
        _serve,
        about="Any language can then ask it: POST /v1/limiters/NAME/hit, GET /openapi.json for the rest, / for the "
        "dashboard. The file is read again when it changes, and on SIGHUP. Without tokens in the file it listens on "
        "loopback addresses only.",
        examples=[
            f"echo '{SMALLEST_POLICY}' >{POLICY_FILE}",
            "headgate serve",
            'curl --json \'{"key": "alice"}\' http://127.0.0.1:8080/v1/limiters/login/hit',
        ],
    )
    add_config(serve)
    serve.add_argument("--host", help="where to listen (default: [server] host of the file, or 127.0.0.1)")
    serve.add_argument(
        "--port", type=port, metavar="N", help="which port (default: [server] port of the file, or 8080)"
    )
    serve.add_argument(
        "--workers",
        type=from_to(1, 1_000, "processes"),
        default=1,
        metavar="N",
        help="how many processes (default: 1)",
    )

    token = commands.add(
        "token",
        "make a token for the server, and print it once",
        _token,
        about="The lines for the policy file, with its digest only, go to standard output; the token itself to standard "
        "error, so that the first example keeps it out of the file.",
        examples=[
            f"headgate token gateway >>{POLICY_FILE}",
            "headgate token operator --may decide --may administer",
        ],
    )
    token.add_argument("name", metavar="NAME", type=_token_name, help="what it is called in the policy file")
    token.add_argument(
        "--may",
        action="append",
        choices=PERMISSIONS,
        help="what it is good for; may be given twice (default: decide)",
    )
    token.add_argument(
        "--days",
        type=from_to(1, 36_500, "days"),
        metavar="N",
        help="after how many days it ends (default: never)",
    )


def _check(options: argparse.Namespace) -> int:
    """Explain a policy, or print the first mistake in it."""
    from headgate.policy import PolicyError, explain, find_warnings, parse_policy, read_policy

    if options.file == "-":
        source, text = "standard input", sys.stdin.read()
    else:
        source, text = options.file, read_policy(existing_policy(options.file))
    policy, mistake = None, None
    try:
        policy = parse_policy(text, source, os.environ)
    except PolicyError as error:
        mistake = error
    warnings = [] if policy is None else list(find_warnings(policy, text, os.environ))
    stores = None if policy is None or not options.connect else _ask_stores(policy)
    failures = sum(store["reason"] is not None for store in stores or ())
    if options.json:
        place = mistake and {"line": mistake.line, "column": mistake.column, "message": redacted(mistake)}
        found: dict[str, object] = {
            "ok": mistake is None and not failures,
            "mistake": place,
            "warnings": warnings,
        }
        found |= {"words": None if policy is None else explain(policy), "stores": stores}
        print(json.dumps(found, indent=2))
    else:
        if mistake is not None:
            print(f"headgate: {redacted(mistake)}", file=sys.stderr)
        for warning in warnings:
            print(f"headgate: warning: {warning}", file=sys.stderr)
        if policy is not None:
            print(explain(policy))
        if stores is not None:
            print("", *(f"{each['store']}: {each['reason'] or 'can count'}" for each in stores), sep="\n")
    if failures:
        raise Failure(f"{failures} of {len(stores or ())} stores cannot count")
    return 0 if mistake is None else 1


def _ask_stores(policy: Policy) -> list[dict[str, str | None]]:
    """Return every `store` and the `reason` why it cannot count; `None` if it can."""
    from headgate.observe import redact
    from headgate.policy import LivePolicy

    with LivePolicy(policy) as live:
        found = live.ping()
    return [
        {"store": redact(url), "reason": None if error is None else redact(str(error))}
        for url, error in found.items()
    ]


def _serve(options: argparse.Namespace) -> int:
    file = existing_policy(options.config)
    return headgate_server.serve(file, host=options.host, port=options.port, workers=options.workers)


def _token(options: argparse.Namespace) -> None:
    """Print the lines for the file to standard output and the token to standard error, for `>>headgate.toml`."""
    token = secrets.token_urlsafe(32)
    may = ", ".join(f'"{permission}"' for permission in dict.fromkeys(options.may or ["decide"]))
    print("the token, shown only now:", token, file=sys.stderr, flush=True)
    # An empty line first, because the last line of the file may have no end.
    print(f"\n[server.tokens.{options.name}]")
    print(f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"')
    print(f"may = [{may}]")
    if options.days is not None:
        # To the second: a date alone would end it at midnight, perhaps minutes from now.
        print(f"expires = {datetime.now(UTC) + timedelta(days=options.days):%Y-%m-%dT%H:%M:%SZ}")


def _token_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        raise argparse.ArgumentTypeError(f"invalid name {text!r}; use letters, digits, - and _")
    return text
