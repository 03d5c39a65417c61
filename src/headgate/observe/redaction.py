"""Remove credentials from text and logs.

    redact("redis://ada:s3cret@db:6379/0")   ->   "redis://***@db:6379/0"

Masked are user information in URLs of any scheme, named values like `password=…` or `"api_key": "…"`, and tokens after
`Bearer` and `Basic`. A password may contain any character that people leave unencoded: `@`, `:`, `/`, `?`, `#`, `%`, quotes,
even spaces. In doubt, too much is masked rather than too little: user information ends at the last `@` that can belong to
the URL. A sentence after a name and a colon (`API_KEY: must be set`) is not masked if it starts with a common word.
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
"""The replacement for a credential."""

_LONGEST = 4096
"""The maximum length of user information, to avoid quadratic time on long lines."""

_SCHEME = r"[a-z][a-z0-9+.-]{0,30}"
_URL = re.compile(rf"(?:(?<![a-z0-9+.-])({_SCHEME}):|(?<![\w:/\\]))(?:\\?/){{2}}", re.IGNORECASE)
_NEXT_URL = re.compile(rf"(?<=[\s,;|\"'<>()\[\]{{}}=]){_SCHEME}:(?:\\?/){{2}}", re.IGNORECASE)
_ENCODED_URL = re.compile(rf"({_SCHEME}%3a(?:%2f){{2}})\S{{0,{_LONGEST}}}%40", re.IGNORECASE)
# URLs with missing or wrong slashes; a scheme without any slash only if it is the scheme of a store.
_MISSPELT_URL = re.compile(
    rf"(?<![a-z0-9+.-])({_SCHEME}:(?:/(?!\\?/)|\\{{1,4}}(?!/))|(?:redis|valkey|postgres)[a-z+]{{0,12}}:)(?![/\\])"
    r"[^\s@/]{0,256}:\S{1,256}@",
    re.IGNORECASE,
)
# Without a scheme, only a host with a port after the `@` distinguishes a password from other text.
_NO_SCHEME = re.compile(r"(?<![\w.+@/*-])[\w.+-]{0,64}:[^\s@/]{1,256}@(?=[\w.-]{1,255}:\d)")

_WEB_SCHEMES = frozenset({"http", "https", "ws", "wss"})
_HOST = re.compile(r"(?:\[[0-9a-f:.%]+\]|[\w.-]+)(?::\d{1,5})?", re.IGNORECASE)
_PASSWORD_FOLLOWS = re.compile(r"(?!\[)[^\s/@:]*:(?!\d{1,5}(?:[\s/?#,;)'\"]|$))\S")

# First words of sentences about a value, like `API_KEY: must be set`.
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
        secrets: Texts to mask everywhere, also percent-encoded, like a password that is not part of a URL.
    """
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, MASK).replace(quote(secret, safe=""), MASK)
    # URLs first, because a password may look like a named value.
    if "//" in text or "/\\/" in text:
        text = "".join(_without_user_information(text))
    if "%40" in text:
        text = _ENCODED_URL.sub(lambda match: f"{match[1]}{_mask_of(match[0])}%40", text)
    if "@" in text:
        text = _MISSPELT_URL.sub(lambda match: f"{match[1]}{_mask_of(match[0])}@", text)
        text = _NO_SCHEME.sub(f"{MASK}@", text)
    text = _AUTHORIZATION.sub(rf"\1{MASK}", text)
    return _TOKEN.sub(rf"\1{MASK}", _NAMED.sub(_masked_value, text))


def _mask_of(user_information: str) -> str:
    """Return the mask for user information.

    In `//h:1?password=a@b`, the `@` may also belong to a value. The rule for named values then masks the rest of that
    value.
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
            continue  # inside a password
        end = _user_information_end(text, match)
        if end is not None:
            yield text[done : match.end()]
            yield _mask_of(text[match.end() : end])
            done = end
    yield text[done:]


def _user_information_end(text: str, match: re.Match[str]) -> int | None:
    """Return the position of the `@` that ends the user information of a URL; `None` if the URL has none."""
    start = match.end()
    line = re.split(r"[\r\n]", text[start : start + _LONGEST], maxsplit=1)[0]
    quote_mark = text[match.start() - 1 : match.start()]
    if quote_mark and quote_mark in "\"'`":
        quoted = line.partition(quote_mark)[0]
        # A quoted URL ends at its quote, unless that cuts it before its host or inside a password.
        if not (quoted.endswith("@") or ("@" not in quoted and _PASSWORD_FOLLOWS.match(quoted))):
            return _end_within(quoted, match[1], start)
    following = _NEXT_URL.search(line)
    run = re.split(r"\s", line[: following.start()] if following else line, maxsplit=1)[0]
    if "@" in run:
        return _end_within(run, match[1], start)
    if match[1] and _PASSWORD_FOLLOWS.match(line):
        # The password contains spaces and continues up to the next word with an `@`.
        with_spaces = re.match(r"[^@]*@(?:\S*@)?", line)
        return start + with_spaces.end() - 1 if with_spaces else None
    return None


def _end_within(url: str, scheme: str | None, start: int) -> int | None:
    """Return where the user information ends in a URL given without its scheme, which starts at `start`."""
    last = url.rfind("@")
    if last < 0 or (scheme is None and ":" not in url[:last]):
        return None
    return None if (scheme or "").lower() in _WEB_SCHEMES and _is_in_path(url) else start + last


def _is_in_path(url: str) -> bool:
    """Return whether every `@` of a web address belongs to its path, as in `example.org/@ada`."""
    authority, *rest = re.split(r"(\\?/|[?#])", url, maxsplit=1)
    if "@" in authority or not _HOST.fullmatch(authority):
        return False
    # After a possible port, or a name and the first digits of a password, accept only the usual `/@ada`.
    return ":" not in authority or not re.search(r"[^/]@", "".join(rest))


class RedactingFilter(logging.Filter):
    """Mask credentials in a log record: in its message, arguments, exception and chained exceptions.

    Add it to handlers, so that it sees the records of every logger: `handler.addFilter(RedactingFilter())`. Later handlers
    receive the masked record.

    Args:
        secrets: Texts to mask everywhere.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        try:
            self._secrets = check_list("secrets", secrets, str, "['s3cret']")
        except ConfigError:  # its message would show the secrets
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
            # A formatter prints exc_text if it is set. Remove the exception itself: a formatter that reads it would show
            # the secret.
            record.exc_text, record.exc_info = masked, None

    def _masked(self, value: Any) -> Any:
        """Return an attribute of a record, masked if its text contains credentials."""
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
