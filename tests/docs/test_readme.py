"""README.md: its figures are those that were measured, its links lead somewhere, here and on a package index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.readme import README, with_figures
from hatch_build import portable

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r'(?:\]\(|src(?:set)?=")(?!https?:|#)([^)"#]+)')
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md"]
"""Pages outside of the site."""


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_figures_are_those_of_the_results() -> None:
    """If not: `python -m benchmarks.readme`."""
    text = README.read_text(encoding="utf-8")
    assert with_figures(text) == text


EXAMPLE = """See [how](docs/how.md), [below](#below), [it](https://example.org).
![A chart](chart.svg)
<picture><img alt="x" src="a.png"></picture>
"""


def test_without_a_repository_links_are_text_and_pictures_are_left_out() -> None:
    assert portable(EXAMPLE, None) == "See how, [below](#below), [it](https://example.org).\n"


def test_with_a_repository_everything_leads_there() -> None:
    assert portable(EXAMPLE, "https://example.org/x") == (
        "See [how](https://example.org/x/blob/main/docs/how.md), [below](#below), [it](https://example.org).\n"
        "![A chart](https://example.org/x/raw/main/chart.svg)\n"
        '<picture><img alt="x" src="https://example.org/x/raw/main/a.png"></picture>\n'
    )
