"""Metrics and spans for OpenTelemetry."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headgate import AsyncLimiter, ConfigError, CostTooHigh, Limiter, MemoryStore, StoreUnavailable
from headgate.hooks import Call
from headgate.observe.opentelemetry import OpenTelemetryHook


class Telemetry:
    """A hook with its exported metrics and spans."""

    def __init__(self, **options: Any) -> None:
        self._reader, self._exporter = InMemoryMetricReader(), InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        meters = MeterProvider(metric_readers=[self._reader])
        self.tracer = tracers.get_tracer("test")
        self.hook = OpenTelemetryHook(meter_provider=meters, tracer_provider=tracers, **options)

    def metrics(self) -> dict[str, list[tuple[dict[str, Any], Any]]]:
        """Return attributes and value of every point, by metric name."""
        data = self._reader.get_metrics_data()
        assert data is not None
        return {
            metric.name: [
                (dict(point.attributes or {}), getattr(point, "value", getattr(point, "count", None)))
                for point in metric.data.data_points
            ]
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def spans(self) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name != "request"]


def test_decisions_are_counted() -> None:
    telemetry = Telemetry()
    store = MemoryStore()
    limiter = Limiter("2/minute", name="login", store=store, hooks=[telemetry.hook])
    limiter.hit("ada")
    limiter.check("ada")
    hold = limiter.hold("ada")
    limiter.hit("ada")
    found = telemetry.metrics()
    rule = {"limiter": "login", "rule": "per-minute", "degraded": False}
    assert found["headgate.decisions"] == [
        ({**rule, "outcome": "admitted"}, 2),
        ({**rule, "outcome": "refused"}, 1),
    ]
    assert found["headgate.store"] == [
        ({"limiter": "login", "operation": operation}, count)
        for operation, count in (("hit", 2), ("check", 1), ("hold", 1))
    ]
    assert found["headgate.held_units"] == [({"limiter": "login"}, 1)]
    assert found["headgate.store.up"] == [({"limiter": "login"}, 1)]
    assert found["headgate.memory.keys"] == [({}, 1)]
    assert found["headgate.memory.overflowed"] == [({}, 0)]
    hold.release()
    assert telemetry.metrics()["headgate.held_units"] == [({"limiter": "login"}, 0)]
    assert "ada" not in str(found)


def test_degraded_record_is_not_counted_as_store_time() -> None:
    telemetry = Telemetry()
    limiter = Limiter("2/minute", name="login", hooks=[telemetry.hook])
    limiter.record("ada")
    telemetry.hook.completed(Call("login", "record", "ada", 1, None), 9.0, True)
    telemetry.hook.completed(Call("login", "refund", None, 1, None), 0.1, False)
    found = telemetry.metrics()
    assert ({"limiter": "login", "operation": "record"}, 1) in found["headgate.store"]
    assert found["headgate.store.up"] == [({"limiter": "login"}, 0)]


def test_failures_are_counted() -> None:
    class Down(MemoryStore):
        def bind(self, *arguments: Any, **options: Any) -> Any:
            gate = super().bind(*arguments, **options)

            class Failing:
                refund, reset = gate.refund, gate.reset

                def decide(self, request: Any) -> Any:
                    raise StoreUnavailable("gone")

            return Failing()

    telemetry = Telemetry()
    limiter = Limiter("2/minute", name="login", store=Down(), hooks=[telemetry.hook])
    with telemetry.tracer.start_as_current_span("request"), pytest.raises(StoreUnavailable):
        limiter.hit("ada")
    found = telemetry.metrics()
    assert found["headgate.store.errors"] == [({"limiter": "login", "error.type": "StoreUnavailable"}, 1)]
    assert found["headgate.store.up"] == [({"limiter": "login"}, 0)]
    [span] = telemetry.spans()
    assert not span.status.is_ok
    assert span.attributes is not None
    assert span.attributes["error.type"] == "StoreUnavailable"


async def test_spans_are_children_of_the_callers_span() -> None:
    telemetry = Telemetry()
    limiter = AsyncLimiter("1/minute", name="login", store=MemoryStore(), hooks=[telemetry.hook])
    await limiter.hit("ada")
    assert telemetry.spans() == []
    with telemetry.tracer.start_as_current_span("request") as request:
        await limiter.hit("ada", tier="pro")
        await limiter.record("ada")
        with pytest.raises(CostTooHigh):
            await limiter.hit("ada", 2)
    refused, recorded, costly = telemetry.spans()
    assert [span.name for span in (refused, recorded, costly)] == ["hit login", "record login", "hit login"]
    assert refused.parent is not None
    assert refused.parent.span_id == request.get_span_context().span_id
    assert dict(refused.attributes or {}) == {
        "limiter": "login",
        "operation": "hit",
        "cost": 1,
        "tier": "pro",
        "rule": "per-minute",
        "outcome": "refused",
        "degraded": False,
        "remaining": 0,
    }
    assert refused.start_time is not None
    assert refused.end_time is not None
    assert refused.start_time <= refused.end_time
    assert costly.status.is_ok


def test_second_hook_needs_a_separate_meter_provider() -> None:
    meters = MeterProvider()
    OpenTelemetryHook(meter_provider=meters)
    with pytest.raises(ConfigError, match=r"give all limiters the same hook, or each .* a separate"):
        OpenTelemetryHook(meter_provider=meters)
    OpenTelemetryHook(meter_provider=MeterProvider())


def test_spans_include_keys_only_if_enabled() -> None:
    shown = []
    for keys in ("none", "digest", "plain"):
        telemetry = Telemetry(keys=keys)
        limiter = Limiter("1/minute", hooks=[telemetry.hook])
        with telemetry.tracer.start_as_current_span("request"):
            limiter.hit("ada")
        [span] = telemetry.spans()
        shown.append((span.attributes or {}).get("key"))
    assert shown[0] is None
    assert shown[1] not in (None, "ada")
    assert shown[2] == "ada"
    with pytest.raises(ConfigError, match="digest"):
        OpenTelemetryHook(keys="hash")  # type: ignore[arg-type]


def test_spans_can_be_disabled() -> None:
    telemetry = Telemetry(spans=False)
    with telemetry.tracer.start_as_current_span("request"):
        Limiter("1/minute", hooks=[telemetry.hook]).hit("ada")
    assert telemetry.spans() == []
