"""From Markdown to Telegram's HTML."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.apps.telegram.markdown import to_html
from headgate.apps.telegram.webhook import REFUSAL
from tests.apps.telegram.bot_api_server import plain_text


@pytest.mark.parametrize(
    ("markdown", "html"),
    [
        ("Hello", "Hello"),
        (REFUSAL, REFUSAL),
        ("5 < 6 & 7 > 6", "5 &lt; 6 &amp; 7 &gt; 6"),
        ('it\'s "quoted"', 'it\'s "quoted"'),
        ("**bold** and __bold__", "<b>bold</b> and <b>bold</b>"),
        ("*italic* and _italic_", "<i>italic</i> and <i>italic</i>"),
        ("**bold with *italic* inside**", "<b>bold with <i>italic</i> inside</b>"),
        ("~~gone~~", "<s>gone</s>"),
        ("`a < b`", "<code>a &lt; b</code>"),
        ("`*not italic*`", "<code>*not italic*</code>"),
        ("```python\nif a < b:\n    pass\n```", "<pre>if a &lt; b:\n    pass\n</pre>"),
        ("```x```", "<pre>x</pre>"),
        (
            "[the *docs*](https://example.org/a_b_c?x=1&y=2)",
            '<a href="https://example.org/a_b_c?x=1&amp;y=2">the <i>docs</i></a>',
        ),
        ("[no](javascript:alert)", "[no](javascript:alert)"),
        ("2 * 3 * 4", "2 * 3 * 4"),
        ("snake_case_name and file__init__py", "snake_case_name and file__init__py"),
        ("a ** b ** c", "a ** b ** c"),
        ("*", "*"),
        ("", ""),
    ],
)
def test_markup(markdown: str, html: str) -> None:
    assert to_html(markdown) == html


@given(st.text(st.characters(exclude_characters="*_~`[", exclude_categories=["Cs"])))
def test_text_without_markup_is_read_as_it_was_written(text: str) -> None:
    assert plain_text(to_html(text)) == text
