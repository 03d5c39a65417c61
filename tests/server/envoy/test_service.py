"""The gRPC server: calls, health, tokens, and the commands that start it."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from headgate import ConfigError
from headgate.policy import AsyncLivePolicy, parse_policy
from headgate.testing.servers import find_free_port
from headgate_server.envoy.messages import (
    NOT_SERVING,
    OK,
    OVER_LIMIT,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    RateLimitRequest,
    RateLimitResponse,
)
from headgate_server.envoy.service import HEALTH, RATE_LIMITS, EnvoyService
from headgate_server.factory import envoy_service
from headgate_server.hosting import reserve
from tests.server.envoy.asking import codes, policy_with, request
from tests.server.support import refusal

POLICY = policy_with('{ key = "user", scope = "user" }')
TOKENS = f"""
[server.tokens.envoy]
sha256 = "{hashlib.sha256(b"secret").hexdigest()}"
may = ["gate"]
[server.tokens.dashboard]
sha256 = "{hashlib.sha256(b"other").hexdigest()}"
may = ["decide"]
"""


class Client:
    """Calls the service on a port."""

    def __init__(self, channel: Any) -> None:
        self.ask = channel.unary_unary(
            f"/{RATE_LIMITS}/ShouldRateLimit",
            RateLimitRequest.SerializeToString,
            RateLimitResponse.FromString,
        )
        self.check = channel.unary_unary(
            f"/{HEALTH}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        self.watch = channel.unary_stream(
            f"/{HEALTH}/Watch", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )


@asynccontextmanager
async def serving(policy: str | AsyncLivePolicy) -> AsyncIterator[tuple[EnvoyService, Client]]:
    """Serve a policy by gRPC."""
    address = f"127.0.0.1:{find_free_port()}"
    policy = AsyncLivePolicy(parse_policy(policy)) if isinstance(policy, str) else policy
    async with policy as live, aio.insecure_channel(address) as channel:
        service = EnvoyService(live, address)
        await service.start()
        try:
            yield service, Client(channel)
        finally:
            await service.stop()


async def test_limit_is_exact_over_parallel_calls() -> None:
    async with serving(POLICY) as (_, client):
        responses = await asyncio.gather(*(client.ask(request({"user": "a"}), timeout=20) for _ in range(50)))
        assert [response.overall_code for response in responses].count(OK) == 3


async def test_health_is_reported_until_the_end() -> None:
    async with serving(POLICY) as (service, client):
        assert (await client.check(HealthCheckRequest())).status == SERVING
        assert (await client.check(HealthCheckRequest(service=RATE_LIMITS))).status == SERVING
        with pytest.raises(grpc.RpcError) as error:
            await client.check(HealthCheckRequest(service="another"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
        watch = client.watch(HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        await service.stop()
        assert (await watch.read()).status == NOT_SERVING


async def test_token_with_the_permission_of_proxies_is_needed() -> None:
    async with serving(POLICY + TOKENS) as (_, client):
        asked = request({"user": "a"})
        assert codes(await client.ask(asked, metadata=(("headgate-token", "secret"),))) == [OK]
        for metadata, expected in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("headgate-token", "wrong"),), grpc.StatusCode.UNAUTHENTICATED),
            ((("headgate-token", "other"),), grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.RpcError) as error:
                await client.ask(asked, metadata=metadata)
            assert error.value.code() is expected  # type: ignore[attr-defined]


async def test_service_is_closed_when_reloads_add_and_remove_tokens(tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text(POLICY)
    live = AsyncLivePolicy.from_file(file)
    async with serving(live) as (_, client):
        assert codes(await client.ask(request({"user": "a"}))) == [OK]
        for text in (POLICY + TOKENS, POLICY):
            file.write_text(text)
            assert live.reload()
        with pytest.raises(grpc.RpcError) as error:
            await client.ask(request({"user": "a"}))
        assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]


@pytest.mark.parametrize(("policy", "code"), [("open", OK), ("closed", OVER_LIMIT)])
async def test_silent_store_is_answered_within_the_deadline_of_the_call(policy: str, code: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # nobody accepts or answers
        options = f'store = "redis://127.0.0.1:{silent.getsockname()[1]}"\non_store_error = "{policy}"\nrules'
        async with serving(POLICY.replace("rules", options, 1)) as (_, client):
            # The store's own deadline is a second; without an answer in time this raises DEADLINE_EXCEEDED.
            assert codes(await client.ask(request({"user": "a"}), timeout=0.5)) == [code]


# Starting it


async def test_workers_share_the_port_and_the_counts(tmp_path: Path) -> None:
    config = tmp_path / "headgate.toml"
    store = f"sqlite:///{tmp_path / 'limits.db'}"
    config.write_text(f'[store]\nurl = "{store}"\n{POLICY}\n[server]\nport = 0\n')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headgate_server.cli", "serve", "--config", str(config)),
        *("--grpc", "0", "--workers", "2"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    lines = [(await process.stdout.readline()).decode() for _ in range(2)]
    assert "headgate: Envoy's rate-limit service listens on 127.0.0.1:" in lines[1]
    address = lines[1].split()[-1]
    async with aio.insecure_channel(address) as channel:
        client = Client(channel)
        answers = [(await client.ask(request({"user": "a"}))).overall_code for _ in range(4)]
    assert answers == [OK, OK, OK, OVER_LIMIT]
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "headgate_server.envoy.service")
    with pytest.raises(ConfigError, match=r"pip install 'headgate-server\[envoy\]'"):
        envoy_service()


def test_taken_port_is_an_error() -> None:
    with reserve("127.0.0.1", 0) as keeper:
        keeper.listen()
        with pytest.raises(ConfigError, match="address already in use"):
            reserve("127.0.0.1", keeper.getsockname()[1])


@pytest.mark.parametrize(
    ("policy", "arguments", "reason"),
    [
        ('limiters.a.rules = ["1/s"]', {"grpc_port": 0}, "--grpc needs [envoy] in the policy"),
        (f'{POLICY}[envoy]\nhost = "0.0.0.0"', {}, "has no tokens"),
    ],
)
def test_server_does_not_start(
    tmp_path: Path, policy: str, arguments: dict[str, object], reason: str
) -> None:
    assert reason in refusal(tmp_path, policy, port=0, **arguments)
