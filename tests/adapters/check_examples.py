"""The examples for models and agents, in examples/ and on their pages, with the real packages: tools/test_adapters.sh."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, MCPError, StdioServerParameters

from tests.docs.test_examples import blocks_of, run
from tests.unit.llm.provider import serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("llm_openai", "5 answers, "),
        ("llm_anthropic", " tokens"),
        ("llm_pydantic_ai", " tokens"),
        ("llm_langchain", "12 answers"),
        ("llm_litellm", " tokens"),
    ],
)
def test_example_of_a_client_runs(name: str, printed: str, tmp_path: Path) -> None:
    with serving() as (provider, url):
        own = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "ANTHROPIC_BASE_URL": url,
            "OPENAI_API_KEY": "k",
            "ANTHROPIC_API_KEY": "k",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        program = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
        done = subprocess.run(
            program, env={**os.environ, **own}, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert printed in done.stdout
        assert provider.statuses[429] == 0


@pytest.mark.parametrize("name", ["mcp_server", "fastmcp_server"])
async def test_example_of_a_server_runs(name: str, tmp_path: Path) -> None:
    server = StdioServerParameters(
        command=sys.executable, args=[str(ROOT / "examples" / f"{name}.py")], cwd=tmp_path
    )
    async with Client(server) as client:
        for _ in range(2):
            await client.call_tool("add", {"a": 1, "b": 2})
        with pytest.raises(MCPError, match="Too many calls of add"):
            await client.call_tool("add", {"a": 1, "b": 2})


@pytest.mark.parametrize("page", ["mcp.md", "llm.md"])
def test_examples_of_the_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = ROOT / "docs" / "how-to" / page
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as loop:
        for block in blocks_of(path.read_text(encoding="utf-8")):
            run(block, str(path), namespace, loop)
