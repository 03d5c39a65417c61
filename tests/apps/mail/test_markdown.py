"""The HTML part, made from the Markdown body."""

from __future__ import annotations

import pytest

from headgate_services.mail import markdown
from headgate_services.mail.markdown import to_html
from tests.apps.mail.conftest import Start


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("Hi", "<p>Hi</p>\n"),
        (
            "# Title\n\n**bold** and *italic*",
            "<h1>Title</h1>\n<p><strong>bold</strong> and <em>italic</em></p>\n",
        ),
        ("Ann\nBob", "<p>Ann<br />\nBob</p>\n"),
        ("- one\n- two", "<ul>\n<li>one</li>\n<li>two</li>\n</ul>\n"),
        ("[a](https://example.com)", '<p><a href="https://example.com">a</a></p>\n'),
        ("<script>x</script>", "<p>&lt;script&gt;x&lt;/script&gt;</p>\n"),
        ("[a](javascript:x)", "<p>[a](javascript:x)</p>\n"),
        ("~~old~~", "<p><s>old</s></p>\n"),
        ("", None),
        (" \n", None),
    ],
)
def test_markdown_becomes_html(text: str, html: str | None) -> None:
    assert to_html(text) == html


EXPENSIVE = {
    "too long": "a" * 200_001,
    "brackets": "[" * 200_000,
    "quadratic quotes": ">```\na\n" * 20_000,
    "wide tables": ("|" + "a|" * 181 + "\n|" + "-|" * 181 + "\n" + "x\n" * 362 + "\n") * 100,
    "link targets": "[a]: /" + "x" * 5000 + "\n\n" + "[a]" * 1000,
    "link titles": "[a]: / '" + "x" * 5000 + "'\n\n" + "![a]" * 1000,
}
"""Bodies whose conversion takes seconds, or whose HTML has megabytes."""


@pytest.mark.parametrize("name", EXPENSIVE)
def test_a_body_that_is_expensive_to_convert_has_no_html(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "CPU_SECONDS", 0.1)
    assert to_html(EXPENSIVE[name]) is None


@pytest.mark.parametrize("text", ["a\n\nb", "*a*", "> a", "- a"])
def test_the_conversion_ends_when_its_time_is_over(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "CPU_SECONDS", -1.0)
    assert to_html(text) is None


def test_long_texts_tables_and_references_become_html() -> None:
    long = to_html("Some *words* in a line of a long letter.\n" * 500)
    table = to_html("| a | b | c | d |\n| - | - | - | - |\n" + "| 1 | 2 | 3 | 4 |\n" * 100)
    links = to_html("[a]: https://example.com/a/page\n\n" + "[a]\n" * 500)
    assert long is not None
    assert long.endswith("<em>words</em> in a line of a long letter.</p>\n")
    assert table is not None
    assert table.count("<tr>") == 101
    assert links is not None
    assert links.count("<a href=") == 500


async def test_an_email_has_its_body_as_html_unless_it_brings_its_own(start: Start) -> None:
    service = await start()
    await service.send(body="**Hi**")
    await service.send(body="**Hi**", html="<b>Hi</b>")
    await service.send(body="")
    parts = [(call["body"], call["html_body"]) for call in service.provider.calls]
    assert parts == [("**Hi**", "<p><strong>Hi</strong></p>\n"), ("**Hi**", "<b>Hi</b>"), ("", None)]


async def test_metrics_count_sends_and_decisions(start: Start) -> None:
    service = await start(global_send_rate_limit_per_minute=1)
    await service.send_many(2)
    text = (await service.client.get("/metrics")).text
    assert 'mail_messages_total{status="sent"} 1.0' in text
    assert 'mail_messages_total{status="failed"} 0.0' in text
    refused = 'headgate_decisions_total{degraded="false",limiter="mail",outcome="refused",rule="per-minute"}'
    assert f"{refused} 1.0" in text
