"""The HTML part, made from the Markdown body."""

from __future__ import annotations

import pytest

from headgate_services.mail.markdown import to_html
from tests.apps.mail.conftest import Start


@pytest.mark.parametrize(
    ("markdown", "html"),
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
def test_markdown_becomes_html(markdown: str, html: str | None) -> None:
    assert to_html(markdown) == html


def test_tables_become_tables() -> None:
    html = to_html("| a | b |\n| - | - |\n| 1 | 2 |")
    assert html is not None
    assert "<table>" in html


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
