"""Convert the Markdown of replies to Telegram's HTML.

https://core.telegram.org/bots/api#html-style has only a few tags. Text without markup is unchanged, except that &, < and >
are escaped. Overlapping markup gives overlapping tags, which Telegram refuses; the message is then sent as plain text.
"""

from __future__ import annotations

import html
import re

_CODE = re.compile(
    r"```(?:(?P<language>[\w+#.-]*)\n)?(?P<block>.+?)```|`(?P<inline>[^`\n]+)`"
    r"|(?P<table>(?:^[ \t]*\|[^\n]*\|[ \t]*(?:\n|\Z)){2,})",
    re.DOTALL | re.MULTILINE,
)
_RULE = re.compile(r"\s*:?-+:?\s*")
# A URL may contain (brackets).
_LINK = re.compile(r"\[([^\]\n]+)\]\((https?://(?:[^\s()]|\([^\s()]*\))+)\)")
# Markers must touch the text that they enclose, and italics do not begin or end inside a word: "2 * 3 * 4" and
# "snake_case_name" are plain text.
_STYLES = [
    (re.compile(r"\*\*(?=\S)((?:.|\n(?!\s*\n))+?)(?<=\S)\*\*"), "b"),  # within one paragraph
    (re.compile(r"(?<!\w)__(?=\S)(.+?)(?<=\S)__(?!\w)"), "b"),
    (re.compile(r"~~(?=\S)(.+?)(?<=\S)~~"), "s"),
    (re.compile(r"(?<![\w*])\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?![\w*])"), "i"),
    (re.compile(r"(?<!\w)_(?=[^\s_])(.+?)(?<=[^\s_])_(?!\w)"), "i"),
]


def to_html(text: str) -> str:
    """Return the text in Telegram's HTML."""
    parts: list[str] = []
    end = 0
    for code in _CODE.finditer(text):
        parts += _styled(text[end : code.start()]), _code(code)
        end = code.end()
    return "".join((*parts, _styled(text[end:])))


def _code(match: re.Match[str]) -> str:
    if match["table"] is not None:
        return _table(match["table"])
    if match["block"] is not None:
        block, language = _escaped(match["block"]), match["language"]
        if language:
            return f'<pre><code class="language-{html.escape(language)}">{block}</code></pre>'
        return f"<pre>{block}</pre>"
    return f"<code>{_escaped(match['inline'])}</code>"


def _table(text: str) -> str:
    """Return a table as preformatted text with aligned columns; other text is returned with its styles."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    if not all(map(_RULE.fullmatch, rows[1])) or len({len(row) for row in rows}) > 1:
        return _styled(text)
    del rows[1]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    return f"<pre>{_escaped(chr(10).join(lines))}</pre>" + ("\n" if text.endswith("\n") else "")


def _styled(text: str) -> str:
    """Convert links and styles."""
    parts: list[str] = []
    end = 0
    for link in _LINK.finditer(text):
        label, url = link.groups()
        parts += (
            _emphasised(text[end : link.start()]),
            f'<a href="{html.escape(url)}">{_emphasised(label)}</a>',
        )
        end = link.end()
    return "".join((*parts, _emphasised(text[end:])))


def _emphasised(text: str) -> str:
    text = _escaped(text)
    for pattern, tag in _STYLES:
        text = pattern.sub(rf"<{tag}>\1</{tag}>", text)
    return text


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)  # quotes and apostrophes stay as they are
