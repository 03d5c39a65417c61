"""Credentials out of text, and out of logs.

    redact("redis://ada:s3cret@db:6379/0")   ->   "redis://***@db:6379/0"

Masked are user information in URLs of any scheme, values with a name like `password=…` or `"api_key": "…"`, and tokens
after `Bearer` and `Basic`. A password may contain anything that people put there without encoding it: `@`, `:`, `/`, `?`,
`#`, `%`, quotes, even spaces. In doubt, too much is masked rather than too little: user information ends at the last `@`
that can belong to the URL. A sentence after a name and a colon (`API_KEY: must be set`) is left alone if its first word is a
common one.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from headgate._checks import check_list
from headgate.errors import ConfigError

MASK = "***"
"""What stands in place of a credential."""

_LONGEST = 4096
"""How far user information may reach, so that a long line does not take the square of its length."""

_SCHEME = r"[a-z][a-z0-9+.-]{0,30}"
_URL = re.compile(rf"(?:(?<![a-z0-9+.-])({_SCHEME}):|(?<![\w:/\\]))(?:\\?/){{2}}", re.IGNORECASE)
_NEXT_URL = re.compile(rf"(?<=[\s,;|\"'<>()\[\]{{}}=]){_SCHEME}:(?:\\?/){{2}}", re.IGNORECASE)
_ENCODED_URL = re.compile(rf"({_SCHEME}%3a(?:%2f){{2}})\S{{0,{_LONGEST}}}%40", re.IGNORECASE)
# With a slash too few, or the wrong ones; with none at all only where a scheme is that of a store.
_MISSPELT_URL = re.compile(
    rf"(?<![a-z0-9+.-])({_SCHEME}:(?:/(?!\\?/)|\\{{1,4}}(?!/))|(?:redis|valkey|postgres)[a-z+]{{0,12}}:)(?![/\\])"
    r"[^\s@/]{0,256}:\S{1,256}@",
    re.IGNORECASE,
)
# Without a scheme it takes a host with a port behind the `@` to tell a password from anything else.
_NO_SCHEME = re.compile(r"(?<![\w.+@/*-])[\w.+-]{0,64}:[^\s@/]{1,256}@(?=[\w.-]{1,255}:\d)")

_WEB_SCHEMES = frozenset({"http", "https", "ws", "wss"})
_HOST = re.compile(r"(?:\[[0-9a-f:.%]+\]|[\w.-]+)(?::\d{1,5})?", re.IGNORECASE)
_PASSWORD_FOLLOWS = re.compile(r"(?!\[)[^\s/@:]*:(?!\d{1,5}(?:[\s/?#,;)'\"]|$))\S")

# First words of sentences about a value, as in `API_KEY: must be set`.
_SENTENCE = (
    r"(?!\s{1,4}(?:an?|the|this|that|these|those|it|its|you|your|we|they|no|not|none|nothing|only|either|neither|one|"
    r"is|are|was|were|be|has|have|had|does|do|did|must|may|might|can|cannot|could|should|shall|will|would|"
    r"if|when|while|because|since|as|at|by|for|from|in|of|on|to|with|without|and|or|but|so|than|too|"
    r"give|set|use|try|write|choose|check|see|make|enter|expected|required|missing|invalid|wrong|unknown|expired|"
    r"failed|refused|denied|please)[.,;!?]?(?:\s|$))"
)
_NAME = r"""
    (?: (?:password | passwd | passphrase | secret | credential | (?:api|access|private)[_-]?key) [\w-]{0,32}
      | (?<![a-z]) (?:pwd | pass | token | auth) (?![a-z])
    )
"""
_NAMED = re.compile(
    rf"""
    ( {_NAME} ["'\\]{{0,2}} \s{{0,4}} (?: =>? | : {_SENTENCE} ) \s{{0,4}} )
    (?: (") (?:[^"\\]|\\.)* " | (') (?:[^'\\]|\\.)* ' | (?:[^\s&"'] | ["'] (?! [,;:)\]}}\s] | $) )+ )
    """,
    re.IGNORECASE | re.VERBOSE,
)
_ENDS_IN_NAMED = re.compile(
    rf"(?: [?&\s] | %3f | %26 ) [\w-]{{0,32}} {_NAME} (?: = | %3d ) (?: (?! & | %26 ) . )* \Z",
    re.IGNORECASE | re.VERBOSE,
)
_AUTHORIZATION = re.compile(
    rf"(authorization[\"']?\s{{0,4}}(?:=|:{_SENTENCE})\s{{0,4}}[\"']?)[^\r\n\"']+", re.IGNORECASE
)
_TOKEN = re.compile(
    r"(\b(?:bearer|basic)\s{1,4})(?!(?:authentication|authorization|credentials)\b)[\w.~+/=-]{8,}",
    re.IGNORECASE,
)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text with all credentials masked.

    Args:
        text: Anything, usually one line of a log.
        secrets: Texts to mask wherever they stand, also percent-encoded: a password that was given apart from its URL.
    """
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, MASK).replace(quote(secret, safe=""), MASK)
    # URLs first: a password may look like a named value.
    if "//" in text or "/\\/" in text:
        text = "".join(_without_user_information(text))
    text = _ENCODED_URL.sub(lambda match: f"{match[1]}{_mask_of(match[0])}%40", text)
    if "@" in text:
        text = _MISSPELT_URL.sub(lambda match: f"{match[1]}{_mask_of(match[0])}@", text)
        text = _NO_SCHEME.sub(f"{MASK}@", text)
    text = _AUTHORIZATION.sub(rf"\1{MASK}", text)
    return _TOKEN.sub(rf"\1{MASK}", _NAMED.sub(_masked_value, text))


def _mask_of(user_information: str) -> str:
    """Return what to write for user information.

    In `//h:1?password=a@b`, the `@` may also be part of a value. It is then left to the rule for named values to mask the
    rest of that.
    """
    return f"{MASK}?password=" if _ENDS_IN_NAMED.search(user_information) else MASK


def _masked_value(match: re.Match[str]) -> str:
    quote_mark = match[2] or match[3] or ""  # kept, so that JSON stays JSON
    return f"{match[1]}{quote_mark}{MASK}{quote_mark}"


def _without_user_information(text: str) -> Iterator[str]:
    """Yield the text in pieces, the user information of its URLs masked."""
    done = 0
    for match in _URL.finditer(text):
        if match.start() < done:
            continue  # inside of a password
        end = _user_information_end(text, match)
        if end is not None:
            yield text[done : match.end()]
            yield _mask_of(text[match.end() : end])
            done = end
    yield text[done:]


def _user_information_end(text: str, match: re.Match[str]) -> int | None:
    """Return where the `@` stands that ends the user information of a URL; `None` if it has none."""
    start = match.end()
    line = re.split(r"[\r\n]", text[start : start + _LONGEST], maxsplit=1)[0]
    quote_mark = text[match.start() - 1 : match.start()]
    if quote_mark and quote_mark in "\"'`":
        quoted = line.partition(quote_mark)[0]
        # A URL in quotes ends with them; unless that leaves it without a host, or in the middle of a password.
        if not (quoted.endswith("@") or ("@" not in quoted and _PASSWORD_FOLLOWS.match(quoted))):
            return _end_within(quoted, match[1], start)
    following = _NEXT_URL.search(line)
    run = re.split(r"\s", line[: following.start()] if following else line, maxsplit=1)[0]
    if "@" in run:
        return _end_within(run, match[1], start)
    if match[1] and _PASSWORD_FOLLOWS.match(line):
        # There is a password, but not in one piece: it goes on to the next piece with an `@`.
        with_spaces = re.match(r"[^@]*@(?:\S*@)?", line)
        return start + with_spaces.end() - 1 if with_spaces else None
    return None


def _end_within(url: str, scheme: str | None, start: int) -> int | None:
    """Return where the user information ends in a URL without its scheme that begins at `start`."""
    last = url.rfind("@")
    if last < 0 or (scheme is None and ":" not in url[:last]):
        return None
    return None if (scheme or "").lower() in _WEB_SCHEMES and _is_in_path(url) else start + last


def _is_in_path(url: str) -> bool:
    """Return whether every `@` of a web address belongs to its path, as in `example.org/@ada`."""
    authority, *rest = re.split(r"(\\?/|[?#])", url, maxsplit=1)
    if "@" in authority or not _HOST.fullmatch(authority):
        return False
    # After what may be a port, or else a name and the digits that a password begins with, only the usual `/@ada`.
    return ":" not in authority or not re.search(r"[^/]@", "".join(rest))


class RedactingFilter(logging.Filter):
    """Masks credentials in everything that a record carries: message, arguments, exceptions with all that led to them.

    Add it to handlers, so that it sees the records of every logger: `handler.addFilter(RedactingFilter())`. What it
    masks stays masked for the handlers that come after.

    Args:
        secrets: Texts to mask wherever they stand.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        try:
            self._secrets = check_list("secrets", secrets, str, "['s3cret']")
        except ConfigError:  # which shows them
            raise ConfigError("secrets is a list of texts, like ['s3cret']") from None

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        masked = redact(message, self._secrets)
        if masked != message:
            record.msg, record.args = masked, ()
        if record.exc_info and record.exc_info[1] is not None:
            self._mask_exception(record)
        if record.exc_text:
            record.exc_text = redact(record.exc_text, self._secrets)
        if record.stack_info:
            record.stack_info = redact(record.stack_info, self._secrets)
        for name in record.__dict__.keys() - _STANDARD:
            record.__dict__[name] = self._masked(record.__dict__[name])
        return True

    def _mask_exception(self, record: logging.LogRecord) -> None:
        assert record.exc_info is not None
        text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        masked = redact(text, self._secrets)
        if masked != text:
            # A formatter prints exc_text where there is one. The exception itself would give the secret away to any
            # that looks at it instead.
            record.exc_text, record.exc_info = masked, None

    def _masked(self, value: Any) -> Any:
        """Return what somebody has attached to a record, masked if its text has credentials in it."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {key: self._masked_item(key, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._masked(item) for item in value]
        text = value if isinstance(value, str) else str(value)
        masked = redact(text, self._secrets)
        return value if masked == text else masked

    def _masked_item(self, key: object, item: Any) -> Any:
        if isinstance(item, str) and redact(f"{key}={item}", self._secrets) == f"{key}={MASK}":
            return MASK
        return self._masked(item)


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
