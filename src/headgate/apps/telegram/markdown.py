"""From the Markdown that handlers write to the HTML that Telegram reads.

https://core.telegram.org/bots/api#html-style knows a handful of tags. Text without markup comes out as it went in, except
that &, < and > are escaped. Markup that crosses other markup comes out crossed: Telegram refuses it, and the message is
then sent as plain text.
"""

from __future__ import annotations

import html
import re

_CODE = re.compile(r"```(?:[\w+-]*\n)?(?P<block>.+?)```|`(?P<inline>[^`\n]+)`", re.DOTALL)
_LINK = re.compile(r"\[([^\]\n]+)\]\((https?://[^\s()]+)\)")
# A marker opens before and closes after something that is not a space, and italics do not begin or end inside a word:
# "2 * 3 * 4" and "snake_case_name" are plain text.
_STYLES = [
    (re.compile(r"\*\*(?=\S)(.+?)(?<=\S)\*\*"), "b"),
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
    if match["block"] is not None:
        return f"<pre>{_escaped(match['block'])}</pre>"
    return f"<code>{_escaped(match['inline'])}</code>"


def _styled(text: str) -> str:
    """Return the links of a text as links, and the rest in its styles."""
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
