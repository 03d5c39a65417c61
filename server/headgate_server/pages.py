"""The dashboard's files: read once, served from memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources

from headgate_server.access import HeaderFields
from headgate_server.problems import ApiProblem, Field

_TYPES = {
    "css": b"text/css; charset=utf-8",
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}

SECURITY: tuple[Field, ...] = (
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
"""Header fields of everything that a browser may show."""


@dataclass(frozen=True, slots=True)
class Page:
    """A file, ready to be sent."""

    content: bytes
    tag: bytes
    fields: tuple[Field, ...]


def find_page(name: str) -> Page:
    """Return a file of the dashboard.

    Raises:
        ApiProblem: 404 if the file does not exist.
    """
    found = _pages().get(name)
    if found is None:
        raise ApiProblem(404, f"there is no file {name!r}")
    return found


def is_known(page: Page, fields: HeaderFields) -> bool:
    """Return whether the client has this version of the file (`If-None-Match`)."""
    known = fields.get(b"if-none-match", b"")
    return page.tag in known or known.strip() == b"*"


@cache
def _pages() -> dict[str, Page]:
    folder = resources.files("headgate_server").joinpath("static")
    return {file.name: _page(file.name, file.read_bytes()) for file in folder.iterdir() if file.is_file()}


def _page(name: str, content: bytes) -> Page:
    tag = b'"%b"' % sha256(content).hexdigest()[:32].encode()
    fields = (
        (b"content-type", _TYPES.get(name.rpartition(".")[2], b"application/octet-stream")),
        (b"cache-control", b"no-cache"),  # revalidate, so that a new page does not run an old script
        (b"etag", tag),
        *SECURITY,
    )
    return Page(content, tag, fields)
