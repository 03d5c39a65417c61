"""The HTML part of an e-mail, made from its Markdown body.

markdown-it-py does it: it follows CommonMark to the letter, is safe for text of others (HTML in it is shown, not used;
`javascript:` links are dropped), and needs no compiler.
"""

from __future__ import annotations

from markdown_it import MarkdownIt

# A line break in the text is one in the HTML: people who write plain text expect that of an address or a signature.
_MARKDOWN = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])


def to_html(markdown: str) -> str | None:
    """Return a body as HTML; `None` for one without text."""
    html: str = _MARKDOWN.render(markdown)
    return html or None
