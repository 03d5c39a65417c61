"""Keys of calls, and the names of states in stores.

A call's key is text or bytes, or a mapping with one such entry per scope. Text and bytes are different keys, even if
their bytes are equal. The name of a state consists of namespace, limiter name, rule identity and key. Each part is preceded
by its length, so that no two names are equal; a long key is replaced by its digest.
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
"""Bytes of the longest key that is stored without hashing."""

BASE64 = "$base64"
"""The only entry of a JSON object that represents bytes in a key, as between client and server."""

SHARED_KEY = "*"
"""The key of the only counter of a rule with the scope `"*"`."""


def key_picker(rules: Collection[Rule]) -> Callable[[Key | None], tuple[PlainKey, ...]]:
    """Return a function from a call's key to the key of each rule, in order.

    It raises ConfigError if the key is missing or of another type, if the scope of a rule is missing, and if the mapping
    has an unknown scope: a misspelt scope must not be unlimited.
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
    """Return the key as plain `str` or `bytes`.

    Subclasses are converted, so that stores never run the `__hash__` or `__eq__` of a caller's class.
    """
    if type(key) is str or type(key) is bytes:
        return key
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bytes):
        return bytes.__add__(key, b"")
    if key is None:
        raise ConfigError("a key is missing: write for example limiter.hit('alice')")
    if isinstance(key, Mapping):
        raise ConfigError(
            f"the rules have no scope, so the key is text or bytes, not a mapping: {dict(key)!r}"
        )
    if isinstance(key, tuple):
        joined = ":".join(map(str, key))
        raise ConfigError(
            f"a key is text or bytes, not {key!r}; write one text, like {joined!r}, or give the rules scopes and pass a "
            "mapping, like {'user': 'alice', 'realm': 'north'}"
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
    """Return a key as JSON data.

    Raises:
        ConfigError: A mapping that looks like encoded bytes.
    """
    if isinstance(key, Mapping):
        if key.keys() == {BASE64}:
            raise ConfigError(f"a scope called {BASE64!r} cannot be distinguished from bytes; rename it")
        return {scope: key_to_data(part) for scope, part in key.items()}
    return {BASE64: b64encode(key).decode("ascii")} if isinstance(key, bytes) else key


def storage_prefix(namespace: str, limiter: str, rule: Rule) -> bytes:
    """Return the common prefix of the names of a rule's states."""
    parts = (namespace, limiter, rule.identity)
    return b"".join(_part(text.encode("utf-8", "surrogatepass")) for text in parts)


def storage_key(prefix: bytes, key: PlainKey) -> bytes:
    """Return the name of a state in a store."""
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
    """Return the name of a note in a store; states have other names, because they have a length in this place."""
    return storage_key(_part(namespace.encode("utf-8", "surrogatepass")) + b"note:", name)


def queue_prefix(namespace: str, limiter: str) -> bytes:
    """Return the common prefix of the names of a limiter's queues in a store.

    No state has such a name: there, the length of the next part follows.
    """
    parts = (text.encode("utf-8", "surrogatepass") for text in (namespace, limiter))
    return b"".join(map(_part, parts))


def _part(raw: bytes) -> bytes:
    return b"%d:%b" % (len(raw), raw)
