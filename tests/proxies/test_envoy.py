"""A real Envoy asks the rate-limit service, with the configuration of `docs/how-to/envoy.md`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.proxies.behaviour import ProxyBehaviour
from tests.proxies.programs import LIMIT, TOKEN, TOKENS, Ports, block, setting, wait_until


def envoy_command(folder: Path, ports: Ports) -> Sequence[str]:
    """Write the configuration, and return the command."""
    config = folder / "envoy.yaml"
    config.write_text(ports.put_into(block("envoy.md", "yaml", "static_resources")))
    package = find_spec("envoy")
    assert package is not None
    assert package.submodule_search_locations is not None
    program = Path(package.submodule_search_locations[0]) / "_bin" / "envoy"
    options = ("--disable-hot-restart", "--concurrency", "2", "--log-level", "warning")
    return [str(program), "--config-path", str(config), *options]


def envoy_policy() -> str:
    """Return the policy of the documentation, without a limit of the address that all these tests share."""
    return block("envoy.md", "toml", "[limiters.edge]").replace("20/minute", "100000/minute")


class TestEnvoy(ProxyBehaviour):
    down = 200  # failure_mode_deny: false
    hanging = 200

    policy = staticmethod(envoy_policy)
    command = staticmethod(envoy_command)


def test_units_that_are_known_after_the_response_are_recorded(tmp_path: Path) -> None:
    def write(folder: Path, ports: Ports) -> Sequence[str]:
        command = envoy_command(folder, ports)
        config = folder / "envoy.yaml"
        before, route, after = config.read_text().partition(
            '                        - match: { prefix: "/" }\n'
        )
        clusters = after[after.index("                http_filters:") :]
        only_cluster = "                          route: { cluster: app }\n"
        config.write_text(before + route + only_cluster + block("envoy.md", "yaml", "tokens_used") + clusters)
        return command

    policy = block("envoy.md", "toml", "tokens_used").replace("100000/hour", f"{LIMIT}/hour")
    policy += "\n[envoy]\n" if "[envoy]" not in policy else ""
    with setting(tmp_path, policy.replace("domains.api]", 'domains.edge]\nlimiter = "api"'), write) as proxy:
        found = []

        def is_refused() -> bool:
            found.append(proxy.get("a").status_code)
            return found[-1] == 429

        # The report follows the response, so the number of admitted requests is not exact; three of them use 12 of 10.
        wait_until(is_refused)
        assert 3 <= found.count(200) < LIMIT
        assert proxy.get("b").status_code == 200


def test_refusals_cost_nothing_and_failure_mode_deny_refuses(tmp_path: Path) -> None:
    def write(folder: Path, ports: Ports) -> Sequence[str]:
        command = envoy_command(folder, ports)
        config = folder / "envoy.yaml"
        asked = "envoy_grpc: { cluster_name: headgate }"
        with_token = f"{asked}\n{' ' * 26}initial_metadata: [{{ key: headgate-token, value: {TOKEN} }}]"
        text = config.read_text().replace("failure_mode_deny: false", "failure_mode_deny: true")
        config.write_text(text.replace(asked, with_token))
        return command

    policy = (
        block("envoy.md", "toml", "[limiters.edge]").replace("20/minute", f"{2 * LIMIT + 1}/minute") + TOKENS
    )
    with setting(tmp_path, policy, write) as proxy:
        assert proxy.statuses("a", 4 * LIMIT, at_once=8) == {200: LIMIT, 429: 3 * LIMIT}
        # 3 * LIMIT refusals of the user have not used up the limit of the address (one unit was for the start).
        assert proxy.statuses("b", LIMIT + 1) == {200: LIMIT, 429: 1}
        assert proxy.statuses("c", 1) == {429: 1}
        proxy.headgate.kill()
        assert proxy.get("a").status_code == 500
        proxy.headgate.start()
