"""Failure policies: how a limiter answers while its store is down.

A policy is `"open"`, `"closed"`, `"raise"` or `local(share=0.25)`. In files and between processes it is the same text, or
`{"local": 0.25}`. The share survives the conversion exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypedDict, cast

from headgate._checks import is_number
from headgate.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Local:
    """Limit in the memory of each process, with a share of each limit; made by `local`."""

    share: float

    def __post_init__(self) -> None:
        if not is_number(self.share) or not 0 < self.share <= 1:  # also false for NaN
            raise ConfigError(f"a share is a number above 0 and at most 1, not {self.share!r}")

    @property
    def fraction(self) -> Fraction:
        """The share as it was written: 0.3 of 10 is 3, though the double is below it."""
        return Fraction(repr(self.share))


OnStoreError = Literal["open", "closed", "raise"] | Local
"""How a limiter answers while its store is down."""

OnOverload = Literal["refuse", "policy"]
"""How a limiter answers when this process could not send a call in time: refuse, or follow the failure policy."""


class LocalData(TypedDict):
    """Each process separately admits this share of every limit."""

    local: float


FailureData = Literal["open", "closed", "raise"] | LocalData
"""A failure policy as data."""


def local(share: float = 0.25) -> Local:
    """Return the policy to limit in this process's memory with a share of each limit while the store is down.

    With n processes, an outage admits at most n times the share of each limit. A share that leaves less than one whole
    unit of a limit admits nothing there.
    """
    return Local(share)


def check_policy(policy: OnStoreError) -> OnStoreError:
    """Raise `ConfigError` for an unknown failure policy."""
    if isinstance(policy, Local) or policy in ("open", "closed", "raise"):
        return policy
    raise ConfigError(f"on_store_error is 'open', 'closed', 'raise' or local(share=0.25), not {policy!r}")


def check_overload(policy: OnOverload) -> OnOverload:
    """Raise `ConfigError` for an unknown overload policy."""
    if policy in ("refuse", "policy"):
        return policy
    raise ConfigError(f"on_overload is 'refuse' or 'policy', not {policy!r}")


def policy_to_data(policy: OnStoreError) -> FailureData:
    """Return a failure policy as data."""
    return {"local": policy.share} if isinstance(policy, Local) else policy


def policy_from_data(data: object) -> OnStoreError:
    """Return the failure policy for data from `policy_to_data`.

    Raises:
        ConfigError: The policy is unknown.
    """
    if isinstance(data, Mapping) and data.keys() == {"local"}:
        return local(data["local"])
    return check_policy(cast(OnStoreError, data))
