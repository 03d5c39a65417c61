"""The servers that come with Headgate, and the fixtures that start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headgate import Limiter
from headgate.testing import servers
from headgate.testing.servers import Kind, RedisServer, ServerError, answers_ping
from tests.integration.waiting import until

each_kind = pytest.mark.parametrize("kind", ["redis", "valkey"])

SUITE = """
from headgate import Limiter

def test_one(headgate_redis_url, headgate_valkey_url):
    assert headgate_redis_url != headgate_valkey_url
    for url in (headgate_redis_url, headgate_valkey_url):
        with Limiter("1/minute", name="x", store=url, on_store_error="raise") as limiter:
            assert limiter.hit("alice")
    print("redis at", headgate_redis_url)

def test_two(headgate_redis_url):
    with Limiter("1/minute", name="x", store=headgate_redis_url, on_store_error="raise") as limiter:
        assert not limiter.hit("alice")
"""
HOLDER = """
import signal, sys
from headgate.testing.servers import RedisServer
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit that SIGINT is ignored
print(RedisServer(sys.argv[1]).start().pid, flush=True)
sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")
        return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
    except ProcessLookupError:  # also while reading: the process may end
        return False


def pytest_command(folder: Path, *, by_entry_point: bool = False) -> list[str]:
    """Return a command; to find the plugin by its entry point takes a second."""
    (folder / "test_suite.py").write_text(SUITE)
    plugin = () if by_entry_point else ("--disable-plugin-autoload", "-p", "headgate.testing.plugin")
    return [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *plugin, str(folder)]


def test_parallel_runs_use_separate_servers(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    runs = []
    for folder in folders:
        folder.mkdir()
        command = pytest_command(folder, by_entry_point=not runs)
        runs.append(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, text=True))
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    urls = {line.split()[-1] for output in outputs for line in output.splitlines() if "redis at" in line}
    assert len(urls) == 2


def test_a_server_named_in_the_environment_is_used(tmp_path: Path) -> None:
    with RedisServer() as server:
        environment = {**os.environ, "HEADGATE_TEST_REDIS_URL": server.url}
        run = subprocess.run(
            pytest_command(tmp_path),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            check=False,
        )
        assert run.returncode == 0, run.stdout
        assert f"redis at {server.url}" in run.stdout


@each_kind
def test_a_server_starts_empty_and_leaves_nothing(kind: Kind) -> None:
    with RedisServer(kind) as server:
        assert server.folder.exists()
        assert answers_ping(server.port)
        pid = server.pid
    assert not server.folder.exists()
    assert not answers_ping(server.port)
    assert not is_running(pid)
    server.stop()


@each_kind
def test_restarted_server_keeps_its_port(kind: Kind) -> None:
    with RedisServer(kind) as server, Limiter("5/hour", name="x", store=server.url) as limiter:
        before = server.url, server.pid
        limiter.hit("alice")
        server.kill()
        server.kill()
        server.start()
        assert server.url == before[0]
        assert server.pid != before[1]
        assert b"$-1" in server.command("GET", "anything")


@each_kind
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_server_stops_with_the_process_that_started_it(kind: Kind, how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        assert is_running(pid)
        holder.send_signal(how)
        holder.wait(30)
        until(lambda: not is_running(pid))


@each_kind
def test_server_starts_for_an_unprivileged_user(kind: Kind) -> None:
    """If the tests run as root, the server starts as another user."""
    pid = os.fork()
    if pid == 0:
        os._exit(_start_without_rights(kind))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _start_without_rights(kind: Kind) -> int:
    try:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        with RedisServer(kind) as server:
            return 0 if answers_ping(server.port) else 1
    except BaseException as error:  # noqa: BLE001  # this process must end here, whatever happened
        print(error, file=sys.stderr)
        return 2


def test_stopped_server_receives_no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no process; 0 would be our process group, and the old process id may be reused."""
    with RedisServer() as server:
        signals: list[tuple[int, int]] = []
        monkeypatch.setattr(servers.os, "kill", lambda *signal: signals.append(signal))
        for idle in (RedisServer(), server):
            idle.kill()
            idle.pause()
            idle.resume()
            idle.stop()
        assert signals == []


def test_port_in_use_raises_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer() as server:
        rival = RedisServer(port=server.port)
        with pytest.raises(ServerError, match="does not start"):
            rival.start()
        rival.stop()


def test_start_is_retried_if_the_free_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer() as server:
        free = servers.find_free_port
        ports = iter([server.port, server.port])
        monkeypatch.setattr(servers, "find_free_port", lambda: next(ports, None) or free())
        with RedisServer() as other:
            assert other.port != server.port


@each_kind
def test_missing_wheel_is_named_in_the_error(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"pip install 'headgate\[embedded\]'"):
        RedisServer(kind).start()
