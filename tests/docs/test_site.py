"""Build the documentation site and check it: links, anchors, public names, the search index, llms.txt.

The build itself is strict: a page outside of the navigation, a dead link and an unknown name are errors.

`python -m tests.docs.test_site` updates the lists of public names. A new module needs a section in
docs/reference/api.md, and a line `::: module` on a page in docs/reference/api.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
API = DOCS / "reference" / "api.md"
PACKAGES = {"headgate": ROOT / "src", "headgate_server": ROOT / "server"}
INTERNAL = {
    "headgate.testing.contract",  # its names are those of headgate.testing
    "headgate_server.cli",  # documented as a command
}
"""Modules that have an `__all__` without being public."""


class Page(HTMLParser):
    """The links, the loaded files and the anchors of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "link", "img", "source", "iframe") and values.get("rel") != "canonical":
            self.loaded += [link for link in (values.get("href"), values.get("src")) if link]
        self.anchors |= {name for name in (values.get("id"), values.get("name")) if name}
        self.links += [link for link in (values.get("href"), values.get("src")) if link]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> dict[str, Page]:
    """The pages of the site by their paths; files that are not pages have neither links nor anchors."""
    return {
        path.relative_to(folder).as_posix(): Page(path.read_text("utf-8") if path.suffix == ".html" else "")
        for path in folder.rglob("*")
        if path.is_file()
    }


def dead_links(site: dict[str, Page]) -> Iterator[str]:
    """Yield the dead links within a site."""
    for name, page in site.items():
        for link in page.links:
            target = urlsplit(urljoin(name, link))
            path = unquote(target.path) or name
            if target.scheme or target.netloc or name == "404.html":  # 404.html is served at any address
                continue
            anchor = unquote(target.fragment)
            if path not in site or (anchor and anchor not in site[path].anchors):
                yield f"{name}: {link}"


def test_every_link_and_anchor_exists(site: dict[str, Page]) -> None:
    assert sorted(set(dead_links(site))) == []


@pytest.mark.parametrize(
    ("link", "is_dead"),
    [
        ("b.html", False),
        ("../a.html#top", False),
        ("b.html#here", False),
        ("b.html#there", True),
        ("c.html", True),
        ("#top", False),
        ("#bottom", True),
        ("https://example.org/c.html#bottom", False),
    ],
)
def test_dead_links_are_detected(link: str, is_dead: bool) -> None:
    site = {"a.html": Page('<h1 id="top">'), "x/b.html": Page('<a id="here">')}
    site["x/a.html"] = Page(f'<h1 id="top"><a href="{link}">')
    assert bool(list(dead_links(site))) is is_dead


def test_a_site_on_disk_loads_nothing_from_the_network(site: dict[str, Page]) -> None:
    loaded = {link for page in site.values() for link in page.loaded}
    assert [link for link in loaded if urlsplit(link).netloc] == []


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("monthly", "how-to/calendar-quotas.html"),
        ("semaphore", "how-to/in-flight.html"),
        ("fail open", "how-to/when-the-store-is-down.html"),
    ],
)
def test_search_finds_pages_by_common_terms(folder: Path, words: str, page: str) -> None:
    """The index is a script, because pages opened from disk cannot fetch files."""
    script = (folder / "search" / "search_index.js").read_text("utf-8")
    sections = json.loads(script.removeprefix("var __index = "))["docs"]
    found = [section["location"].split("#")[0] for section in sections if words in section["text"].lower()]
    assert page in found


def test_logo_is_the_same_as_in_the_dashboard() -> None:
    dashboard = ROOT / "server" / "headgate_server" / "static" / "favicon.svg"
    assert (DOCS / "images" / "logo.svg").read_bytes() == dashboard.read_bytes()


def test_the_reference_begins_with_limiters_decisions_and_rules() -> None:
    names = re.findall(
        r"^::: headgate\.(\w+)", (DOCS / "reference/api/headgate.md").read_text("utf-8"), re.MULTILINE
    )
    assert names[:4] == ["Limiter", "AsyncLimiter", "Decision", "RuleResult"]
    assert names[4:11] == [
        *(
            "sliding_window",
            "token_bucket",
            "fixed_window",
            "sliding_log",
            "concurrent",
            "calendar",
            "penalty",
        )
    ]


def test_internal_methods_are_not_in_the_reference(site: dict[str, Page]) -> None:
    shown = {
        anchor for anchor in site["reference/api/headgate.html"].anchors if anchor.startswith("headgate.")
    }
    internal = {"current", "in_memory", "make", "on_change", "request", "settling", "terms_for"}
    assert {"headgate.Limiter.hit", "headgate.AsyncLimiter.hold", "headgate.Decision.allowed"} <= shown
    assert [name for name in shown if name.rpartition(".")[2] in internal] == []


def public_names() -> dict[str, list[str]]:
    """Return the `__all__` of every public module, by the module's name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((folder / package).rglob("*.py")):
            module = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    found[module] = ast.literal_eval(node.value)
    assert set(found) >= INTERNAL
    return {module: names for module, names in found.items() if module not in INTERNAL}


def listed_names() -> dict[str, dict[str, str]]:
    """Return the names on the page of public names and their link targets, by module."""
    _, *parts = re.split(r"^## `(.+)`$", API.read_text("utf-8"), flags=re.MULTILINE)
    return {
        module: dict(re.findall(r"\[`(\w+)`\]\[([\w.]+)\]", body))
        for module, body in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_public_name_is_listed_and_nothing_else() -> None:
    assert {module: list(names) for module, names in listed_names().items()} == public_names()


def test_every_public_name_has_documentation(site: dict[str, Page]) -> None:
    """Only names with a docstring get an anchor."""
    anchors = {
        anchor for name, page in site.items() if name.startswith("reference/api/") for anchor in page.anchors
    }
    targets = {target for names in listed_names().values() for target in names.values()}
    assert sorted(targets - anchors) == []


def examples() -> Iterator[str]:
    """Yield the Python examples of all pages."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        yield from re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_examples_import_public_names_only() -> None:
    public = public_names()
    private = {
        f"{node.module}.{alias.name}"
        for example in examples()
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in PACKAGES
        for alias in node.names
        if alias.name not in public.get(str(node.module), ())
    }
    assert private == set()


def with_lists(text: str) -> str:
    """Return the page of public names with an updated list of each module; existing link targets are kept."""
    public, listed = public_names(), listed_names()

    def list_of(section: re.Match[str]) -> str:
        module = section[2]
        names = [f"[`{name}`][{listed[module].get(name, f'{module}.{name}')}]" for name in public[module]]
        return section[1] + ",\n".join(names) + ".\n"

    return re.sub(r"(^## `(.+)`\n\n.+\n\n)\[`(?:.+\n)+", list_of, text, flags=re.MULTILINE)


def pages_in(navigation: list[Any]) -> Iterator[str]:
    """Yield the pages of a part of the navigation, in order."""
    for entry in navigation:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values():
                yield from pages_in(part)


def test_tests_that_pages_name_exist() -> None:
    named = {
        name for page in DOCS.rglob("*.md") for name in re.findall(r"`(test_\w+)`", page.read_text("utf-8"))
    }
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert sorted(named.difference(re.findall(r"def (test_\w+)", tests))) == []


def test_llms_txt_lists_the_pages_of_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    pages = [page.replace(".md", ".html") for page in pages_in(navigation)]
    listed = re.findall(r"^- \[.+?\]\(([^)]+)\)", (DOCS / "llms.txt").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page for page in pages if page not in ("index.html", "changelog.html"))


if __name__ == "__main__":
    API.write_text(with_lists(API.read_text("utf-8")), "utf-8")
