"""Header fields and request targets as bytes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import unquote

import httptools

from headgate_server.problems import Field

CLOSE: Field = (b"connection", b"close")

_MAX_CACHED = 128
"""Bytes of the longest target that is cached."""


@lru_cache(maxsize=256)
def encoded_head(status: int, fields: tuple[Field, ...]) -> bytes:
    """Return a status line and header fields, without the empty line at the end."""
    return b"HTTP/1.1 %d %b\r\n%b" % (status, HTTPStatus(status).phrase.encode(), encoded_fields(fields))


@lru_cache(maxsize=256)
def encoded_fields(fields: Iterable[Field]) -> bytes:
    """Return header fields as bytes.

    Raises:
        ValueError: A field contains a line break.
    """
    encoded = b"".join(b"%b: %b\r\n" % field for field in fields)
    if encoded.count(b"\n") != len(tuple(fields)) or encoded.count(b"\r") != len(tuple(fields)):
        raise ValueError("a header field must not contain a line break")
    return encoded


def split_target(url: bytes) -> tuple[str, bytes, bytes]:
    """Return the decoded path of a request target, the raw path, and the query."""
    return _cached_split(url) if len(url) <= _MAX_CACHED else _split(url)


def _split(url: bytes) -> tuple[str, bytes, bytes]:
    if url.startswith(b"/") and b"#" not in url:
        path, _, query = url.partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        path, query = parsed.path or b"/", parsed.query or b""
    text = path.decode("ascii")
    return unquote(text) if "%" in text else text, path, query


_cached_split = lru_cache(maxsize=256)(_split)
