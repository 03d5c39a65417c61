"""From Markdown to Telegram's HTML."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_services.telegram.markdown import to_html
from headgate_services.telegram.webhook import REFUSAL
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
        ("```\nif a < b:\n    pass\n```", "<pre>if a &lt; b:\n    pass\n</pre>"),
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
        ("**two\nlines**", "<b>two\nlines</b>"),
        ("**not over\n\nparagraphs**", "**not over\n\nparagraphs**"),
        (
            "[wiki](https://en.wikipedia.org/wiki/Gate_(disambiguation))",
            '<a href="https://en.wikipedia.org/wiki/Gate_(disambiguation)">wiki</a>',
        ),
        ("```python\nx = 1 < 2\n```", '<pre><code class="language-python">x = 1 &lt; 2\n</code></pre>'),
        ("```c++\nx\n```", '<pre><code class="language-c++">x\n</code></pre>'),
        (
            "Look:\n| a | long |\n|---|:---:|\n| 1 | <2> |\nDone",
            "Look:\n<pre>a  long\n-  ----\n1  &lt;2&gt;</pre>\nDone",
        ),
        ("| a | b |\n| 1 | 2 |", "| a | b |\n| 1 | 2 |"),
        ("a | b or c | d", "a | b or c | d"),
        ("| a\n**b** |", "| a\n<b>b</b> |"),
    ],
)
def test_markup(markdown: str, html: str) -> None:
    assert to_html(markdown) == html


@given(st.text(st.characters(exclude_characters="*_~`[|", exclude_categories=["Cs"])))
def test_text_without_markup_is_read_as_it_was_written(text: str) -> None:
    assert plain_text(to_html(text)) == text
