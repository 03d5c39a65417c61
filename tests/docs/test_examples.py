"""Run the examples of README.md, CONTRIBUTING.md and docs/: every fenced block marked `python` or `pycon`.

The blocks of a file run in order, in an empty folder, and share one namespace. `await` works at the top level, as in
`python -m asyncio`; a `pycon` block must print the output shown. Blocks in other languages are not run, nor is a block after
a line `<!-- not run: the reason -->`. A block after `<!-- needs: module -->` runs only if the module is installed; the extra
`bench` installs other limiters.

We do not use a plugin, because this short code combines top-level `await` in one event loop per page, a required reason for
skipping a block, and pages outside the folder of the tests.
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import re
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    if path.exists()
)

FENCE = re.compile(
    r"(?P<left_out><!-- not run: \S.*?-->\n+)?"
    r"(?:<!-- needs: (?P<needs>\w+) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>python|pycon)\b.*\n(?P<code>(?:.*\n)*?)(?P=indent)```$",
    re.MULTILINE,
)


class Block(NamedTuple):
    """An example, and the number of the line on which its code starts."""

    language: str
    code: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """Return the examples to run, in order."""
    return [
        Block(match["language"], textwrap.dedent(match["code"]), text.count("\n", 0, match.start("code")) + 1)
        for match in FENCE.finditer(text)
        if not match["left_out"] and (match["needs"] is None or find_spec(match["needs"]))
    ]


def run(block: Block, page: str, namespace: dict[str, Any], loop: asyncio.Runner) -> None:
    """Run one example; its exceptions name the page and the line."""
    if block.language == "pycon":
        test = doctest.DocTestParser().get_doctest(block.code, namespace, page, page, block.line - 1)
        doctest.DebugRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False)
        namespace.update(test.globs)
        return
    source = "\n" * (block.line - 1) + block.code
    outcome = eval(compile(source, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)
    if inspect.iscoroutine(outcome):
        loop.run(outcome)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as loop:
        for block in blocks_of(page.read_text(encoding="utf-8")):
            run(block, str(page), namespace, loop)


EXAMPLE = """
```python
x = 1
```
<!-- not run: needs a server -->
```python
x = 2
```
1. In a list:
   ```python
   import asyncio
   await asyncio.sleep(0)
   x += 10
   ```
```console
$ x
```
```pycon
>>> x
11
```
"""


def test_blocks_are_found_with_their_line_numbers() -> None:
    blocks = blocks_of(EXAMPLE)
    assert [(block.language, block.line) for block in blocks] == [
        ("python", 3),
        ("python", 11),
        ("pycon", 19),
    ]


def test_blocks_share_a_namespace_and_await() -> None:
    namespace: dict[str, Any] = {}
    with asyncio.Runner() as loop:
        for block in blocks_of(EXAMPLE):
            run(block, "page.md", namespace, loop)
    assert namespace["x"] == 11


@pytest.mark.parametrize("code", ["```python\nassert False\n```", "```pycon\n>>> 1 + 1\n3\n```"])
def test_a_wrong_example_fails(code: str) -> None:
    [block] = blocks_of(code)
    with asyncio.Runner() as loop, pytest.raises((AssertionError, doctest.DocTestFailure)):
        run(block, "page.md", {}, loop)


def test_skipping_a_block_needs_a_reason() -> None:
    assert len(blocks_of("<!-- not run: -->\n```python\n1\n```")) == 1


def test_block_is_skipped_if_its_module_is_missing() -> None:
    code = "<!-- needs: {} -->\n```python\n1\n```"
    assert [len(blocks_of(code.format(module))) for module in ("headgate", "no_such_module")] == [1, 0]
