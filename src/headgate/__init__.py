"""Rate limiting with exact answers on every store.

```python
from headgate import Limiter

limiter = Limiter("5/minute", "50/hour")
if not (decision := limiter.hit("alice")):
    print(decision.retry_after, decision.denied_by)
```
"""

import headgate.build  # noqa: F401  # first: it chooses how the rest is loaded
from headgate._async.hold import AsyncHold
from headgate._async.limiter import AsyncLimiter
from headgate._sync.hold import Hold
from headgate._sync.limiter import Limiter
from headgate.decision import Decision, RuleResult
from headgate.errors import (
    ConfigError,
    CostTooHigh,
    HeadgateError,
    RateLimited,
    StoreConflict,
    StoreError,
    StoreMisconfigured,
    StoreOverloaded,
    StoreTimeout,
    StoreUnavailable,
)
from headgate.hooks import Hook
from headgate.outage.policies import local
from headgate.quota import Quota
from headgate.rules import (
    Rule,
    calendar,
    concurrent,
    fixed_window,
    penalty,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.stores import MemoryStore, SQLiteStore, open_async_store, open_store

__version__ = "0.1.0"
"""The version of this package, and of the server and services that belong to it."""

__all__ = [
    "AsyncHold",
    "AsyncLimiter",
    "ConfigError",
    "CostTooHigh",
    "Decision",
    "HeadgateError",
    "Hold",
    "Hook",
    "Limiter",
    "MemoryStore",
    "Quota",
    "RateLimited",
    "Rule",
    "RuleResult",
    "SQLiteStore",
    "StoreConflict",
    "StoreError",
    "StoreMisconfigured",
    "StoreOverloaded",
    "StoreTimeout",
    "StoreUnavailable",
    "__version__",
    "calendar",
    "concurrent",
    "fixed_window",
    "local",
    "open_async_store",
    "open_store",
    "penalty",
    "sliding_log",
    "sliding_window",
    "token_bucket",
]
