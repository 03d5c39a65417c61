"""A real nginx asks the gate, with the configuration of `docs/how-to/proxies.md`; `tools/test_nginx.sh` runs this file."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.proxies.behaviour import ProxyBehaviour
from tests.proxies.programs import LIMIT, Ports, Setting, block, setting
from tests.proxies.test_gates import gate_policy

FILES = "client_body_temp_path {0}; proxy_temp_path {0}; fastcgi_temp_path {0}; uwsgi_temp_path {0}; scgi_temp_path {0};"
WHOLE = """
daemon off; pid {folder}/nginx.pid; error_log stderr; worker_processes 2;
events {{ worker_connections 256; }}
http {{ access_log off; {files} {servers} }}
"""


def nginx_command(folder: Path, ports: Ports, servers: str | None = None) -> Sequence[str]:
    """Write the configuration, and return the command."""
    servers = block("proxies.md", "nginx") if servers is None else servers
    # The documentation leaves the `deny` to its reader.
    denied = "    location /denied {\n        deny all;\n"
    inside = servers.partition("    location / {\n")[2].partition("    }\n")[0]
    servers = servers.replace(
        "    location = /_headgate", f"{denied}{inside}    }}\n\n    location = /_headgate"
    )
    config = folder / "nginx.conf"
    files = FILES.format(folder / "temp")
    config.write_text(WHOLE.format(folder=folder, files=files, servers=ports.put_into(servers)))
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    assert program is not None, "nginx is not installed"
    return [program, "-p", str(folder), "-c", str(config), "-e", "stderr"]


class TestNginx(ProxyBehaviour):
    down = 500
    hanging = 500

    policy = staticmethod(gate_policy)
    command = staticmethod(nginx_command)

    def test_own_refusals_of_nginx_stay_403(self, proxy: Setting) -> None:
        for _ in range(2):
            answer = proxy.get("denied", "/denied")
            assert answer.status_code == 403
            assert "retry-after" not in answer.headers
            assert answer.text != "the application"
        proxy.statuses("denied", LIMIT + 1)
        assert proxy.get("denied", "/forbidden").status_code == 429


def test_documented_lines_admit_while_the_server_is_down(tmp_path: Path) -> None:
    page = block("proxies.md", "nginx")
    more = "        error_page 502 504 = @headgate_down;\n"
    down = "    location @headgate_down { return 204; }\n"
    page = page.replace("        internal;\n", f"        internal;\n{more}").replace(
        "    location @limited", f"{down}\n    location @limited"
    )

    def write(folder: Path, ports: Ports) -> Sequence[str]:
        return nginx_command(folder, ports, page)

    with setting(tmp_path, gate_policy(), write) as proxy:
        assert proxy.statuses("a", LIMIT + 1) == {200: LIMIT, 429: 1}
        proxy.headgate.kill()
        assert proxy.get("a").status_code == 200
        proxy.headgate.start()
        assert proxy.get("a").status_code == 429
