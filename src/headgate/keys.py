"""Keys: who is limited, and what that is called in a store.

A call's key is text or bytes, or a mapping with one such entry per scope. Text and bytes are different keys, even where
their bytes agree. In a store a state is found by (namespace, limiter name, rule identity, key), each part written with its
length before it, so that no choice of text makes two of them alike; a long key is replaced by its digest.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from typing import Any

from headgate.errors import ConfigError, listed
from headgate.rules import SHARED, Rule, scopes_of

__all__ = ["BASE64", "Key", "PlainKey", "key_to_data"]

PlainKey = str | bytes
"""A key for one scope. Text and bytes are different keys."""
Key = PlainKey | Mapping[str, PlainKey]
"""The key of a call: one for all rules, or a mapping with one for each scope."""

LONGEST_KEY = 128
"""Bytes up to which a key is stored as it is."""

BASE64 = "$base64"
"""The one entry of an object that stands for bytes where a key is data, as between a client and a server."""

SHARED_KEY = "*"
"""The key of the one counter of a rule with the scope `"*"`; such a rule's identity belongs to it alone."""


def key_picker(rules: Collection[Rule]) -> Callable[[Key | None], tuple[PlainKey, ...]]:
    """Return a function from a call's key to the key of each rule, in order.

    It raises ConfigError for a key that is missing, of another type, or without a scope that a rule counts by, and for
    a mapping with an entry that no rule counts by: a misspelt scope must not pass as unlimited.
    """
    scopes = tuple(rule.scope for rule in rules)
    if all(scope == SHARED for scope in scopes):
        shared = (SHARED_KEY,) * len(scopes)
        return lambda key: shared
    if None in scopes:
        return lambda key: tuple(SHARED_KEY if scope == SHARED else check_plain(key) for scope in scopes)
    named = scopes_of(rules)
    return lambda key: _scoped(key, scopes, named)


def check_plain(key: object) -> PlainKey:
    """Return the key if it is text or bytes; of a subclass, the text or bytes in it.

    So no store ever calls the `__hash__` or `__eq__` of a caller's class, which could do anything, in the middle of a call.
    """
    if type(key) is str or type(key) is bytes:
        return key
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bytes):
        return bytes.__add__(key, b"")
    if key is None:
        raise ConfigError("a key is missing: say who is limited, as in limiter.hit('alice')")
    if isinstance(key, Mapping):
        raise ConfigError(
            f"the rules have no scope, so the key is text or bytes, not a mapping: {dict(key)!r}"
        )
    raise ConfigError(f"a key is text or bytes, not {key!r}; write str({key!r}) if that is meant")


def _scoped(key: Key | None, scopes: tuple[str | None, ...], named: frozenset[str]) -> tuple[PlainKey, ...]:
    if not isinstance(key, Mapping):
        raise ConfigError(
            f"the rules count by {listed(named)}, so the key is a mapping like "
            f"{dict.fromkeys(sorted(named), '…')}, not {key!r}"
        )
    if key.keys() != named:
        missing, unknown = named - key.keys(), key.keys() - named
        problem = f"no entry for {listed(missing)}" if missing else f"no rule counts by {listed(unknown)}"
        raise ConfigError(f"key {dict(key)!r}: {problem}; the rules count by {listed(named)}")
    return tuple(
        SHARED_KEY if scope is None or scope == SHARED else check_plain(key[scope]) for scope in scopes
    )


def key_to_data(key: Key | None) -> str | dict[str, Any] | None:
    """Return a key as JSON can say it.

    Raises:
        ConfigError: A mapping that reads like bytes.
    """
    if isinstance(key, Mapping):
        if key.keys() == {BASE64}:
            raise ConfigError(f"a scope called {BASE64!r} cannot be distinguished from bytes; rename it")
        return {scope: key_to_data(part) for scope, part in key.items()}
    return {BASE64: b64encode(key).decode("ascii")} if isinstance(key, bytes) else key


def storage_prefix(namespace: str, limiter: str, rule: Rule) -> bytes:
    """Return what the storage keys of all states of a rule begin with."""
    parts = (namespace, limiter, rule.identity)
    return b"".join(_part(text.encode("utf-8", "surrogatepass")) for text in parts)


def storage_key(prefix: bytes, key: PlainKey) -> bytes:
    """Return the name of a key's state in a store."""
    kind, raw = (b"t", key.encode("utf-8", "surrogatepass")) if isinstance(key, str) else (b"b", key)
    if len(raw) > LONGEST_KEY:
        kind, raw = kind.upper(), blake2b(raw, digest_size=32).digest()
    return prefix + kind + raw


def storage_keys(
    namespace: str, limiter: str, rules: Collection[Rule]
) -> Callable[[Key | None], tuple[bytes, ...]]:
    """Return a function from a call's key to the name of each rule's state in a store; it raises like `key_picker`."""
    prefixes = [storage_prefix(namespace, limiter, rule) for rule in rules]
    if not prefixes or any(rule.scope is not None for rule in rules):
        pick = key_picker(rules)
        return lambda key: tuple(map(storage_key, prefixes, pick(key)))

    def plain(key: Key | None) -> tuple[bytes, ...]:
        end = storage_key(b"", check_plain(key))  # once, because all rules count by the same key
        return tuple([prefix + end for prefix in prefixes])

    return plain


def note_key(namespace: str, name: str) -> bytes:
    """Return the name of a note in a store; it is none that a state can have, because there a length would follow."""
    return storage_key(_part(namespace.encode("utf-8", "surrogatepass")) + b"note:", name)


def _part(raw: bytes) -> bytes:
    return b"%d:%b" % (len(raw), raw)
