"""Outages of a store: circuit breaker, failure policies, fallback answers and health.

A limiter does all this by itself. A program that calls another server directly can use the same circuit breaker:

    circuit = AsyncCircuit(Breaker("the database"), probe)
    answer = await circuit.call(True, decide, request)

`decide` and `probe` raise `StoreUnavailable` if the server is down. After the first such error, calls raise it at once until
a probe in the background succeeds.
"""

from headgate.outage._async.gate import AsyncCircuit
from headgate.outage._sync.gate import Circuit
from headgate.outage.breaker import Breaker, breaker_of
from headgate.outage.fallback import Health
from headgate.outage.policies import (
    FailureData,
    Local,
    OnOverload,
    OnStoreError,
    local,
    policy_from_data,
    policy_to_data,
)

__all__ = [
    "AsyncCircuit",
    "Breaker",
    "Circuit",
    "FailureData",
    "Health",
    "Local",
    "OnOverload",
    "OnStoreError",
    "breaker_of",
    "local",
    "policy_from_data",
    "policy_to_data",
]
