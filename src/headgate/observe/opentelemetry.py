"""Metrics and spans for OpenTelemetry.

    telemetry = OpenTelemetryHook()
    limiter = Limiter("5/minute", name="login", hooks=[telemetry])

One hook serves all limiters. The metrics are those of `headgate.observe.prometheus`, except overloads and the most refused
keys; an exporter to Prometheus gives them the same names. Attributes have few distinct values and never include a key,
except in spans with `keys=`.
"""

from __future__ import annotations

import secrets
import time
import weakref
from typing import Any, Literal

from headgate._checks import check_kind
from headgate._extras import needing
from headgate.costs import Cost, total
from headgate.decision import Decision
from headgate.errors import ConfigError, StoreError
from headgate.hooks import SECONDS, Call, Hook
from headgate.observe.logs import shown_key

with needing("headgate.observe.opentelemetry", "opentelemetry"):
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import MeterProvider, Observation
    from opentelemetry.trace import SpanKind, StatusCode, TracerProvider

__all__ = ["OpenTelemetryHook"]

Attributes = dict[str, str | bool | int | float]

_TAKEN: weakref.WeakSet[Any] = weakref.WeakSet()
"""Meters already used by a hook. The SDK keeps the first hook's callbacks and silently drops those of a second hook."""


class OpenTelemetryHook(Hook):
    """Count decisions, time stores, and add a span for each call to the current trace.

        headgate.decisions{limiter, rule, outcome, degraded}      rule: the most restrictive; outcome: admitted, refused
        headgate.store{limiter, operation}                        histogram in seconds; excludes degraded answers
        headgate.store.up{limiter}                                whether the store answered the last call
        headgate.store.errors{limiter, error.type}                calls that raised, by kind of error
        headgate.held_units{limiter}                              units of holds that are open in this process
        headgate.memory.keys, headgate.memory.overflowed          totals of all memory stores

    Checks are timed, but not counted as decisions. A span is named after the operation and the limiter, like `hit login`.

    Args:
        meter_provider: The meter provider; by default the global one.
        tracer_provider: The tracer provider; by default the global one.
        spans: Whether to create spans. They are created only inside a recorded trace.
        keys: How spans show keys, which may be addresses or credentials: not at all, as a digest that is stable within
            this process, or in plain text.
    """

    def __init__(
        self,
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
        spans: bool = True,
        keys: Literal["none", "digest", "plain"] = "none",
    ) -> None:
        if keys not in ("none", "digest", "plain"):
            raise ConfigError(f"keys is 'none', 'digest' or 'plain', not {keys!r}")
        check_kind("meter_provider", meter_provider, MeterProvider | None, "a MeterProvider of opentelemetry")
        check_kind(
            "tracer_provider", tracer_provider, TracerProvider | None, "a TracerProvider of opentelemetry"
        )
        self._tracer = trace.get_tracer("headgate", tracer_provider=tracer_provider) if spans else None
        self._keys, self._salt = keys, secrets.token_bytes(16)
        meter = metrics.get_meter("headgate", meter_provider=meter_provider)
        if meter in _TAKEN:
            raise ConfigError(
                "another OpenTelemetryHook uses this meter provider; give all limiters the same hook, or each hook a "
                "separate meter_provider="
            )
        _TAKEN.add(meter)
        self._decisions = meter.create_counter(
            "headgate.decisions", "{decision}", "Decisions, by the most restrictive rule."
        )
        self._seconds = meter.create_histogram(
            "headgate.store", "s", "Duration of store calls.", explicit_bucket_boundaries_advisory=SECONDS
        )
        self._errors = meter.create_counter("headgate.store.errors", "{call}", "Calls that raised.")
        self._held = meter.create_up_down_counter("headgate.held_units", "{unit}", "Units of open holds.")
        self._up: dict[str, bool] = {}
        self._stores: weakref.WeakSet[Any] = weakref.WeakSet()
        meter.create_observable_gauge(
            "headgate.store.up",
            [lambda _: [Observation(int(up), {"limiter": name}) for name, up in list(self._up.items())]],
            description="Whether the store answered the last call.",
        )
        meter.create_observable_gauge(
            "headgate.memory.keys",
            [lambda _: [Observation(sum(map(len, list(self._stores))))]],
            "{key}",
            "States in memory.",
        )
        meter.create_observable_counter(
            "headgate.memory.overflowed",
            [lambda _: [Observation(sum(store.overflowed for store in list(self._stores)))]],
            "{call}",
            "Calls counted under a shared key because the store was full.",
        )

    def attached(self, limiter: Any) -> None:
        if hasattr(limiter.store, "overflowed"):
            self._stores.add(limiter.store)
        self._up.setdefault(limiter.name, True)

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        self._up[call.limiter] = not decision.degraded
        if not decision.degraded:
            self._seconds.record(seconds, {"limiter": call.limiter, "operation": call.operation})
        found: Attributes = {
            "rule": decision.rule or "",
            "outcome": "admitted" if decision.allowed else "refused",
            "degraded": decision.degraded,
        }
        if call.operation != "check":
            self._decisions.add(1, {"limiter": call.limiter, **found})
        if call.operation == "hold" and decision.allowed:
            self._held.add(total(call.cost), {"limiter": call.limiter})
        if decision.remaining is not None:
            found["remaining"] = decision.remaining
        self._add_span(call, seconds, found)

    def completed(self, call: Call, seconds: float, degraded: bool) -> None:
        if call.operation != "refund":  # a refund ends the same way whether the store answered or not
            self._up[call.limiter] = not degraded
        if not degraded:
            self._seconds.record(seconds, {"limiter": call.limiter, "operation": call.operation})
        self._add_span(call, seconds, {"degraded": True} if degraded else {})

    def settled(self, call: Call, cost: Cost | None) -> None:
        self._held.add(-total(call.cost), {"limiter": call.limiter})

    def failed(self, call: Call, error: Exception, seconds: float) -> None:
        kind = type(error).__name__
        self._errors.add(1, {"limiter": call.limiter, "error.type": kind})
        if isinstance(error, StoreError):
            self._up[call.limiter] = False
        self._add_span(call, seconds, {"error.type": kind}, failed=isinstance(error, StoreError))

    def _add_span(self, call: Call, seconds: float, found: Attributes, *, failed: bool = False) -> None:
        """Add a span for the finished call to the caller's trace."""
        if self._tracer is None or not trace.get_current_span().is_recording():
            return
        end = time.time_ns()
        attributes: Attributes = {
            "limiter": call.limiter,
            "operation": call.operation,
            "cost": total(call.cost),
            **found,
        }
        if call.tier is not None:
            attributes["tier"] = call.tier
        if self._keys != "none" and call.key is not None:
            attributes["key"] = shown_key(call.key, self._keys, self._salt)
        span = self._tracer.start_span(
            f"{call.operation} {call.limiter}".rstrip(),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=end - round(seconds * 1e9),
        )
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(end)
