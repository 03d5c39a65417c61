r"""Expressions for key, cost, tier and route, from the fields of a line.

An expression is text with fields in braces; `{{` and `}}` are plain braces. A field may have filters:

    {client}                            a field
    {user|or:client}                    another field if the first is missing
    {http_x_api_key|default:anonymous}  a text if it is missing
    {path|match:^/api/(\w+)}            the first group of a pattern; missing if it does not match
    {bytes|per:1024}                    a number divided, rounded up: for costs
    {path|shape}                        numbers and ids in a path replaced by `:id`
    {client|network}                    an address as Headgate counts it: IPv6 as /64, without a port
    {plan|map:gold=pro,silver=free}     replacements; missing if no word matches
    {user|hash}                         a digest with a random salt, for reports that are shared
    {user|lower}  {method|upper}

After a colon, write `\|`, `\{` and `\}` for these characters. Nothing is evaluated as code. A field is missing if the line
does not have it, or if it is empty or `-`; then the whole expression is missing.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

from headgate.http import peer_key
from headgate_server.replay.errors import ReplayError

Row = Any
"""A parsed line; its type depends on the format."""

Value = TypeVar("Value")
Getter = Callable[[Row], str | None]
Filter = Callable[[str], str | None]
Lookup = Callable[[str], Getter]

_PIECE = re.compile(r"\{\{|\}\}|\{((?:[^{}\\]|\\.)*)\}|([{}])|([^{}]+)")
_FIELD = re.compile(r"(?:[^|\\]|\\.)+")
_ESCAPED = re.compile(r"\\([|{}])")
_ID = re.compile(
    r"(?<=/)(?:\d+|[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}|(?=[a-zA-Z_-]*\d)[0-9a-zA-Z_-]{16,}|[0-9a-fA-F]{12,})(?=/|$)"
)
_IPV6_PREFIX = 64
_SALT = secrets.token_bytes(16)


def compile_expression(text: str, lookup: Lookup) -> Getter:
    """Return a function from a line to the text of an expression.

    Args:
        text: The expression.
        lookup: Returns the getter of a field; raises ReplayError if lines cannot have it.

    Raises:
        ReplayError: The expression is invalid, or has an unknown field or filter.
    """
    pieces: list[str | Getter] = []
    for found in _PIECE.finditer(text):
        inside, stray, plain = found.groups()
        if stray:
            raise ReplayError(
                f"expression {text!r}: single {stray!r} at position {found.start() + 1}; write {stray * 2!r} for a brace"
            )
        pieces.append(_field(inside, lookup, text) if inside is not None else plain or found[0][0])
    if len(pieces) == 1 and not isinstance(pieces[0], str):
        return pieces[0]
    return _joined(pieces)


def _joined(pieces: list[str | Getter]) -> Getter:
    if all(isinstance(piece, str) for piece in pieces):
        constant = "".join(piece for piece in pieces if isinstance(piece, str))
        return lambda row: constant

    def get(row: Row) -> str | None:
        parts = []
        for piece in pieces:
            part = piece if isinstance(piece, str) else piece(row)
            if part is None:
                return None
            parts.append(part)
        return "".join(parts)

    return get


def _field(inside: str, lookup: Lookup, text: str) -> Getter:
    name, *filters = _FIELD.findall(inside) or [""]
    if not name.strip():
        raise ReplayError(f"expression {text!r}: a field has no name; write for example {{client}}")
    getter = lookup(name.strip())
    for word in filters:
        kind, _, argument = word.partition(":")
        argument = _ESCAPED.sub(r"\1", argument)
        if kind.strip() == "or":
            getter = first_of([getter, lookup(argument.strip())])
        elif kind.strip() == "default":
            getter = first_of([getter, _joined([argument])])
        else:
            getter = _filtered(getter, _filter(kind.strip(), argument, text))
    return getter


def first_of(getters: Sequence[Callable[[Row], Value | None]]) -> Callable[[Row], Value | None]:
    """Return a getter of the first field that a line has."""
    if len(getters) == 1:
        return getters[0]

    def get(row: Row) -> Value | None:
        for getter in getters:
            value = getter(row)
            if value is not None:
                return value
        return None

    return get


def _filtered(getter: Getter, change: Filter) -> Getter:
    def get(row: Row) -> str | None:
        value = getter(row)
        return None if value is None else change(value)

    return get


def _filter(kind: str, argument: str, text: str) -> Filter:
    if kind in ("match", "map", "per") and not argument:
        raise ReplayError(f"expression {text!r}: {kind} needs an argument, as in {{path|{kind}:…}}")
    if kind == "match":
        return _matcher(argument, text)
    if kind == "map":
        return _mapper(argument, text)
    if kind == "per":
        return _divider(argument, text)
    plain = _PLAIN.get(kind)
    if plain is None or argument:
        known = ", ".join(["or", "default", "match", "map", "per", *_PLAIN])
        problem = f"unknown filter {kind!r}" if plain is None else f"{kind} has no argument"
        raise ReplayError(f"expression {text!r}: {problem}; the filters are {known}")
    return plain


def _matcher(pattern: str, text: str) -> Filter:
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ReplayError(f"expression {text!r}: {pattern!r} is not a valid pattern: {error}") from None
    group = 1 if compiled.groups else 0

    def match(value: str) -> str | None:
        found = compiled.search(value)
        return (found[group] or None) if found else None

    return match


def _mapper(argument: str, text: str) -> Filter:
    pairs = [pair.partition("=") for pair in argument.split(",")]
    if not all(word.strip() and equals for word, equals, _ in pairs):
        raise ReplayError(f"expression {text!r}: write map as map:gold=pro,silver=free")
    return {word.strip(): other.strip() for word, _, other in pairs}.get


def _divider(argument: str, text: str) -> Filter:
    if not (argument.isascii() and argument.isdigit() and int(argument)):
        raise ReplayError(f"expression {text!r}: per needs a whole number of at least 1, not {argument!r}")
    divisor = int(argument)

    def divide(value: str) -> str | None:
        # Other text is unchanged; as a cost, it makes the line invalid.
        return str(-(int(value) // -divisor)) if value.isascii() and value.isdigit() else value

    return divide


def _network(value: str) -> str:
    return peer_key(value, _IPV6_PREFIX)  # cached


def _shape(value: str) -> str:
    return _ID.sub(":id", value.partition("?")[0])


def _hash(value: str) -> str:
    return blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8, key=_SALT).hexdigest()


_PLAIN: dict[str, Filter] = {
    "hash": _hash,
    "lower": str.lower,
    "network": _network,
    "shape": _shape,
    "upper": str.upper,
}
