"""The gRPC server: `envoy.service.ratelimit.v3.RateLimitService` and `grpc.health.v1.Health`.

It runs in the event loop of the HTTP server. Every request gets a status, because Envoy admits after a gRPC error. The only
error is a missing token: the caller is then not our Envoy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import aio

from headgate import ConfigError
from headgate.policy import AsyncLivePolicy
from headgate_server.access import AccessControl
from headgate_server.envoy.decisions import EnvoyDecisions
from headgate_server.envoy.messages import (
    NOT_SERVING,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    RateLimitRequest,
    RateLimitResponse,
)
from headgate_server.problems import ApiProblem

logger = logging.getLogger("headgate.server")

RATE_LIMITS = "envoy.service.ratelimit.v3.RateLimitService"
HEALTH = "grpc.health.v1.Health"

GRACE_SECONDS = 1.0
"""Seconds for calls in progress when the server stops."""

_OPTIONS = (
    ("grpc.so_reuseport", 1),  # workers share the port, and the parent process keeps it reserved
    ("grpc.max_receive_message_length", 1_000_000),
)


class EnvoyService:
    """The service of a policy.

    Args:
        live: The limiters.
        address: The address to listen on, as host and port in one text.
    """

    def __init__(self, live: AsyncLivePolicy, address: str) -> None:
        self._live = live
        self._address = address
        self._decisions = EnvoyDecisions(live)
        self._access = AccessControl(live)
        self._server: Any = None
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Listen and answer.

        Raises:
            ConfigError: The address is not available.
        """
        self._stopping = asyncio.Event()
        self._server = server = aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    RATE_LIMITS,
                    {
                        "ShouldRateLimit": grpc.unary_unary_rpc_method_handler(
                            self._should_rate_limit,
                            RateLimitRequest.FromString,
                            RateLimitResponse.SerializeToString,
                        )
                    },
                ),
                grpc.method_handlers_generic_handler(
                    HEALTH,
                    {
                        "Check": grpc.unary_unary_rpc_method_handler(
                            self._check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
                        ),
                        "Watch": grpc.unary_stream_rpc_method_handler(
                            self._watch, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
                        ),
                    },
                ),
            )
        )
        try:
            server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._address} for Envoy; choose another [envoy] port"
            ) from error
        await server.start()

    async def stop(self) -> None:
        """Report `NOT_SERVING` to watchers, finish the calls in progress, and close the port."""
        self._stopping.set()
        if self._server is not None:
            await self._server.stop(GRACE_SECONDS)

    async def _should_rate_limit(self, request: Any, context: Any) -> Any:
        if self._access.had_tokens:
            await self._check_token(context)
        return await self._decisions.decide(request, context.time_remaining())

    async def _check_token(self, context: Any) -> None:
        metadata = context.invocation_metadata() or ()
        fields = {name.encode(): value.encode() for name, value in metadata if isinstance(value, str)}
        try:
            self._access.check("gate", {"client": (context.peer(),)}, fields)
        except ApiProblem as problem:
            is_unknown = problem.status == 401
            code = grpc.StatusCode.UNAUTHENTICATED if is_unknown else grpc.StatusCode.PERMISSION_DENIED
            await context.abort(code, problem.detail)

    async def _check(self, request: Any, context: Any) -> Any:
        if request.service not in ("", RATE_LIMITS, HEALTH):
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return HealthCheckResponse(status=NOT_SERVING if self._stopping.is_set() else SERVING)

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield HealthCheckResponse(status=SERVING)
        await self._stopping.wait()
        yield HealthCheckResponse(status=NOT_SERVING)
