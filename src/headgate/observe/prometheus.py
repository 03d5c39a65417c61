"""Metrics for Prometheus.

    metrics = PrometheusHook()
    limiter = Limiter("5/minute", name="login", hooks=[metrics])
    live = AsyncLivePolicy.from_file("headgate.toml", hooks=[metrics], shadow_hooks=[ShadowHook()])

One hook serves all limiters. Labels have few distinct values: names of limiters and rules, never a key. The most refused
keys can be exported on request (`top_keys=10`); their number is bounded, in the process and in every scrape.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headgate._checks import check_count, check_kind, check_list
from headgate._extras import needing
from headgate._fork import watch
from headgate.costs import Cost, total
from headgate.decision import Decision
from headgate.errors import ConfigError, CostTooHigh, StoreError
from headgate.hooks import SECONDS, Call, Hook
from headgate.keys import Key
from headgate.observe.top import TopKeys

with needing("headgate.observe.prometheus", "prometheus"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.registry import Collector

__all__ = ["PrometheusHook", "ShadowHook", "all_processes"]

_LONGEST_LABEL = 128
_FOLLOWED_PER_SHOWN = 20
_MOST_SHOWN = 1_000_000


def all_processes(registry: CollectorRegistry) -> CollectorRegistry:
    """Return the registry that a process should expose: with several processes, one with the sums over all of them.

    Several processes are assumed if `PROMETHEUS_MULTIPROC_DIR` names a shared folder; it must be set before
    `prometheus_client` is imported.
    """
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return registry
    shown = CollectorRegistry()
    MultiProcessCollector(shown)  # type: ignore[no-untyped-call]
    return shown


class PrometheusHook(Hook, Collector):
    """Count decisions and time stores.

        headgate_decisions_total{limiter, rule, outcome, degraded}   rule: the most restrictive; outcome: admitted, refused
        headgate_store_seconds{limiter, operation}                   histogram; excludes degraded answers
        headgate_store_up{limiter}                                   whether the store answered the last call
        headgate_store_errors_total{limiter, error}                  calls that raised, by kind of error
        headgate_held_units{limiter}                                 units of holds that are open in this process
        headgate_memory_keys, headgate_memory_overflowed_total       totals of all memory stores
        headgate_store_overloads_total                               calls that this process could not send in time
        headgate_top_refused{limiter, key}                           only with top_keys

    Checks are timed, but not counted as decisions, because they take nothing.

    Args:
        registry: The registry; by default the global registry of `prometheus_client`.
        top_keys: The number of most refused keys to export. Each key becomes a label, in plain text.
        buckets: Bounds of the latency histogram, in seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        top_keys: int = 0,
        buckets: Iterable[float] = SECONDS,
    ) -> None:
        _check_registry(registry)
        check_count("top_keys", top_keys, 0, _MOST_SHOWN)
        self._bounds = check_list("buckets", buckets, int | float, "[0.001, 0.01, 0.1]")
        self._decisions = Counter(
            "headgate_decisions",
            "Decisions, by the most restrictive rule.",
            ["limiter", "rule", "outcome", "degraded"],
            registry=None,
        )
        self._seconds = Histogram(
            "headgate_store_seconds",
            "Duration of store calls.",
            ["limiter", "operation"],
            buckets=self._bounds,
            registry=None,
        )
        self._up = Gauge(
            "headgate_store_up",
            "Whether the store answered the last call.",
            ["limiter"],
            registry=None,
            multiprocess_mode="livemin",
        )
        self._errors = Counter(
            "headgate_store_errors", "Calls that raised.", ["limiter", "error"], registry=None
        )
        self._held = Gauge(
            "headgate_held_units",
            "Units of open holds.",
            ["limiter"],
            registry=None,
            multiprocess_mode="sum",
        )
        self._metrics = (self._decisions, self._seconds, self._up, self._errors, self._held)
        self._stores: weakref.WeakSet[Any] = weakref.WeakSet()
        self._healths: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._shown = top_keys
        self._refused: TopKeys[tuple[str, str]] = TopKeys(max(1, top_keys * _FOLLOWED_PER_SHOWN))
        # Looking up the child for a set of labels takes longer than counting, so children are cached.
        self._counters: dict[tuple[str, str, bool, bool], Counter] = {}
        self._timers: dict[tuple[str, str], Histogram] = {}
        self._known_up: dict[str, bool] = {}
        self._lock = watch(threading.Lock())
        _register(registry, self, type(self).__name__)  # all metrics or none
        watch(self)

    def after_fork_in_child(self) -> None:
        """Set the store gauges again: in the child process they start at 0."""
        self._known_up.clear()

    def attached(self, limiter: Any) -> None:
        if hasattr(limiter.store, "overflowed"):
            self._stores.add(limiter.store)
        if limiter.store.remote:
            # All limiters on a store share this value.
            self._healths[limiter.store] = limiter.health
        self._held.labels(limiter.name)
        self._set_up(limiter.name, True)

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        self.decided_alike(call, decision, (seconds,))
        if not decision.allowed:
            if self._shown and call.operation != "check":
                self._refused.add((call.limiter, _label(call.key)))
        elif call.operation == "hold":
            self._held.labels(call.limiter).inc(total(call.cost))

    def decided_alike(self, call: Call, decision: Decision, seconds: Sequence[float]) -> None:
        """Count calls that differ only in key and duration; for code that batches calls.

        It updates neither held units nor the most refused keys.
        """
        self._set_up(call.limiter, not decision.degraded)
        if not decision.degraded:
            self._observe(self._timer(call), seconds)
        if call.operation != "check":
            counter = self._counter(call.limiter, decision.rule or "", decision.allowed, decision.degraded)
            counter.inc(len(seconds))

    def _observe(self, timer: Histogram, seconds: Sequence[float]) -> None:
        if len(seconds) == 1:
            timer.observe(seconds[0])
            return
        # Like `observe`, but without taking a lock for each value.
        timer._sum.inc(sum(seconds))
        for bucket, count in Tally(bisect_left(self._bounds, each) for each in seconds).items():
            timer._buckets[bucket].inc(count)

    def completed(self, call: Call, seconds: float, degraded: bool) -> None:
        if call.operation != "refund":  # a refund ends the same way whether the store answered or not
            self._set_up(call.limiter, not degraded)
        if not degraded:
            self._timer(call).observe(seconds)

    def settled(self, call: Call, cost: Cost | None) -> None:
        self._held.labels(call.limiter).dec(total(call.cost))

    def failed(self, call: Call, error: Exception, seconds: float) -> None:
        self._errors.labels(call.limiter, type(error).__name__).inc()
        if isinstance(error, StoreError):
            self._set_up(call.limiter, False)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics whose names must be unique in a registry."""
        return [described for metric in self._metrics for described in metric.describe()]

    def collect(self) -> Iterator[Metric]:
        """Yield the counted metrics, and the values read at scrape time: store figures and the most refused keys."""
        for metric in self._metrics:
            yield from metric.collect()
        stores = list(self._stores)
        yield GaugeMetricFamily("headgate_memory_keys", "States in memory.", value=sum(map(len, stores)))
        yield CounterMetricFamily(
            "headgate_memory_overflowed",
            "Calls counted under a shared key because the store was full.",
            value=sum(store.overflowed for store in stores),
        )
        yield CounterMetricFamily(
            "headgate_store_overloads",
            "Calls that this process could not send to a store in time.",
            value=sum(health.overloads for health in list(self._healths.values())),
        )
        if self._shown:
            top = GaugeMetricFamily(
                "headgate_top_refused",
                "Refusals of the most refused keys (lower bound).",
                labels=["limiter", "key"],
            )
            for labels, count in self._refused.top(self._shown):
                top.add_metric(labels, count)
            yield top

    def _set_up(self, limiter: str, up: bool) -> None:
        if self._known_up.get(limiter) is not up:
            with self._lock:  # keeps the cached state and the gauge consistent
                self._known_up[limiter] = up
                self._up.labels(limiter).set(up)

    def _timer(self, call: Call) -> Histogram:
        found = self._timers.get((call.limiter, call.operation))
        if found is None:
            found = self._seconds.labels(call.limiter, call.operation)
            self._timers[call.limiter, call.operation] = found
        return found

    def _counter(self, limiter: str, rule: str, allowed: bool, degraded: bool) -> Counter:
        found = self._counters.get((limiter, rule, allowed, degraded))
        if found is None:
            outcome = "admitted" if allowed else "refused"
            found = self._decisions.labels(limiter, rule, outcome, str(degraded).lower())
            self._counters[limiter, rule, allowed, degraded] = found
        return found


class ShadowHook(Hook):
    """Count the decisions of shadow rules; for the `shadow_hooks=` of a policy.

        headgate_shadow_decisions_total{limiter, rule, outcome}      outcome: admitted, refused, failed

    `failed` means that the rule could not be evaluated: the store was down, or the key lacks its scope. The label `rule` is
    empty if the failing rule is unknown. A cost above the rule's capacity is a refusal.

    Args:
        registry: The registry; by default the global registry of `prometheus_client`.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        _check_registry(registry)
        self._decisions = Counter(
            "headgate_shadow_decisions",
            "Decisions of shadow rules.",
            ["limiter", "rule", "outcome"],
            registry=None,
        )
        _register(registry, self._decisions, type(self).__name__)

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        outcome = "failed" if decision.degraded else "admitted" if decision.allowed else "refused"
        self._decisions.labels(call.limiter, decision.rule or "", outcome).inc()

    def failed(self, call: Call, error: Exception, seconds: float) -> None:
        rule = getattr(error, "rule", "")
        self._decisions.labels(
            call.limiter, rule, "refused" if isinstance(error, CostTooHigh) else "failed"
        ).inc()


def _check_registry(registry: CollectorRegistry) -> None:
    check_kind("registry", registry, CollectorRegistry, "a CollectorRegistry of prometheus_client")


def _register(registry: CollectorRegistry, collector: Collector, hook: str) -> None:
    try:
        registry.register(collector)
    except ValueError as error:
        raise ConfigError(
            f"the registry already has these metrics, probably from another {hook}; give all limiters the same {hook}, "
            f"or each {hook} a separate registry: {hook}(CollectorRegistry())"
        ) from error


def _label(key: Key | None) -> str:
    if isinstance(key, Mapping):
        return ",".join(f"{scope}:{_label(part)}" for scope, part in key.items())[:_LONGEST_LABEL]
    text = "" if key is None else key if isinstance(key, str) else repr(key)
    # One label that cannot be encoded would make the whole scrape fail.
    return text[:_LONGEST_LABEL].encode("utf-8", "backslashreplace").decode()
