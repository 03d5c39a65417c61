# Generated from src/headgate/policy/_async/live.py by tools/unasync.py. Do not edit.
"""A policy that follows its file."""

from __future__ import annotations

from headgate.errors import StoreError
from headgate.policy._sync.limiter import PolicyLimiter, Version
from headgate.policy.watch import Watched
from headgate.stores import open_store


class LivePolicy(Watched[PolicyLimiter]):
    """The limiters of a policy by name, always as the newest policy says.

        live = LivePolicy.from_file("headgate.toml")
        live["login"].hit("alice")

    A limiter is the same object for life. One that a newer policy no longer has is no longer in the mapping, but goes on
    working unchanged for code that still has it; if a later policy names it again, it is the same object. There is one store
    per URL, which all its limiters share, also over reloads; `close` closes them all.

    Args:
        policy: What to begin with.
        hooks: What hears of the limiters' decisions.
        shadow_hooks: What hears what shadow rules would have decided, as `decided` and `failed`, with the limiter's name
            and the rule's.
        clock: Where time comes from, instead of the stores' own clocks.

    Attributes:
        policy: The newest policy that could be used.
        clock: Where time comes from, instead of the stores' own clocks.
        last_error: Why the newest file is not in force; `None` if it is.
    """

    _version_type = Version
    _limiter_type = PolicyLimiter
    _open_store = staticmethod(open_store)

    def ping(self) -> dict[str, StoreError | None]:
        """Ask every store whether it can count; return by its URL what is wrong, `None` if nothing is.

        `StoreUnavailable` if it is down: limiters then answer by their policies. `StoreMisconfigured` if it refuses.
        """
        found: dict[str, StoreError | None] = {}
        # Without rules none is asked.
        for limiter in sorted(self.values(), key=lambda limiter: not limiter.rules):
            if limiter.policy.store not in found:
                try:
                    limiter.ping()
                except StoreError as error:
                    found[limiter.policy.store] = error
                else:
                    found[limiter.policy.store] = None
        return found

    def close(self) -> None:
        """Close all stores."""
        for store in list(self._stores.values()):  # a reload may open another one meanwhile
            store.close()

    def __enter__(self) -> LivePolicy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
