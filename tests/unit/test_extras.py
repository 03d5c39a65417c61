"""Messages for an extra that is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
__import__(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [
        ("redis", "headgate.stores.redis", "redis"),
        ("psycopg", "headgate.stores.postgres", "postgres"),
        ("fastapi", "headgate.http.fastapi", "fastapi"),
        ("httpx", "headgate.client", "client"),
        ("httpx", "headgate.stores.kv.cloudflare", "cloudflare"),
        ("redis", "headgate.stores.kv.redis", "redis"),
        ("prometheus_client", "headgate.observe.prometheus", "prometheus"),
    ],
)
def test_import_error_names_the_extra_to_install(package: str, module: str, extra: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, module], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert f"{module} needs the package '{package}" in last
    assert last.endswith(f"pip install 'headgate[{extra}]'")
