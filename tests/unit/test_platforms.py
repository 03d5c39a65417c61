"""The library on systems that cannot fork and have none of the POSIX modules, like Windows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_POSIX = """
import os, signal, socket, sys
import asyncio, subprocess, tempfile  # of the standard library there is only the half for POSIX here, so that comes first

for module, names in {
    os: "fork forkpty register_at_fork getuid geteuid getgid getegid setuid setgid chown fchown uname setsid killpg "
        "mkfifo openpty sysconf sched_getaffinity getloadavg getgroups initgroups WNOHANG "
        "pread pwrite posix_spawn sendfile O_NOFOLLOW O_CLOEXEC O_DIRECTORY",
    signal: "SIGHUP SIGALRM SIGUSR1 SIGUSR2 SIGQUIT SIGKILL SIGCHLD SIGPIPE SIGCONT SIGSTOP SIGTSTP SIGWINCH "
            "alarm setitimer getitimer pause pthread_sigmask pthread_kill sigwait sigpending",
    socket: "SO_REUSEPORT",
}.items():
    for name in names.split():
        vars(module).pop(name, None)
for name in "fcntl grp pwd resource termios tty pty syslog readline curses _posixshmem".split():
    sys.modules[name] = None  # importing it is an ImportError
"""

DECIDE = """
import asyncio, threading
from pathlib import Path

from headgate import AsyncLimiter, Limiter, MemoryStore, SQLiteStore

def decide(limiter):
    with limiter.hold("ada") as hold:
        hold.settle(1)
    assert limiter.hit("ada") and limiter.wait("ada") and not limiter.hit("ada")

async def decide_async(limiter):
    async with limiter.hold("bob") as hold:
        await hold.settle(1)
    assert await limiter.hit("bob") and await limiter.wait("bob") and not await limiter.hit("bob")

folder = Path(sys.argv[1])
for store in (MemoryStore(), SQLiteStore(folder / "limits.db")):
    decide(Limiter("3/hour", name="x", store=store))
    asyncio.run(decide_async(AsyncLimiter("3/hour", name="x", store=store)))
    store.close()
decide(Limiter("3/hour"))

url = (folder / "by url.db").as_posix()
with Limiter("3/hour", name="x", store=f"sqlite:///{url}") as limiter:
    decide(limiter)

limiter = Limiter("3/hour")
waiting = [threading.Thread(target=limiter.wait, args=("cyd",)) for _ in range(3)]
for thread in waiting:
    thread.start()
for thread in waiting:
    thread.join(30)
assert not limiter.hit("cyd")
"""

EDGES = """
import asyncio
from pathlib import Path

import headgate_server.cli, headgate.http.asgi, headgate.http.fastapi, headgate.http.wsgi
import headgate_services.petitions, headgate.testing.plugin, headgate.testing.postgres_server
import headgate.observe, headgate.observe.prometheus, headgate.stores.kv, headgate.testing
from headgate import AsyncLimiter, Limiter
from headgate_server.cli import main, make_parser
from headgate.client import ServerStore
from headgate.policy import AsyncLivePolicy, LivePolicy

store = ServerStore("http://localhost:1")
limiter = Limiter("3/hour", name="x", store=store, on_store_error="closed")
assert limiter.hit("ada").degraded
store.close()

file = Path(sys.argv[1], "policy.toml")
file.write_text('[limiters.login]\\nrules = ["3/hour"]')
with LivePolicy.from_file(file) as policy, policy.watch():
    assert policy["login"].hit("ada").remaining == 2

async def follow():
    async with AsyncLivePolicy.from_file(file) as policy:
        following = asyncio.create_task(policy.watch())
        await asyncio.sleep(0)
        assert (await policy["login"].hit("ada")).remaining == 2
        following.cancel()

asyncio.run(follow())

make_parser()
assert main(["version"]) == 0
assert main(["check", str(file)]) == 0
assert main(["tour", "--fast"]) == 0
"""


@pytest.mark.parametrize("work", [DECIDE, EDGES], ids=["decisions", "edges"])
def test_library_works_without_posix(work: str, tmp_path: Path) -> None:
    run(WITHOUT_POSIX + work, tmp_path)


def run(program: str, folder: Path) -> None:
    """Run a program in a separate process."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
