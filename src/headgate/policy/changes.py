"""What is different between two policies, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from headgate.policy.model import LimiterPolicy, Policy, ServerPolicy
from headgate.rules import Rule

_READ_AT_START = frozenset({"host", "port", "record", "record_bytes", "record_keys", "history"})
"""Settings of the server that a reload does not put in force."""

T = TypeVar("T", LimiterPolicy, ServerPolicy)


def changes(old: Policy, new: Policy) -> list[str]:
    """Return what has changed, a few words each; nothing secret is among them."""
    found = list(_limiters(old.limiters, new.limiters))
    if server := list(_server(old.server, new.server)):
        found.append(f"server: {', '.join(server)}")
    return found


def _server(old: ServerPolicy, new: ServerPolicy) -> Iterator[str]:
    for name in _different(old, new):
        yield f"{name} (after a restart)" if name in _READ_AT_START else name


def _limiters(old: Mapping[str, LimiterPolicy], new: Mapping[str, LimiterPolicy]) -> Iterator[str]:
    for name, limiter in new.items():
        if name not in old:
            yield f"{name} is new"
        elif limiter != old[name]:
            yield f"{name}: {', '.join(_parts(old[name], limiter)) or 'order of rules'}"
    for name in old.keys() - new.keys():
        yield f"{name} is gone"


def _parts(old: LimiterPolicy, new: LimiterPolicy) -> Iterator[str]:
    yield from _rules(old.rules, new.rules, "")
    yield from _rules(old.shadow, new.shadow, "shadow ")
    # A store's URL may have a password in it, and overrides may be many, so only their names are shown.
    yield from (name for name in _different(old, new) if name not in ("name", "rules", "shadow"))


def _different(old: T, new: T) -> Iterator[str]:
    """Yield the names of the fields that differ."""
    for part in fields(type(old)):
        if part.compare and getattr(old, part.name) != getattr(new, part.name):
            yield part.name


def _rules(old: tuple[Rule, ...], new: tuple[Rule, ...], what: str) -> Iterator[str]:
    before: dict[str, Any] = {rule.name: rule for rule in old}
    after = {rule.name: rule for rule in new}
    for name, rule in after.items():
        if name not in before:
            yield f"{what}{name} {rule.text_of(rule.quota)} added"
        elif rule.quota != before[name].quota:
            old_text, new_text = (each.text_of(each.quota) for each in (before[name], rule))
            yield f"{what}{name} " + (f"{old_text} -> {new_text}" if old_text != new_text else "changed")
        elif rule != before[name]:
            yield f"{what}{name} changed"
    for name in before.keys() - after.keys():
        yield f"{what}{name} removed"
