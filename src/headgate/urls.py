"""Check of URLs with credentials.

Programs disagree about unquoted `@` and `/` in passwords: one program's password is another one's host or port, which it
prints when it cannot connect. So such URLs are refused before any other code reads them.
"""

from __future__ import annotations

import re

from headgate.errors import ConfigError

__all__ = ["check_credentials"]

_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<rest>.*)", re.IGNORECASE | re.DOTALL
)
_UNCLEAR = re.compile(r"[\s\[\]\\\"<>]|%(?![0-9a-f]{2})", re.IGNORECASE)
_HOST = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]@\\\"]*)(?::[0-9]*)?")
_WEB = frozenset({"http", "https"})
_LAST_AT = frozenset({"redis", "rediss", "unix", "valkey", "valkeys"})
"""Schemes for which all clients agree that the last `@` ends the password."""


def check_credentials(url: str) -> None:
    """Refuse a URL whose name, password and host cannot be separated; ignore text that is not a URL.

    Raises:
        ConfigError: The URL is ambiguous. The message does not contain the URL.
    """
    match = _URL.fullmatch(url)
    # SQLite URLs have only a path.
    if match is None or (scheme := match["scheme"].lower()).startswith("sqlite"):
        return
    user_information, _, hosts = match["authority"].rpartition("@")
    is_clear = (
        ("@" not in user_information or scheme in _LAST_AT)
        and not _UNCLEAR.search(user_information)
        and all(map(_HOST.fullmatch, hosts.split(",")))
        # An @ in the path of a web address is common, and behind a clear host harmless.
        and (scheme in _WEB or not re.search(r"[\s@]", match["rest"]))
    )
    if not is_clear:
        raise ConfigError(
            "the name, the password and the host in the URL cannot be separated: in a name or a password, write % as "
            "%25, @ as %40, : as %3A, / as %2F, ? as %3F, # as %23, [ as %5B, ] as %5D and a space as %20"
        )
