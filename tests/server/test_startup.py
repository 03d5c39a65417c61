"""The server as a process, and as several: starting, stopping, being killed, reloading, refusing."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headgate.policy import parse_policy
from headgate.testing.servers import RedisServer, find_free_port
from headgate_server import supervisor
from headgate_server.hosting import listen
from headgate_server.startup import check_address
from headgate_server.supervisor import WorkersFailed, run_workers
from tests.integration.waiting import until
from tests.server.loopback import ServerProcess, is_alive, serving
from tests.server.support import READ_SECONDS, refusal

MEMORY = '[limiters.login]\nrules = ["5/minute"]\n'
SHARED = """
[store]
url = "sqlite:///limits.db"
[limiters.login]
rules = ["50/hour"]
"""
OWN = '[limiters.own]\nrules = ["5/minute"]\nstore = "memory://"\n'


def hit(server: ServerProcess, key: str = "alice") -> bool:
    response = httpx.post(f"{server.url}/v1/limiters/login/hit", json={"key": key}, timeout=READ_SECONDS)
    assert response.status_code == 200, response.text
    return bool(response.json()["allowed"])


def limit(server: ServerProcess) -> int:
    response = httpx.get(f"{server.url}/v1/limiters/login", timeout=READ_SECONDS)
    return int(response.json()["rules"][0]["limit"])


def connect(server: ServerProcess) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=READ_SECONDS)


def request(body: bytes, path: str = "/v1/limiters/login/hit", length: int | None = None) -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (path.encode(), len(body) if length is None else length, body)
    )


def answer(connection: socket.socket) -> bytes:
    """Return one whole answer; the connection stays open."""
    with connection.makefile("rb") as lines:
        head = b"".join(iter(lines.readline, b"\r\n"))
        return head + lines.read(int(head.lower().partition(b"content-length: ")[2].split()[0]))


def everything(connection: socket.socket) -> bytes:
    """Return all that is sent until the connection is closed."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


# One process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_answers_and_stops_with_exit_code_0(tmp_path: Path, number: int) -> None:
    with serving(tmp_path, MEMORY) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert [hit(server) for _ in range(6)] == [True] * 5 + [False]
        assert server.stop(number) == (0, "headgate: stopped\n")
        assert server.log == ""


def test_stop_finishes_requests_and_ends_streams(tmp_path: Path) -> None:
    body = b'{"key": "alice"}'
    with serving(tmp_path, MEMORY) as server:
        with connect(server) as under_way, connect(server) as stream, connect(server) as idle:
            idle.sendall(request(body))
            assert b'"remaining":4' in answer(idle)
            stream.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in stream.recv(65536)
            under_way.sendall(request(body[:5], length=len(body)))
            # The server has begun with it: of two requests on two connections, the later one is answered.
            assert hit(server)
            server.signal(signal.SIGTERM)
            assert everything(stream).endswith(b"0\r\n\r\n")
            assert everything(idle) == b""
            under_way.sendall(body[5:])
            finished = everything(under_way)
        assert b"200 OK" in finished
        assert b'"remaining":2' in finished
        assert server.wait()[0] == 0
        assert server.log == ""


def test_policy_is_reloaded_on_sighup_and_on_file_changes(tmp_path: Path) -> None:
    with serving(tmp_path, MEMORY) as server:
        config = tmp_path / "headgate.toml"
        config.write_text(MEMORY.replace("5/minute", "7/minute"))
        server.signal(signal.SIGHUP)
        until(lambda: limit(server) == 7)
        config.write_text("nonsense")
        until(lambda: "the policy stays as it was" in server.log)
        assert limit(server) == 7
        config.write_text(MEMORY.replace("5/minute", "9/minute"))
        until(lambda: limit(server) == 9)
        assert server.stop()[0] == 0


# Several processes


def test_workers_share_the_port_and_the_counts(tmp_path: Path) -> None:
    with serving(tmp_path, SHARED, workers=2) as server:
        assert len(server.workers) == 2
        with ThreadPoolExecutor(8) as pool:
            admitted = sum(pool.map(lambda _: hit(server), range(80)))
        assert admitted == 50
        until(lambda: totals(server) == {"admitted": 50, "refused": 30, "degraded": 0, "degraded_refused": 0})
        assert tick(server)["workers"] == 2
        assert decisions(server) == {"admitted": 50, "refused": 30}
        pids = server.workers
        assert server.stop()[0] == 0
        assert not [pid for pid in pids if is_alive(pid)]
        assert list(server.temporary.iterdir()) == []
        assert server.log == ""


def tick(server: ServerProcess) -> dict[str, object]:
    """Return the newest tick."""
    with httpx.stream("GET", f"{server.url}/v1/events", timeout=READ_SECONDS) as response:
        for line in response.iter_lines():
            if line.startswith('data: {"time"'):
                return dict(httpx.Response(200, text=line.removeprefix("data: ")).json())
    raise AssertionError("no tick")


def totals(server: ServerProcess) -> object:
    return tick(server)["totals"]["login"]  # type: ignore[index]


def decisions(server: ServerProcess) -> dict[str, int]:
    """Return admissions and refusals as the metrics tell them."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            if sample.name == "headgate_decisions_total":
                found[sample.labels["outcome"]] += int(sample.value)
    return dict(found)


def test_killed_workers_are_replaced_and_their_counts_and_holds_stay(tmp_path: Path) -> None:
    with serving(tmp_path, SHARED, workers=2) as server:
        for _ in range(13):
            hit(server)
        path = f"{server.url}/v1/limiters/login/hold"
        hold = httpx.post(path, json={"key": "alice", "cost": 7}).json()["hold"]
        figures = {"admitted": 14, "refused": 0, "degraded": 0, "degraded_refused": 0}
        until(lambda: totals(server) == figures)
        assert held_units(server) == 7
        killed = server.workers
        for worker in killed:  # one of them took the hold
            os.kill(worker, signal.SIGKILL)
        until(lambda: len(set(server.workers) - set(killed)) == 2)
        until(lambda: tick(server)["workers"] == 2)
        until(lambda: totals(server) == figures)
        assert decisions(server) == {"admitted": 14}
        assert held_units(server) == 7
        assert httpx.post(f"{server.url}/v1/holds/{hold}/release", json={}).json()["first"]
        assert held_units(server) == 0
        assert sum(hit(server) for _ in range(40)) == 50 - 13
        assert server.log.count("ended with SIGKILL and is replaced") == 2
        assert server.stop()[0] == 0


def held_units(server: ServerProcess) -> float:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    return sum(
        sample.value
        for family in families
        if family.name == "headgate_held_units"
        for sample in family.samples
    )


def test_a_reload_reaches_every_worker(tmp_path: Path) -> None:
    with serving(tmp_path, SHARED, workers=2) as server:
        (tmp_path / "headgate.toml").write_text(SHARED.replace("50/hour", "60/hour"))
        server.signal(signal.SIGHUP)
        until(lambda: server.log.count("is in force") == 2)
        assert {limit(server) for _ in range(8)} == {60}
        (tmp_path / "headgate.toml").write_text("allow_removal = true\n" + MEMORY)
        server.signal(signal.SIGHUP)
        until(lambda: server.log.count("separately in each worker: login; give them a shared store") == 2)
        assert server.stop()[0] == 0


SERVE = "headgate_server.startup:serve_worker"
REPORT_READY = "import socket, sys; socket.socket(fileno=int(sys.argv[3])).send(b'ready\\n')"
"""Arguments: the function, the listener, the connection to the parent, the folder, the name."""


def test_start_fails_if_a_worker_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(WorkersFailed, match=r"could not start .it ended with exit code 1"):
        run_workers(SERVE, [str(tmp_path / "missing.toml")], listen("127.0.0.1", 0), 1, pytest.fail)


def test_supervisor_gives_up_if_workers_keep_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "WORKER", ("-c", f"{REPORT_READY}; sys.exit(3)"))
    begun: list[bool] = []
    with pytest.raises(WorkersFailed, match=r"end as soon as they start .the last one with exit code 3"):
        run_workers(SERVE, [], listen("127.0.0.1", 0), 1, lambda: begun.append(True))
    assert begun == [True]
    assert caplog.text.count("and is replaced") == supervisor.MAX_EARLY_ENDS - 1


def test_a_worker_that_does_not_stop_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn = f"import signal; signal.signal(15, signal.SIG_IGN); {REPORT_READY}; signal.pause()"
    monkeypatch.setattr(supervisor, "WORKER", ("-c", stubborn))
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.1)
    run_workers(SERVE, [], listen("127.0.0.1", 0), 2, lambda: signal.raise_signal(signal.SIGTERM))
    assert "2 workers did not stop within 0.1 s and are killed" in caplog.text


def test_workers_stop_when_their_parent_was_killed(tmp_path: Path) -> None:
    with serving(tmp_path, SHARED, workers=2) as server:
        orphans = server.workers
        server.kill()
        until(lambda: not any(is_alive(pid) for pid in orphans))
        assert list(server.temporary.iterdir()) == []
        assert server.log.count("the parent process has ended, so this worker stops") == 2
        assert "Traceback" not in server.log


# What it refuses


@pytest.mark.parametrize(
    ("policy", "arguments", "reason"),
    [
        (
            MEMORY,
            {"host": "0.0.0.0"},
            "0.0.0.0 can be reached from other machines and the policy has no tokens",
        ),
        (MEMORY, {"host": "0.0.0.0"}, "[server.tokens.NAME]"),
        (MEMORY, {"host": "no such host"}, "not an IP address"),
        (MEMORY, {"port": 65_536}, "cannot listen on 127.0.0.1:65536: ports go from 0 to 65535"),
        (SHARED + OWN, {"workers": 2}, "but these count in memory: own;"),
        *[(MEMORY, {"workers": number}, "workers is a whole number") for number in (0, -1, 1.5, 100_000)],
        ("nonsense", {}, "headgate.toml:1:9"),
        (SHARED.replace("sqlite:", "nosuch:"), {"workers": 2}, "no store is known for 'nosuch'"),
    ],
)
def test_invalid_configuration_is_refused(
    tmp_path: Path, policy: str, arguments: dict[str, object], reason: str
) -> None:
    assert reason in refusal(tmp_path, policy, **{"port": 0, **arguments})


def test_port_in_use_is_refused(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert refusal(tmp_path, MEMORY, port=port) == (
            f"cannot listen on 127.0.0.1:{port}: address already in use; choose another port or host"
        )


def test_misconfigured_store_is_refused(tmp_path: Path) -> None:
    with RedisServer(options=("--requirepass", "s3cret")) as redis:
        reason = refusal(tmp_path, f'[limiters.login]\nrules = ["5/minute"]\nstore = "{redis.url}"\n')
    assert "cannot be used" in reason
    assert "Authentication required" in reason


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_address_needs_no_tokens(host: str) -> None:
    check_address(parse_policy(MEMORY), host)


def test_any_address_is_allowed_with_tokens() -> None:
    token = f'[server.tokens.gateway]\nsha256 = "{"0" * 64}"\nmay = ["decide"]'
    check_address(parse_policy(MEMORY + token), "0.0.0.0")


def test_server_starts_while_a_store_is_down(tmp_path: Path) -> None:
    policy = f'[limiters.login]\nrules = ["5/minute"]\nstore = "redis://127.0.0.1:{find_free_port()}"\n'
    with serving(tmp_path, policy) as server:
        assert hit(server)
        assert httpx.get(f"{server.url}/readyz", timeout=READ_SECONDS).status_code == 503
