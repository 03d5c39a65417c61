"""`check`, `serve` and `token`: commands for the policy file and its server."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import secrets
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import headgate_server
from headgate import ConfigError
from headgate_server.cli.common import (
    POLICY_FILE,
    SMALLEST_POLICY,
    Commands,
    Failure,
    add_config,
    existing_policy,
    from_to,
    optional,
    port,
    redacted,
)

if TYPE_CHECKING:
    from headgate.policy import Policy

PERMISSIONS = ("decide", "administer", "gate")
"""The permissions of a token."""


def add(commands: Commands) -> None:
    """Add the commands for the policy file."""
    check = commands.add(
        "check",
        "check a policy file and describe its rules",
        _check,
        about="Prints the first error with line and column, and a warning for each valid setting that is probably a "
        "mistake. Environment variables replace single values, as they do for the server: "
        "HEADGATE_LIMITERS__LOGIN__RULES is limiters.login.rules.",
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
    check.add_argument("--connect", action="store_true", help="also check that every store can count")
    check.add_argument("--json", action="store_true", help="print JSON")

    serve = commands.add(
        "serve",
        "serve the limiters of a policy file over HTTP, with a dashboard",
        _serve,
        about="Clients call POST /v1/limiters/NAME/hit; GET /openapi.json describes all calls, and / is the dashboard. The "
        "file is reloaded when it changes and on SIGHUP. Without tokens in the file, only loopback addresses are allowed.",
        examples=[
            f"echo '{SMALLEST_POLICY}' >{POLICY_FILE}",
            "headgate serve",
            'curl --json \'{"key": "alice"}\' http://127.0.0.1:8080/v1/limiters/login/hit',
        ],
    )
    add_config(serve)
    serve.add_argument(
        "--host", help="address to listen on (default: [server] host of the file, or 127.0.0.1)"
    )
    serve.add_argument(
        "--port",
        type=port,
        metavar="N",
        help="port to listen on (default: [server] port of the file, or 8080)",
    )
    serve.add_argument(
        "--workers",
        type=from_to(1, 256),
        default=1,
        metavar="N",
        help="number of processes (default: 1)",
    )
    serve.add_argument(
        "--grpc",
        type=port,
        metavar="N",
        help="port of Envoy's rate-limit service (default: [envoy] port of the file, or 8081)",
    )

    imported = commands.add(
        "import",
        "convert the configuration of another rate limiter to lines for a policy file",
        _import,
        about="`envoy` is the YAML of envoyproxy/ratelimit. The lines go to standard output, and a list of everything that "
        "could not be converted to standard error. It needs the package headgate-server[envoy].",
        examples=[f"headgate import envoy config.yaml >>{POLICY_FILE}"],
    )
    imported.add_argument("format", metavar="FORMAT", choices=("envoy",), help="its format: envoy")
    imported.add_argument(
        "files", metavar="FILE", nargs="+", help="the configuration; one file for each domain"
    )

    token = commands.add(
        "token",
        "create a token for the server and print it once",
        _token,
        about="The lines for the policy file, with the digest of the token, go to standard output. The token itself goes to "
        "standard error, so it is not in the file of the first example.",
        examples=[
            f"headgate token gateway >>{POLICY_FILE}",
            "headgate token operator --may decide --may administer",
        ],
    )
    token.add_argument("name", metavar="NAME", type=_token_name, help="its name in the policy file")
    token.add_argument(
        "--may",
        action="append",
        choices=PERMISSIONS,
        help="its permission; may be repeated (default: decide)",
    )
    token.add_argument(
        "--days",
        type=from_to(1, 36_500),
        metavar="N",
        help="days until it expires (default: never)",
    )


def _check(options: argparse.Namespace) -> int:
    """Explain a policy, or print its first error."""
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
    stores = None if policy is None or not options.connect else _ping_stores(policy)
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


def _ping_stores(policy: Policy) -> list[dict[str, str | None]]:
    """Return each `store` with the `reason` why it cannot count, or `None`."""
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
    return headgate_server.serve(
        file, host=options.host, port=options.port, workers=options.workers, grpc_port=options.grpc
    )


def _import(options: argparse.Namespace) -> None:
    conversion = optional("headgate_server.envoy.conversion", "headgate import", "headgate-server[envoy]")
    for file in options.files:
        try:
            toml, problems = conversion.convert(Path(file).read_text(encoding="utf-8"))
        except (ConfigError, UnicodeDecodeError) as error:
            raise Failure(f"{file}: {error}") from error
        print(f"\n{toml}", end="")
        for problem in problems:
            print(f"headgate: {file}: not converted: {problem}", file=sys.stderr)


def _token(options: argparse.Namespace) -> None:
    """Print the lines for the file to standard output and the token to standard error, for `>>headgate.toml`."""
    token = secrets.token_urlsafe(32)
    may = ", ".join(f'"{permission}"' for permission in dict.fromkeys(options.may or ["decide"]))
    print("the token (shown only once):", token, file=sys.stderr, flush=True)
    # An empty line first, because the file may not end with a newline.
    print(f"\n[server.tokens.{options.name}]")
    print(f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"')
    print(f"may = [{may}]")
    if options.days is not None:
        # With the time: a date alone would expire at midnight, perhaps minutes from now.
        print(f"expires = {datetime.now(UTC) + timedelta(days=options.days):%Y-%m-%dT%H:%M:%SZ}")


def _token_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        raise argparse.ArgumentTypeError(f"invalid name {text!r}; use letters, digits, - and _")
    return text
