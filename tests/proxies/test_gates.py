"""Real Caddy and Traefik ask the gate, with the configurations of `docs/how-to/proxies.md`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.proxies.behaviour import ProxyBehaviour
from tests.proxies.programs import LIMIT, TOKEN, TOKENS, Ports, block

PROGRAMS = Path(sys.executable).parent


def gate_policy() -> str:
    """Return the policy of the documentation with the limit of these tests."""
    return block("proxies.md", "toml", "[gate]").replace("20/minute", f"{LIMIT}/minute")


def caddy_command(folder: Path, ports: Ports) -> Sequence[str]:
    """Write the configuration, and return the command."""
    config = folder / "Caddyfile"
    text = ports.put_into(block("proxies.md", "caddyfile"))
    text = text.replace("# header_up Headgate-Token TOKEN", f"header_up Headgate-Token {TOKEN}")
    config.write_text("{\n\tadmin off\n\tauto_https off\n\tpersist_config off\n}\n" + text)
    return [str(PROGRAMS / "caddy"), "run", "--config", str(config), "--adapter", "caddyfile"]


def traefik_command(folder: Path, ports: Ports) -> Sequence[str]:
    """Write the configuration, and return the command."""
    config = folder / "routes.yaml"  # "traefik.yaml" would be read as the static configuration
    config.write_text(ports.put_into(block("proxies.md", "yaml", "forwardAuth")))
    return [
        str(PROGRAMS / "traefik"),
        f"--entrypoints.web.address=127.0.0.1:{ports.proxy}",
        f"--providers.file.filename={config}",
        "--global.checknewversion=false",
        "--global.sendanonymoususage=false",
    ]


def policy_with_token() -> str:
    """Return the policy with a token that the proxy must send."""
    return gate_policy() + TOKENS


class TestCaddy(ProxyBehaviour):
    down = 502
    hanging = 504

    policy = staticmethod(policy_with_token)
    command = staticmethod(caddy_command)


class TestTraefik(ProxyBehaviour):
    down = 500
    hanging = None  # 30 s
    shows_admitted = False

    policy = staticmethod(gate_policy)
    command = staticmethod(traefik_command)
