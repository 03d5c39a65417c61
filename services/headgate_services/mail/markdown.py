"""Convert the Markdown body of an e-mail to its HTML part.

markdown-it-py follows CommonMark, is safe for untrusted text (HTML is escaped, `javascript:` links are dropped) and is pure
Python. Some texts take much longer than others of the same length, so the CPU time is limited. So is the length of link
targets and titles, which are repeated for every reference to them. A body beyond the limits is sent as text only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

MOST_CHARACTERS = 200_000
MOST_LINK_CHARACTERS = 1_000_000
CPU_SECONDS = 1.0


class _TooExpensive(Exception):
    """The conversion takes too long."""


def to_html(markdown: str) -> str | None:
    """Return a body as HTML; `None` if it is blank or exceeds the limits of this module."""
    if len(markdown) > MOST_CHARACTERS:
        return None
    try:
        tokens = _MARKDOWN.parse(markdown, {"deadline": time.thread_time() + CPU_SECONDS})
    except _TooExpensive:
        return None
    if _link_characters(tokens) > MOST_LINK_CHARACTERS:
        return None
    html: str = _MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {})
    return html or None


def _link_characters(tokens: Iterable[Token]) -> int:
    """Return the total length of the targets and titles of links and images."""
    children = (child for token in tokens for child in token.children or ())
    return sum(len(str(value)) for child in children for value in child.attrs.values())


def _check_time(state: StateBlock | StateInline, *position: object) -> bool:
    """Raise if the CPU time is used up; a rule that never matches."""
    if time.thread_time() > state.env["deadline"]:
        raise _TooExpensive
    return False


def _parser() -> MarkdownIt:
    # Line breaks are kept, because people expect that of addresses and signatures.
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    everywhere = ["paragraph", "reference", "blockquote", "list", "table"]
    parser.block.ruler.before("table", "time", _check_time, {"alt": everywhere})
    parser.inline.ruler.after("text", "time", _check_time)  # not for plain text, which is fast
    return parser


_MARKDOWN = _parser()
