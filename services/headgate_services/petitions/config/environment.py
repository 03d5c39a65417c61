"""Reading environment variables: typed, by name, an empty one being unset."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NoReturn

from headgate import ConfigError

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?")
_FLAGS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


class SettingsError(ConfigError):
    """The service cannot run as it is configured; the message begins with the variable's name."""


class Environment:
    """Variables, each read as what it must be; whatever else it is raises `SettingsError`."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def text(self, name: str, default: str) -> str:
        """Return a variable without the white space around it."""
        return self._variables.get(name, "").strip() or default

    def whole(self, name: str, default: int) -> int:
        """Return a whole number."""
        text = self.text(name, "")
        if text and not _WHOLE.fullmatch(text):
            _refuse(name, "must be a whole number")
        return int(text) if text else default

    def number(self, name: str, default: float) -> float:
        """Return a number such as 5 or 0.5."""
        text = self.text(name, "")
        if text and not _NUMBER.fullmatch(text):
            _refuse(name, "must be a number")
        return float(text) if text else default

    def flag(self, name: str, default: bool) -> bool:
        """Return a yes or no."""
        text = self.text(name, "").lower()
        if text and text not in _FLAGS:
            _refuse(name, "must be true or false")
        return _FLAGS[text] if text else default

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """Return one of a few words."""
        text = self.text(name, default)
        if text not in choices:
            _refuse(name, f"must be one of {', '.join(choices)}")
        return text


def _refuse(name: str, why: str) -> NoReturn:
    raise SettingsError(f"{name}: {why}")
