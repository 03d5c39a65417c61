"""README.md: its length, its examples, its figures, and its links, in the repository and on a package index."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.readme import README, SCALE, with_figures
from hatch_build import portable
from tests.docs.test_examples import blocks_of

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r'(?:\]\(|src(?:set)?=")(?!https?:|#)([^)"#]+)')
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md"]
"""Pages outside of the site."""


@pytest.mark.parametrize("page", PAGES)
def test_link_targets_exist(page: str) -> None:
    path = ROOT / page
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("page", [README, SCALE], ids=lambda path: path.name)
def test_figures_match_the_benchmark_results(page: Path) -> None:
    """To update the figures: `python -m benchmarks.readme`."""
    assert with_figures(page) == page.read_text(encoding="utf-8")


def test_readme_has_at_most_500_words() -> None:
    """Words of code and tables are not counted."""
    text = README.read_text(encoding="utf-8")
    prose = re.sub(
        r"^```.*?^```$|^\|[^\n]*$|<picture>.*?</picture>|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL
    )
    assert len(re.sub(r"\]\([^)]*\)", "]", prose).split()) <= 500


def examples() -> list[dict[str, Any]]:
    """Return the namespaces of the examples, run one by one."""
    namespaces = []
    for block in blocks_of(README.read_text(encoding="utf-8")):
        namespaces.append(namespace := dict[str, Any]())
        exec(compile(block.code, "README.md", "exec"), namespace)
    return namespaces


async def test_examples_behave_as_documented(
    capsys: pytest.CaptureFixture[str], headgate_limits: object
) -> None:
    _, web, model = examples()
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["True 1 None", "True 0 None"]
    assert re.fullmatch(r"False 0 6[01]\.\d+|False 0 60", printed[2])

    web["app"].add_api_route("/", lambda: "hello")
    transport = httpx.ASGITransport(web["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        *admitted, refused = [await client.get("/") for _ in range(101)]
    assert {response.status_code for response in admitted} == {200}
    assert all("ratelimit" in response.headers for response in [*admitted, refused])
    assert refused.status_code == 429
    assert "retry-after" in refused.headers

    async def call_model(prompt: str) -> SimpleNamespace:
        return SimpleNamespace(tokens=312, text=prompt)

    model["call_model"] = call_model
    assert await model["ask"]("hello") == "hello"
    left = await model["model"].check("gpt", 0)
    assert [result.remaining for result in left.results] == [59, 20_000 - 312]


EXAMPLE = """See [how](docs/how.md), [below](#below), [it](https://example.org).
![A chart](chart.svg)
<picture><img alt="x" src="a.png"></picture>
"""


def test_without_repository_links_become_text_and_pictures_are_removed() -> None:
    assert portable(EXAMPLE, None) == "See how, [below](#below), [it](https://example.org).\n"


def test_with_repository_all_links_point_to_it() -> None:
    assert portable(EXAMPLE, "https://example.org/x") == (
        "See [how](https://example.org/x/blob/main/docs/how.md), [below](#below), [it](https://example.org).\n"
        "![A chart](https://example.org/x/raw/main/chart.svg)\n"
        '<picture><img alt="x" src="https://example.org/x/raw/main/a.png"></picture>\n'
    )
