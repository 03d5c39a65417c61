"""Common parts of the commands: parsers, options, failures, and imports of optional packages."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import textwrap
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from headgate.policy import Policy

__all__ = ["Commands", "Failure", "optional", "port"]

POLICY_FILE = "headgate.toml"
DEFAULT_SERVER = "http://127.0.0.1:8080"
TOKEN_VARIABLE = "HEADGATE_TOKEN"
SMALLEST_POLICY = 'limiters.login.rules = ["5/minute"]'

_WIDTH = 100
_HIGHEST_PORT = 65_535


class Failure(Exception):
    """An error message for the user, in one line.

    Args:
        message: The error, and how to fix it.
        code: The exit code: 1 if it failed, 2 if it was called wrongly.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    """A parser with errors of one line, with line breaks kept in its help."""

    def __init__(self, *, prog: str, description: str, examples: Sequence[str] = ()) -> None:
        super().__init__(
            prog=prog,
            description=textwrap.fill(description, _WIDTH - 4),
            epilog="\n".join(["examples:", *(f"  {line}" for line in examples)]) if examples else None,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"headgate: {message} (see `{self.prog} --help`)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = get_close_matches(str(value), action.choices, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(action.choices)}"
            raise argparse.ArgumentError(None, f"unknown {str(action.metavar).lower()} {value!r}; {hint}")
        super()._check_value(action, value)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(_WIDTH, shutil.get_terminal_size().columns) - 2
        super().__init__(prog, max_help_position=26, width=width)


class Commands:
    """The commands below a parser, listed in its help by groups.

    Args:
        parser: The parser; its description is followed by the list.
        word: The placeholder of a command in the usage.
    """

    def __init__(self, parser: Parser, word: str = "COMMAND", *, required: bool = True) -> None:
        self._parser = parser
        # The list is in the description, so argparse's list and usage are suppressed.
        parser.usage = f"{parser.prog} [-h] [--debug] {word} …"
        self._add = parser.add_subparsers(metavar=word, help=argparse.SUPPRESS, required=required).add_parser
        self._introduction = parser.description or ""
        self._listed: dict[str, list[tuple[str, str]]] = {}
        self._group = "commands"

    def group(self, title: str) -> None:
        """Begin a group for the commands that are added next."""
        self._group = title

    def add(
        self,
        name: str,
        summary: str,
        run: Callable[[argparse.Namespace], int | None] | None = None,
        *,
        about: str = "",
        examples: Sequence[str] = (),
    ) -> Parser:
        """Add a command and return its parser.

        Args:
            name: Its name.
            summary: A short description for the list.
            run: Called with the options; returns the exit code, or `None` for 0. Without it, the command has subcommands.
            about: More text for its help.
            examples: Lines of a shell for its help; by default the command alone.
        """
        prog = f"{self._parser.prog} {name}"
        self._listed.setdefault(self._group, []).append((name, summary))
        self._parser.description = "\n\n".join([self._introduction, *map(self._listing, self._listed)])
        first = f"{summary[0].upper()}{summary[1:]}."
        parser: Parser = self._add(
            name,
            prog=prog,
            description=f"{first} {about}".strip(),
            examples=examples or ([] if run is None else [prog]),
        )
        # Also allowed after the command; the default is that of the parser above.
        parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=DEBUG_HELP)
        if run is not None:
            parser.set_defaults(command=run, parser=parser)
        return parser

    def _listing(self, group: str) -> str:
        width = max(len(name) for listed in self._listed.values() for name, _ in listed)
        lines = (f"  {name:<{width}}  {summary}" for name, summary in self._listed[group])
        return "\n".join([f"{group}:", *lines])


DEBUG_HELP = "show the traceback of an error"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the policy file."""
    about = f"the policy file (default: {POLICY_FILE})"
    parser.add_argument("--config", metavar="FILE", default=POLICY_FILE, help=about)


def add_server(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    """Add the options that name a server."""
    shown = (
        f"the server (default: {default})" if default else "use this server, not the stores of a policy file"
    )
    parser.add_argument("--server", metavar="URL", default=default, help=shown)
    parser.add_argument(
        "--token",
        help=f"token for the server (default: the variable {TOKEN_VARIABLE}, hidden from other users)",
    )


def add_scope(parser: argparse.ArgumentParser, value: str, example: str, about: str) -> None:
    """Add the option `--scope SCOPE=value`, which may be given several times."""

    def scope(text: str) -> tuple[str, str]:
        name, _, given = text.partition("=")
        if not name or not given:
            raise argparse.ArgumentTypeError(f"write a scope as {example}, not {text!r}")
        return name, given

    parser.add_argument(
        "--scope", metavar=f"SCOPE={value}", action="append", default=[], type=scope, help=about
    )


def port(text: str) -> int:
    """Return a port: an argparse type."""
    return from_to(0, _HIGHEST_PORT)(text)


def from_to(least: int, most: int) -> Callable[[str], int]:
    """Return the argparse type of a whole number within bounds."""

    def number(text: str) -> int:
        found = int(text)
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"use a number from {least} to {most}, not {text}")
        return found

    return number


def read_policy(file: str) -> Policy:
    """Return the policy of a file, with single values replaced from the environment.

    Raises:
        PolicyError: It cannot be read or is invalid.
    """
    from headgate.policy import load_policy

    return load_policy(existing_policy(file), os.environ)


def existing_policy(file: str) -> str:
    """Return the name of a policy file that exists.

    Raises:
        PolicyError: It does not exist. The message shows the smallest policy file.
    """
    if not Path(file).exists():
        from headgate.policy import PolicyError

        raise PolicyError(f"{file} does not exist; the smallest policy file is one line: {SMALLEST_POLICY}")
    return file


def redacted(error: Exception) -> str:
    """Return the message of an error, in one line and without credentials."""
    from headgate.observe import redact

    return redact(" ".join(str(error).split())) or type(error).__name__


def optional(module: str, what: str, requirement: str) -> ModuleType:
    """Import a module that needs an extra; `requirement` is the package to install.

    Raises:
        Failure: A package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("headgate"):
            raise
        raise Failure(f"{what} needs {error.name}: pip install '{requirement}'") from error
