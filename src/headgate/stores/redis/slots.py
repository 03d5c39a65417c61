"""Slots of a cluster: hash tags in the names of states, which choose their slots."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Literal

from redis.crc import key_slot

from headgate.errors import ConfigError, listed
from headgate.keys import PlainKey, key_picker, storage_key, storage_prefix
from headgate.rules import Rule
from headgate.stores.redis.codec import ScriptCall
from headgate.stores.redis.operations import StateKeys

Tag = Literal["limiter", "key"]
"""The states that share a slot: all of a limiter, or those with the same key."""


def tagged_keys(namespace: str, limiter: str, rules: tuple[Rule, ...], tag: Tag) -> StateKeys:
    """Return a function like that of `storage_keys`, with a hash tag in each key.

    Raises:
        ConfigError: The states of a call would be in several slots, which no call of the script can reach.
    """
    scopes = {rule.scope or "no scope" for rule in rules}
    if tag == "key" and len(scopes) > 1:
        raise ConfigError(
            f"the rules of limiter {limiter!r} count by different keys ({listed(scopes)}), which are in different slots of "
            'the cluster; write RedisStore(..., hash_tag="limiter"), or ?hash_tag=limiter in the URL, to keep all counts of '
            "a limiter in one slot, or make a limiter for each"
        )
    name_of = tagged_name(namespace, limiter, tag)
    pick, prefixes = key_picker(rules), [storage_prefix(namespace, limiter, rule) for rule in rules]
    return lambda key: tuple(map(name_of, prefixes, pick(key)))


def tagged_name(namespace: str, limiter: str, tag: Tag) -> Callable[[bytes, PlainKey], bytes]:
    """Return a function like `storage_key`, with a hash tag.

    The tag comes first, so that braces in the text of a key cannot choose another slot.
    """
    secret = blake2b(f"{len(namespace)}:{namespace}{limiter}".encode(), digest_size=32).digest()

    def tagged(prefix: bytes, key: PlainKey) -> bytes:
        digest = secret[:8].hex()
        if tag == "key":
            raw = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
            digest = blake2b(raw, digest_size=8, key=secret).hexdigest()
        return b"{%b}%b" % (digest.encode(), storage_key(prefix, key))

    return tagged


def slot_of(call: ScriptCall) -> int:
    """Return the slot of a call."""
    return int(key_slot(call.keys[0]))
