"""Metrics, read back with Prometheus's own parser."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headgate import (
    ConfigError,
    CostTooHigh,
    Limiter,
    MemoryStore,
    StoreOverloaded,
    StoreUnavailable,
    sliding_window,
)
from headgate.costs import Cost
from headgate.hooks import Call
from headgate.observe.prometheus import PrometheusHook, ShadowHook
from headgate.outage.breaker import breaker_of
from headgate.policy import LivePolicy, parse_policy
from headgate.stores.redis import RedisStore


def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Return the values of all exported samples by (name, labels in order of their names)."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def watched(registry: CollectorRegistry, *rules: Any, **arguments: Any) -> tuple[Limiter, PrometheusHook]:
    hook = PrometheusHook(registry, **arguments)
    return Limiter(*rules, name="login", store=MemoryStore(), hooks=[hook]), hook


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_decisions_are_counted_by_limiter_rule_and_outcome(registry: CollectorRegistry) -> None:
    limiter, hook = watched(registry, "2/minute", "5/hour")
    for _ in range(5):
        limiter.hit("alice")
    limiter.check("alice")
    hook.decided(Call("login", "hit", "a", 1, None), limiter.hit("bob").as_degraded(), 0.0)
    found = samples(registry)
    # labels in the order of their names: degraded, limiter, outcome, rule
    assert found["headgate_decisions_total", "false", "login", "admitted", "per-minute"] == 3
    assert found["headgate_decisions_total", "false", "login", "refused", "per-minute"] == 3
    assert found["headgate_decisions_total", "true", "login", "admitted", "per-minute"] == 1


def test_no_key_becomes_a_label(registry: CollectorRegistry) -> None:
    limiter, _ = watched(registry, sliding_window("0/minute", scope="user"))
    for number in range(50):
        limiter.hit({"user": f"someone-{number}"})
    text = generate_latest(registry).decode()
    assert "someone" not in text
    assert len(samples(registry)) < 40


def test_store_time_is_measured_by_operation(registry: CollectorRegistry) -> None:
    limiter, hook = watched(registry, "5/minute", buckets=[0.1, 1.0])
    limiter.check("a")
    limiter.record("a")
    limiter.reset("a")
    decision = limiter.hit("a")
    hook.decided(Call("login", "hold", "a", 1, None), decision, 0.5)
    hook.decided(Call("login", "hold", "a", 1, None), decision.as_degraded(), 9.0)
    found = samples(registry)
    for operation in ("hit", "check", "record", "reset"):
        assert found["headgate_store_seconds_count", "login", operation] == 1
    assert found["headgate_store_seconds_count", "login", "hold"] == 1
    assert found["headgate_store_seconds_bucket", "0.1", "login", "hold"] == 0
    assert found["headgate_store_seconds_bucket", "1.0", "login", "hold"] == 1


def test_held_units_are_measured(registry: CollectorRegistry) -> None:
    limiter, _ = watched(registry, "9/minute")
    first, second, third = limiter.hold("a", 2), limiter.hold("a", 3), limiter.hold("a", 4)
    assert not limiter.hold("a", 1)
    assert samples(registry)["headgate_held_units", "login"] == 9
    first.settle(1)
    first.release()
    second.release()
    assert samples(registry)["headgate_held_units", "login"] == 4
    del third
    gc.collect()
    assert samples(registry)["headgate_held_units", "login"] == 0


@pytest.mark.parametrize("cost", [2, {"tokens": 60}, {"requests": 3, "tokens": 3}])
def test_held_units_of_several_rules_return_to_zero(registry: CollectorRegistry, cost: Cost) -> None:
    limiter, _ = watched(registry, "9/minute", sliding_window("99/minute", unit="tokens", name="tokens"))
    hold = limiter.hold("a", cost)
    assert samples(registry)["headgate_held_units", "login"] > 0
    hold.release()
    assert samples(registry)["headgate_held_units", "login"] == 0


def test_store_up_and_errors_follow_the_store(registry: CollectorRegistry) -> None:
    limiter, hook = watched(registry, "5/minute")
    call = Call("login", "hit", "a", 1, None)
    up = ("headgate_store_up", "login")
    assert samples(registry)[up] == 1
    hook.failed(call, StoreUnavailable("gone"), 0.1)
    assert samples(registry)[up] == 0
    limiter.hit("a")
    assert samples(registry)[up] == 1
    hook.decided(call, limiter.hit("a").as_degraded(), 0.1)
    assert samples(registry)[up] == 0
    limiter.record("a")
    assert samples(registry)[up] == 1
    hook.completed(Call("login", "record", "a", 1, None), 9.0, True)
    assert samples(registry)[up] == 0
    assert samples(registry)["headgate_store_seconds_count", "login", "record"] == 1, "not the store's time"
    hook.completed(Call("login", "refund", None, 1, None), 0.1, False)
    assert samples(registry)[up] == 0, "a refund ends the same way if the store does not answer"
    limiter.reset("a")
    assert samples(registry)[up] == 1
    with pytest.raises(CostTooHigh):
        limiter.hit("a", 6)
    found = samples(registry)
    assert found[up] == 1
    assert found["headgate_store_errors_total", "StoreUnavailable", "login"] == 1
    assert found["headgate_store_errors_total", "CostTooHigh", "login"] == 1


def test_overflow_of_a_full_memory_store_is_counted(registry: CollectorRegistry) -> None:
    hook = PrometheusHook(registry)
    limiter = Limiter("5/minute", name="small", store=MemoryStore(max_keys=2), hooks=[hook])
    for key in "abcd":
        limiter.hit(key)
    found = samples(registry)
    assert found["headgate_memory_keys",] >= 2
    assert found["headgate_memory_overflowed_total",] == 2


def test_overloads_are_counted_once_per_store(registry: CollectorRegistry) -> None:
    hook = PrometheusHook(registry)
    with RedisStore("redis://127.0.0.1:1") as store, RedisStore("redis://127.0.0.1:2") as other:
        limiters = [Limiter("5/minute", name=name, store=store, hooks=[hook]) for name in ("one", "two")]
        limiters.append(Limiter("5/minute", name="three", store=other, hooks=[hook]))
        for found in (store, store, other):
            breaker_of(found).failed(0, StoreOverloaded("too many calls"))
        assert samples(registry)["headgate_store_overloads_total",] == 3


def test_most_refused_keys_are_shown_if_enabled(registry: CollectorRegistry) -> None:
    limiter, _ = watched(registry, "0/minute", top_keys=2)
    for key, count in (("alice", 5), ("bob", 3), ("carol", 1), (b"\x00", 4)):
        for _ in range(count):
            limiter.hit(key)
    top = {
        labels[1:]: value
        for labels, value in samples(registry).items()
        if labels[0] == "headgate_top_refused"
    }
    assert top == {("alice", "login"): 5, ("b'\\x00'", "login"): 4}


def test_most_refused_keys_are_bounded_in_number_and_length(registry: CollectorRegistry) -> None:
    hook = PrometheusHook(registry, top_keys=3)
    limiter = Limiter(sliding_window("0/minute", scope="user"), name="x", store=MemoryStore(), hooks=[hook])
    for number in range(5_000):
        limiter.hit({"user": f"{number}" + "x" * 500})
    limiter.hit({"user": "\udc80"})
    shown = [labels for labels in samples(registry) if labels[0] == "headgate_top_refused"]
    assert len(shown) <= 3
    assert all(len(label) <= 128 for labels in shown for label in labels)


@pytest.mark.parametrize("hook", [PrometheusHook, ShadowHook])
def test_second_hook_needs_a_separate_registry(
    registry: CollectorRegistry, hook: type[PrometheusHook] | type[ShadowHook]
) -> None:
    hook(registry)
    with pytest.raises(
        ConfigError, match=rf"give all limiters the same {hook.__name__}, or each .* a separate"
    ):
        hook(registry)
    hook(CollectorRegistry())


def test_refused_hook_registers_no_metrics(registry: CollectorRegistry) -> None:
    taken = Gauge("headgate_held_units", "Of someone else.", registry=registry)
    with pytest.raises(ConfigError):
        PrometheusHook(registry)
    registry.unregister(taken)
    hook = PrometheusHook(registry)
    registry.unregister(hook)
    assert samples(registry) == {}


SHADOWED = """
[limiters.api]
rules = ["100/minute", { quota = "2/hour", name = "candidate", shadow = true }]
[limiters.scoped]
rules = [{ quota = "9/minute", scope = "*" }, { quota = "1/hour", name = "other", scope = "user", shadow = true }]
"""


def test_shadow_decisions_are_counted_by_outcome(registry: CollectorRegistry) -> None:
    live = LivePolicy(parse_policy(SHADOWED), shadow_hooks=[ShadowHook(registry)])
    for _ in range(5):
        live["api"].hit("alice")
    live["api"].hit("bob", 3)  # more than the rule ever admits
    live["scoped"].hit("alice")  # a key without its scope
    found = samples(registry)
    # labels in the order of their names: limiter, outcome, rule
    counts = {labels: value for (name, *labels_), value in found.items() if (labels := tuple(labels_))}
    assert counts == {
        ("api", "admitted", "candidate"): 2,
        ("api", "refused", "candidate"): 4,
        ("scoped", "failed", ""): 1,
    }


def test_degraded_shadow_decision_counts_as_failed(registry: CollectorRegistry) -> None:
    hook = ShadowHook(registry)
    decision = Limiter("5/minute").hit("a").as_degraded()
    hook.decided(Call("api", "hit", "a", 1, None), decision, 0.0)
    assert samples(registry) == {("headgate_shadow_decisions_total", "api", "failed", "per-minute"): 1}
