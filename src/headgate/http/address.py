"""Find the client address of a request. Pure.

Any client can send any `X-Forwarded-For` or `Forwarded` field, so neither is read unless the proxies in front of the
service are configured. A proxy appends the address that connected to it. Read from the right, the first entry that is not
one of our proxies is therefore the client. Entries to its left were written by the client and are ignored, regardless of
content and length. If an entry that must be read is not an address, the request counts under `malformed`, one key shared
by all such requests.

An IPv6 customer can choose any address of at least a /64, so the whole network counts as one client. An IPv4-mapped IPv6
address (`::ffff:192.0.2.1`) counts as the IPv4 address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import islice
from typing import Literal

from headgate.errors import ConfigError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

UNKNOWN = "unknown"
"""The key of requests without a peer address."""

MALFORMED: Literal["malformed"] = "malformed"
"""The key of requests whose forwarded field cannot be read."""

UNIX = "unix"
"""Placeholder in `networks` for a proxy that connects over a Unix socket and so has no address."""

_LONGEST_PEER = 64
_REMEMBERED = 4_096

# RFC 7239: pairs are separated by ';', elements by ','. Values may be quoted. Unquoted values may contain more characters
# than the RFC allows, because `for=[2001:db8::1]` without quotes is common.
_PAIR = re.compile(r"[ \t]*(?:([\w!#$%&'*+.^`|~-]+)=(?:\"((?:[^\"\\]|\\.)*)\"|([^\s\",;]*))[ \t]*)?(?:;|$)")
_ESCAPED = re.compile(r"\\(.)")
_WITH_PORT = re.compile(r"\[([^\[\]]*)\](?::[\w.-]*)?|([0-9.]+):[\w.-]*")


@dataclass(frozen=True, slots=True)
class Proxies:
    """The proxies whose forwarded addresses are trusted.

    Attributes:
        networks: Addresses and networks (`"10.0.0.0/8"`) of the proxies; `"unix"` for a proxy on a Unix socket. The field
            is read only if the peer is in one of them, up to the first entry outside of them.
        hops: Instead of networks, the number of proxies in front of the service. The client is the entry at this position
            from the right, for any peer. Use it only if clients cannot bypass the proxies.
        header: The field that the proxies write. Choose the field that your proxy overwrites or appends to; it forwards
            the other field as sent by the client.
    """

    networks: tuple[str, ...] = ()
    hops: int | None = None
    header: Literal["x-forwarded-for", "forwarded"] = "x-forwarded-for"

    def __post_init__(self) -> None:
        if bool(self.networks) == (self.hops is not None):
            raise ConfigError(
                "name the proxies either by networks, like '10.0.0.0/8', or by hops=, their number"
            )
        if self.hops is not None and (type(self.hops) is not int or self.hops < 1):
            raise ConfigError(f"hops is the number of proxies, at least 1, not {self.hops!r}")
        if self.header not in ("x-forwarded-for", "forwarded"):
            raise ConfigError(f"header is 'x-forwarded-for' or 'forwarded', not {self.header!r}")
        for network in self.networks:
            _check_network(network)


def client_address(
    peer: str | None, forwarded: Sequence[str], proxies: Proxies | None, *, ipv6_prefix: int = 64
) -> str:
    """Return the address to count a request by, as text: `192.0.2.1`, `2001:db8::/64`.

    Args:
        peer: The address of the connected peer; `None` if the server does not report it.
        forwarded: The values of the proxies' header field, in the order of its lines.
        proxies: The trusted proxies; `None` trusts no forwarded address.
        ipv6_prefix: The number of leading bits of an IPv6 address that identify a client.
    """
    found = None if proxies is None else _forwarded_client(peer, forwarded, proxies)
    if found is None:
        return peer_key(peer, ipv6_prefix)
    return found if isinstance(found, str) else _key(found, ipv6_prefix)


def peer_key(peer: str | None, ipv6_prefix: int) -> str:
    """Return the key of a peer address; a peer name that is not an IP address is used unchanged."""
    if peer is None:
        return UNKNOWN
    return _text_key(peer[:_LONGEST_PEER], ipv6_prefix)


def parse_address(text: str) -> Address | None:
    """Return the address in an entry of a forwarded field, with or without a port; `None` if it contains no address."""
    match = _WITH_PORT.fullmatch(text)
    if match:
        text = match[1] or match[2] or ""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        # Drop the zone: it is meaningful only on the machine that wrote it.
        return address.ipv4_mapped or IPv6Address(int(address))
    return address


def forwarded_entries(values: Iterable[str], header: str) -> Iterator[str]:
    """Yield the addresses in a field from right to left; `MALFORMED` where the rest cannot be parsed."""
    text = ",".join(values)
    read = _forwarded_entry if header == "forwarded" else _plain_entry
    end = len(text)
    while end >= 0:
        start, entry = read(text, end)
        if entry:
            yield entry
        end = start - 1  # the comma before it


def _plain_entry(text: str, end: int) -> tuple[int, str]:
    """Return where the last entry before `end` starts, and the entry."""
    start = text.rfind(",", 0, end) + 1
    return start, text[start:end].strip()


def _forwarded_entry(text: str, end: int) -> tuple[int, str]:
    """Return where the last element of a `Forwarded` field before `end` starts, and its `for`.

    A quoted value may contain commas: the element starts at the rightmost comma after which the text is one valid element.
    """
    start = end + 1
    while start > 0:
        start = text.rfind(",", 0, start - 1) + 1
        found = _for_of(text, start, end)
        if found is not None:
            return start, found
    return 0, MALFORMED


def _for_of(text: str, start: int, end: int) -> str | None:
    """Return the `for` value of an element, `UNKNOWN` if it has no `for`; `None` if the text is not an element."""
    found = ""
    while start <= end:
        pair = _PAIR.match(text, start, end)
        if pair is None:
            return None
        if pair[1] is not None and pair[1].lower() == "for":
            found = pair[3] if pair[2] is None else _ESCAPED.sub(r"\1", pair[2])
        start = max(pair.end(), start + 1)  # the match is empty at the end of the element
    return found or UNKNOWN


def _forwarded_client(
    peer: str | None, values: Sequence[str], proxies: Proxies
) -> Address | Literal["malformed"] | None:
    """Return the client address from the forwarded field; `None` if the field does not provide one."""
    if not values or (proxies.hops is None and not _is_proxy(peer, proxies)):
        return None
    entries = forwarded_entries(values, proxies.header)
    if proxies.hops is not None:
        nearest = list(islice(entries, proxies.hops))
        if len(nearest) < proxies.hops and nearest[-1:] != [MALFORMED]:
            return None
        return parse_address(nearest[-1]) or MALFORMED
    address = None
    for entry in entries:
        address = parse_address(entry)
        if address is None:
            return MALFORMED
        if not _in_networks(address, proxies):
            return address
    return address  # every entry is one of our proxies


def _is_proxy(peer: str | None, proxies: Proxies) -> bool:
    if peer is None:
        return UNIX in proxies.networks
    address = parse_address(peer)
    return address is not None and _in_networks(address, proxies)


@lru_cache(maxsize=_REMEMBERED)
def _in_networks(address: Address, proxies: Proxies) -> bool:
    return any(address in network for network in _networks(proxies))


@lru_cache(maxsize=64)
def _networks(proxies: Proxies) -> tuple[Network, ...]:
    return tuple(_plain_network(text) for text in proxies.networks if text != UNIX)


@lru_cache(maxsize=_REMEMBERED)
def _text_key(text: str, ipv6_prefix: int) -> str:
    address = parse_address(text)
    return text if address is None else _key(address, ipv6_prefix)


def _key(address: Address, ipv6_prefix: int) -> str:
    if isinstance(address, IPv4Address) or ipv6_prefix == 128:
        return str(address)
    return str(ip_network((address, ipv6_prefix), strict=False))


def _check_network(text: str) -> None:
    try:
        if text != UNIX:
            _plain_network(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is neither an address nor a network like '10.0.0.0/8': {error}"
        ) from error


def _plain_network(text: str) -> Network:
    network = ip_network(text)
    mapped = network.network_address.ipv4_mapped if isinstance(network, IPv6Network) else None
    # Addresses are compared in their IPv4 form, so map the network as well.
    return network if mapped is None else ip_network((mapped, max(0, network.prefixlen - 96)))
