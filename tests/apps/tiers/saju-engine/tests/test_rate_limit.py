"""No credentials in the log, whatever happens to Redis."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from headgate.errors import ConfigError
from headgate.testing.servers import RedisServer
from headgate_services.tiers import _redact_redis_credentials, middleware, setup_rate_limiting
from headgate_services.tiers.bucket import Bucket
from headgate_services.tiers.rate_limiter import Backends
from tests.apps.processes import service_process, until

SECRET = "s3cret-p@ss/w%rd"
ENCODED = "s3cret-p%40ss%2Fw%25rd"


@pytest.mark.requirement("S-14", "S-29")
@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("redis://user:pass@host:6379/0", "redis://***@host:6379/0"),
        ("redis://:pass@host:6379/0", "redis://***@host:6379/0"),
        ("to redis://user:p@ss@host:6379/0 failed", "to redis://***@host:6379/0 failed"),
        ("rediss://user:pass@host/1", "rediss://***@host/1"),
        ("REDIS://User:Pass@host/1", "REDIS://***@host/1"),
        ("redis+sentinel://user:pass@host/mymaster", "redis+sentinel://***@host/mymaster"),
        ("redis://host:6379/0?password=pass", "redis://host:6379/0?password=***"),
        ("redis://host:6379/0", "redis://host:6379/0"),
    ],
)
def test_s14_credentials_are_masked_and_the_rest_is_kept(text: str, masked: str) -> None:
    """SX-12: the promise is about credentials, not about one shape of URL."""
    assert _redact_redis_credentials(text) == masked
    assert middleware._redact_redis_credentials is _redact_redis_credentials


@pytest.mark.requirement("S-15")
def test_s15_the_line_on_connecting(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server.command("ACL", "SETUSER", "ada", "on", f">{SECRET}", "~*", "+@all")
    setup_rate_limiting(f"redis://ada:{ENCODED}@127.0.0.1:{server.port}/0", timeout=30)
    [record] = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage() == (
        f"Rate limiting: Connected to Redis at redis://***@127.0.0.1:{server.port}/0"
    )


def test_the_line_on_not_connecting(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    client = setup_rate_limiting(f"redis://ada:{ENCODED}@127.0.0.1:{server.port}/0", timeout=30)
    assert client is not None  # used as soon as Redis replies
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert f"Rate limiting: Redis at redis://***@127.0.0.1:{server.port}/0 does not reply" in caplog.text
    assert "cret-p" not in caplog.text


def test_a_url_that_is_none_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        setup_rate_limiting(f"memcached://ada:{ENCODED}@host")
    assert "cret-p" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.requirement("S-16")
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        RedisConnectionError("Error 111 connecting to redis://user:hunter2@host:6379/0"),
        RuntimeError("rediss://:hunter2@host: who knows"),
    ],
    ids=["redis", "anything"],
)
async def test_s16_the_line_of_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, atomic: bool, error: Exception
) -> None:
    caplog.set_level(logging.DEBUG)
    async with Redis.from_url("redis://user:hunter2@127.0.0.1:1/0") as client:

        async def fail(*arguments: Any, **options: Any) -> Any:
            raise error

        monkeypatch.setattr(client.connection_pool, "get_connection", fail)
        instance = Backends(client, atomic=atomic)
        outcome = await instance.take(Bucket(5, 1.0), "user:1", 1)
    assert (outcome.allowed, outcome.backend) == (True, "memory")
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage().startswith("Rate limit check failed: ")
    assert "://***@host" in record.getMessage()
    assert "hunter2" not in caplog.text


@pytest.mark.requirement("S-15", "S-17")
async def test_s17_a_whole_run_leaves_no_password_in_the_log(tmp_path: Path) -> None:
    """Connecting, limiting, an outage, limiting without Redis, and back: at DEBUG, nothing of the password."""
    with RedisServer(options=("--requirepass", SECRET)) as server:
        variables = {
            "SAJU_ENABLE_RATE_LIMITING": "true",
            "SAJU_ENABLE_ATOMIC_RATE_LIMITER": "true",
            "SAJU_REDIS_URL": f"redis://:{ENCODED}@127.0.0.1:{server.port}/0",
            "LOG_LEVEL": "debug",
        }
        async with (
            service_process("tiers", tmp_path, **variables) as service,
            httpx.AsyncClient(base_url=service.url) as client,
        ):
            assert (await client.get("/v1/whoami")).status_code == 200
            server.kill()
            # All are of one client: the server, too, does not believe forwarded addresses from this machine.
            forwarded = [{"X-Forwarded-For": f"198.51.100.{host}"} for host in range(7)]
            statuses = [(await client.get("/v1/whoami", headers=each)).status_code for each in forwarded]
            assert (statuses[0], statuses[-1]) == (200, 429)
            server.start()

            async def is_back() -> bool:
                await client.get("/v1/whoami")
                return any("is back after" in line for line in service.log)

            await until(is_back)
            metrics = (await client.get("/metrics")).text
            assert 'backend="memory"' in metrics
            assert 'backend="atomic"' in metrics
    log = "".join(service.log)
    for line in ("Connected to Redis at redis://***@127.0.0.1", "Rate limit check failed", "is back after"):
        assert line in log
    for secret in (SECRET, ENCODED, "s3cret", "ss/w%rd"):
        assert secret not in log
