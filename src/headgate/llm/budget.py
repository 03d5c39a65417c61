"""Budgets of a provider account, without I/O: costs of calls, final costs, and corrections by reported limits."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypedDict

from headgate._checks import check_count, is_number
from headgate._fork import watch
from headgate._steps import Steps
from headgate.clock import MICROSECONDS, dating
from headgate.decision import Decision
from headgate.errors import ConfigError, StoreError, listed
from headgate.http.client.reports import ReportedLimit, reported_limits
from headgate.http.limit import AnyLimiter
from headgate.keys import Key
from headgate.llm.estimates import Tokenizer, default_tokenizer, estimate
from headgate.llm.usage import Price, Usage
from headgate.quota import Quota
from headgate.rules import REQUESTS, Rule

logger = logging.getLogger("headgate.llm")

MICRODOLLARS = "microdollars"
UNITS = (REQUESTS, "tokens", "input_tokens", "output_tokens", MICRODOLLARS)
"""The units that rules of a budget may have."""

CORRECTED = frozenset({"sliding_window", "sliding_log", "fixed_window", "token_bucket"})
"""The kinds of rules that reports correct."""

LONGEST_REPORTED_US = 3600 * MICROSECONDS
"""The longest period of a rule that reports correct. Providers report their limits per minute."""

DEFAULT_OUTPUT = 1024
"""The estimated output tokens of a request without a maximum."""


class BudgetOptions(TypedDict, total=False):
    """The arguments of a budget except the limiter."""

    prices: Mapping[str, Price] | None
    key: Callable[[str], Key] | None
    tokenizer: Tokenizer
    default_output: int
    max_wait: float


class BudgetBase(Generic[AnyLimiter]):
    """The part of budgets that does not call the store.

    Args:
        limiter: A limiter whose rules count `requests`, `tokens`, `input_tokens`, `output_tokens` or `microdollars`.
        prices: The price of each model; required by rules that count `microdollars`.
        key: A function from the model to the key to count by; by default the model. Use scopes for limits of the account.
        tokenizer: Counts the tokens of a text for estimates; by default one token for three bytes.
        default_output: The estimated output tokens of a request without a maximum.
        max_wait: The longest wait for units in seconds; `math.inf` for no limit.

    Raises:
        ConfigError: A rule counts another unit, or `prices=` is missing.
    """

    def __init__(
        self,
        limiter: AnyLimiter,
        *,
        prices: Mapping[str, Price] | None = None,
        key: Callable[[str], Key] | None = None,
        tokenizer: Tokenizer = default_tokenizer,
        default_output: int = DEFAULT_OUTPUT,
        max_wait: float = 90.0,
    ) -> None:
        self.limiter: Any = limiter
        self._units = {rule.unit for rule in limiter.rules}
        if unknown := self._units - set(UNITS):
            raise ConfigError(
                f"a budget counts {listed(UNITS)}, not {listed(unknown)}; change unit= of the rule"
            )
        if MICRODOLLARS in self._units and prices is None:
            raise ConfigError("a rule counts microdollars: add prices={'model': Price(input=…, output=…)}")
        check_count("default_output", default_output, 0, 1_000_000_000)
        if not is_number(max_wait) or not max_wait >= 0:
            raise ConfigError(f"max_wait must be a number of seconds from 0, not {max_wait!r}")
        self.max_wait = max_wait
        self._prices, self._key = prices or {}, key
        self.tokenizer, self._default_output = tokenizer, default_output
        self._dates = dating(limiter.clock)
        self._corrections: dict[tuple[str, str], int] = {}
        self._calls: weakref.WeakSet[CallBase] = weakref.WeakSet()
        self._lock = watch(threading.RLock())

    def key_for(self, model: str) -> Key:
        """Return the key that calls of a model count by."""
        return model if self._key is None else self._key(model)

    def estimate(self, request: Mapping[str, Any]) -> Usage:
        """Estimate the usage of a request: its prompt, and the most output that it allows."""
        return estimate(request, self.tokenizer, self._default_output)

    def estimate_of(self, estimated: Usage | Mapping[str, Any] | None) -> Usage:
        """Return the estimate for the argument of `call`."""
        if isinstance(estimated, Usage):
            return estimated
        if estimated is None or isinstance(estimated, Mapping):
            return self.estimate(estimated or {})
        raise ConfigError(f"estimated= is a Usage or the request, not {estimated!r:.60}")

    def costs(self, model: str, usage: Usage) -> dict[str, int]:
        """Return the cost of a call by unit.

        Raises:
            ConfigError: A rule counts microdollars, and the model has no price.
        """
        costs = {
            REQUESTS: 1,
            "tokens": usage.counted_input + usage.output_tokens,
            "input_tokens": usage.counted_input,
            "output_tokens": usage.output_tokens,
        }
        if MICRODOLLARS in self._units:
            price = self._prices.get(model)
            if price is None:
                raise ConfigError(
                    f"model {model!r} has no price: add it to prices=, which has {listed(self._prices)}"
                )
            costs[MICRODOLLARS] = price.microdollars(usage)
        return {unit: cost for unit, cost in costs.items() if unit in self._units or unit == REQUESTS}

    def observe(self, call: CallBase, decision: Decision) -> None:
        """Note the remaining units after the hold of a call, for it and for all calls in progress with its key."""
        call.left = {result.name: result.remaining for result in decision.results}
        with self._lock:
            for other in self._calls:
                if other.key == call.key:
                    for rule, left in call.left.items():
                        since = self.corrected(call.key, rule) - other.corrected.get(rule, 0)
                        other.left[rule] = min(other.left.get(rule, 0), left + since)
            self._calls.add(call)

    def forget(self, call: CallBase) -> None:
        """Forget a finished call."""
        with self._lock:
            self._calls.discard(call)

    def corrected(self, key: Key, rule: str) -> int:
        """Return the units that reports have added so far, in this process."""
        return self._corrections.get((str(key), rule), 0)

    def correct(self, call: CallBase, headers: Mapping[str, str]) -> Steps:
        """Lower the remaining units of the limiter to the reported ones, if these are fewer, and keep a reserve.

        Decision 27 has the reasons.
        """
        reported = list(self._reported(call, headers))
        gaps = list(self._gaps(call, reported))
        surcharges = dict(self._surcharges(call, reported))
        try:
            if gaps:
                yield from self._correct(call, gaps)
            if surcharges:
                request = self._recording(call.key, surcharges)
                yield from self._decide(call.key, request, surcharges)
        except StoreError:
            logger.warning("a budget was not corrected by what the provider reported", exc_info=True)

    def _correct(self, call: CallBase, gaps: list[Gap]) -> Steps:
        key, limiter = call.key, self.limiter.current
        now: Decision = yield limiter.check(key, 0)
        left = {result.name: result for result in now.results}
        for rule, believed, reported in gaps:
            found = left.get(rule.name)
            if found is None:  # the store is down
                continue
            missing = min(believed, found.remaining) - reported
            if missing <= 0:
                continue
            request = self._recording(key, {rule.name: missing})
            if rule.kind != "token_bucket":
                # Admitted only if no other call charged this rule since `check`, for example for the same report.
                most = Quota(found.limit - found.remaining + missing, rule.quota.period_us)
                request = limiter.request("hold", key, 0, quota={rule.name: most}, is_final=False)
                request = request.with_costs(tuple(missing if own is rule else 0 for own in limiter.rules))
            # In a bucket another quota would cost the open holds their refunds; see decision 27.
            yield from self._decide(key, request, {rule.name: missing})

    def _recording(self, key: Key, units: Mapping[str, int]) -> Any:
        """Return a request that charges units by rule, whatever remains."""
        limiter = self.limiter.current
        costs = tuple(units.get(rule.name, 0) for rule in limiter.rules)
        return limiter.request("record", key, 0).with_costs(costs)

    def _decide(self, key: Key, request: Any, units: Mapping[str, int]) -> Steps:
        decision, _ = yield self.limiter.current.gate.decide(request)
        if decision.allowed:
            for rule, charged in units.items():
                self._corrections[str(key), rule] = self.corrected(key, rule) + charged

    def _gaps(self, call: CallBase, reported: list[Reported]) -> Iterator[Gap]:
        """Yield the rules whose remaining units were more than the provider reports, at all times since the hold."""
        for rule, report in reported:
            since = self.corrected(call.key, rule.name) - call.corrected[rule.name]
            believed = call.left[rule.name] - since
            if believed > report.remaining:
                yield Gap(rule, believed, report.remaining)

    def _surcharges(self, call: CallBase, reported: list[Reported]) -> Iterator[tuple[str, int]]:
        """Yield the rules whose reserve at the provider was used by other programs, and the additional cost of the call.

        The reserve is the part of the provider's limit above the burst of a bucket. Below half of it, a call costs up
        to twice its estimate, so that the rate falls while the budget is used up; see decision 27.
        """
        for rule, report in reported:
            if rule.kind != "token_bucket" or report.limit is None:
                continue
            reserve = (report.limit - (rule.quota.burst or rule.quota.limit)) / 2
            if report.remaining < reserve:
                cost = self.costs(call.model, call.estimated)[rule.unit]
                yield rule.name, math.ceil(cost * (1 - report.remaining / reserve))

    def _reported(self, call: CallBase, headers: Mapping[str, str]) -> Iterator[Reported]:
        """Yield the limits in the header fields of a response, each with the rule that it corrects."""
        reports = reported_limits(headers, self._dates.now_us() / MICROSECONDS)
        rules = self._reported_rules() if reports else {}
        for report in reports:
            rule = rules.get(report.unit)
            if rule is not None and rule.name in call.left:
                yield Reported(rule, report)

    def _reported_rules(self) -> dict[str, Rule]:
        """Return the rule with the shortest period for each unit."""
        rules: dict[str, Rule] = {}
        for rule in sorted(self.limiter.current.rules, key=lambda rule: -rule.quota.period_us):
            if rule.kind in CORRECTED and rule.quota.period_us <= LONGEST_REPORTED_US:
                rules[rule.unit] = rule
        return rules


class Reported(NamedTuple):
    """A limit that the provider reported, and the rule that it corrects."""

    rule: Rule
    report: ReportedLimit


class Gap(NamedTuple):
    """A rule with more remaining units than the provider reports."""

    rule: Rule
    believed: int
    reported: int


class CallBase:
    """A call to a model, from the hold of its estimated usage until it is settled.

    Attributes:
        model: The model.
        key: The key that it counts by.
        estimated: The estimated usage.
        usage: The usage that was reported so far; `None` before.
        left: The fewest remaining units per rule in this process since the hold, without corrections since.
        corrected: The corrections of each rule before the hold.
    """

    def __init__(
        self,
        budget: BudgetBase[Any],
        model: str,
        estimated: Usage | Mapping[str, Any] | None,
        key: Key | None,
        timeout: float | None,
    ) -> None:
        self._budget = budget
        self.model = model
        self.key = budget.key_for(model) if key is None else key
        self.estimated = budget.estimate_of(estimated)
        self.usage: Usage | None = None
        self.left: dict[str, int] = {}
        self.corrected: dict[str, int] = {}
        self._timeout = budget.max_wait if timeout is None else timeout
        self._progress: int | None = None
        self._is_released = False
        self._hold: Any = None

    def settle(self, usage: Any) -> None:
        """Set the true usage: a `Usage` or the `usage` of a response. The end of the block settles the hold with it.

        It may be called several times, for example with each event of a stream; the last usage counts.
        """
        self.usage = Usage.of(usage)

    def progress(self, output_tokens: int) -> None:
        """Set the output tokens received so far, for a stream that may end before its usage is known."""
        self._progress = output_tokens

    def tokens(self, text: str) -> int:
        """Return the estimated tokens of a text."""
        return self._budget.tokenizer(text)

    def release(self) -> None:
        """Give everything back at the end of the block: the call was not sent."""
        self._is_released = True

    def _open(self) -> Steps:
        budget = self._budget
        costs = budget.costs(self.model, self.estimated)
        self.corrected = {
            rule.name: budget.corrected(self.key, rule.name) for rule in budget.limiter.current.rules
        }
        self._hold = yield budget.limiter.hold(self.key, costs, timeout=self._timeout)
        budget.observe(self, self._hold.decision)

    def _close(self, failure: BaseException | None) -> Steps:
        self._budget.forget(self)
        cost = self._final(failure)
        try:
            yield self._hold.settle(cost)
        except StoreError:  # the caller has the answer, and must not lose it
            logger.warning(
                "a call was not settled at %s: it keeps its estimate until it expires", cost, exc_info=True
            )

    def _final(self, failure: BaseException | None) -> Any:
        """Return the final cost, as known at the end of the block."""
        if self._is_released:
            return 0
        usage = self.usage
        if usage is None and self._progress is not None:
            usage = replace(self.estimated, output_tokens=self._progress)
        if usage is None:
            # Providers do not charge tokens for a call that failed. After a time-out or a cancellation this is unknown.
            is_unknown = not isinstance(failure, Exception) or isinstance(failure, TimeoutError)
            usage = self.estimated if failure is None or is_unknown else Usage()
        return self._budget.costs(self.model, usage)
