"""A sentinel on this machine."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redis

from headgate.testing.servers import RedisServer, answers_ping, find_binary, find_free_port
from tests.integration.waiting import until


@contextlib.contextmanager
def running_sentinel(primary: RedisServer) -> Iterator[int]:
    """Run a sentinel as long as a block does, and return its port."""
    with tempfile.TemporaryDirectory() as folder:
        port, config = find_free_port(), Path(folder) / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\nsentinel monitor primary 127.0.0.1 {primary.port} 1\n"
            f"sentinel failover-timeout primary 5000\n"  # timeout of a stuck failover; three minutes by default
        )
        command = [str(find_binary(primary.kind)), str(config), "--sentinel"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder) as process:
            try:
                until(lambda: answers_ping(port))
                with redis.Redis(port=port) as client, contextlib.suppress(redis.ResponseError):
                    # By default the old primary is reconfigured after ten seconds. Redis 6.2 cannot change that.
                    client.execute_command("SENTINEL", "DEBUG", "INFO-PERIOD", "100", "PUBLISH-PERIOD", "100")
                yield port
            finally:
                process.kill()


def fail_over(port: int, replica: RedisServer) -> None:
    """Promote a replica; a busy sentinel may abort the failover, so it is requested again."""
    with redis.Redis(port=port) as sentinel:

        def is_done() -> bool:
            is_primary = b"role:master" in replica.command("INFO", "replication")
            if not is_primary:
                # Refused if the sentinel does not know the replica yet, or if a failover is running.
                with contextlib.suppress(redis.ResponseError, redis.ConnectionError):
                    sentinel.execute_command("SENTINEL", "FAILOVER", "primary")
            return is_primary

        until(is_done)
