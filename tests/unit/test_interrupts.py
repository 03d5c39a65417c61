"""A signal handler may raise where a loop jumps back. Python 3.12 and 3.13 leave that jump out of the `try` or `with` around
it if the loop ends with an `if`, or has its condition in its head; then nothing is released. So no such loop stands there.
"""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

import headgate

SOURCES = Path(headgate.__file__).parent
ONLY_COMPILED = SOURCES / "stores" / "lock.py"

EXAMPLE = """
def release(lock, items):
    with lock:
        for item in items:
            if item:
                item()
"""


def test_no_loop_jumps_back_outside_of_what_releases() -> None:
    files = set(SOURCES.rglob("*.py")) - {ONLY_COMPILED}
    assert len(files) > 100
    assert not [(str(file), line) for file in files for line in jumps_outside(file.read_text())]


@pytest.mark.skipif(sys.version_info[:2] not in ((3, 12), (3, 13)), reason="only these leave the jump out")
def test_a_jump_outside_is_found() -> None:
    assert list(jumps_outside(EXAMPLE)) == [5]


def jumps_outside(source: str) -> Iterator[int]:
    """Yield the lines of loops inside of a `with`, `finally` or `except BaseException` that jump back outside of it."""
    guarded = list(blocks(ast.parse(source)))
    for code in codes(compile(source, "", "exec")):
        table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
        for step in dis.get_instructions(code):
            line = step.positions.lineno if step.positions else None
            if step.opname != "JUMP_BACKWARD" or line is None:
                continue
            is_guarded = any(name == code.co_name and a <= line <= b for name, a, b in guarded)
            if is_guarded and not any(entry.start <= step.offset < entry.end for entry in table):
                yield line


def blocks(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Yield function, first and last line of each block; not of coroutines, whose event loop ends at such an exception."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            is_try = isinstance(node, ast.Try) and (node.finalbody or catches_all(node))
            if is_try or isinstance(node, ast.With):
                body = node.body  # type: ignore[attr-defined]
                yield function.name, body[0].lineno, body[-1].end_lineno


def catches_all(node: ast.Try) -> bool:
    return any(isinstance(h.type, ast.Name) and h.type.id == "BaseException" for h in node.handlers)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)
