"""For programs that reach a server by themselves: calls through a breaker, with probes in the background.

    circuit = AsyncCircuit(Breaker("the database"), probe)
    answer = await circuit.call(True, ask, question)

`ask` and `probe` raise `StoreUnavailable` if the server is down. After the first such error calls raise it at once, until a
probe has succeeded. Limiters do all this by themselves.
"""

from headgate._async.resilience import AsyncCircuit
from headgate._sync.resilience import Circuit
from headgate.stores.breaker import Breaker, breaker_of

__all__ = ["AsyncCircuit", "Breaker", "Circuit", "breaker_of"]
