"""The client address that a request is counted by. Pure.

Any client can write anything into `X-Forwarded-For` or `Forwarded`, so neither is read unless the proxies in front of
the service are named. A proxy appends the address that connected to it; so, from the right, the first entry that no proxy
of ours vouches for is the client. Everything to the left of it was written by the client and is not read, whatever it
contains and however long it is. If an entry that has to be read is not an address, the request counts under `malformed`,
one key for all such requests.

An IPv6 customer has at least a /64 to choose addresses from, so all of it counts as one. An IPv4 address that arrives in
IPv6 clothes (`::ffff:192.0.2.1`) is the IPv4 address.
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
"""The address of requests that come without one."""

MALFORMED: Literal["malformed"] = "malformed"
"""The key of requests whose forwarded field cannot be read."""

UNIX = "unix"
"""Stands, among the proxies, for a peer without an address: one behind a Unix socket."""

_LONGEST_PEER = 64
_REMEMBERED = 4_096

# RFC 7239: pairs separated by ';', elements by ','. Values may be quoted. Unquoted ones are taken more widely than the
# RFC has it, because `for=[2001:db8::1]` without quotes is common.
_PAIR = re.compile(r"[ \t]*(?:([\w!#$%&'*+.^`|~-]+)=(?:\"((?:[^\"\\]|\\.)*)\"|([^\s\",;]*))[ \t]*)?(?:;|$)")
_ESCAPED = re.compile(r"\\(.)")
_WITH_PORT = re.compile(r"\[([^\[\]]*)\](?::[\w.-]*)?|([0-9.]+):[\w.-]*")


@dataclass(frozen=True, slots=True)
class Proxies:
    """Which forwarded addresses to believe.

    Attributes:
        networks: Addresses and networks (`"10.0.0.0/8"`) of the proxies; `"unix"` for one behind a Unix socket. The
            field is read only if the peer is one of them, up to the first entry that is not.
        hops: Instead of networks, how many proxies stand in front of the service: the entry so many from the right is
            the client, whatever the peer. Only for a service that no client can reach past its proxies.
        header: The field that the proxies write. Name the one that yours overwrites or appends to: a proxy passes the
            other one on as the client sent it.
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
        peer: The address that is connected; `None` if the server does not say.
        forwarded: The values of the proxies' header field, in the order of its lines.
        proxies: Which of them to believe; without, none.
        ipv6_prefix: How many bits of an IPv6 address count.
    """
    found = None if proxies is None else _forwarded_client(peer, forwarded, proxies)
    if found is None:
        return peer_key(peer, ipv6_prefix)
    return found if isinstance(found, str) else _key(found, ipv6_prefix)


def peer_key(peer: str | None, ipv6_prefix: int) -> str:
    """Return what a connected address is counted by; one that is no IP address is counted as it is."""
    if peer is None:
        return UNKNOWN
    return _text_key(peer[:_LONGEST_PEER], ipv6_prefix)


def parse_address(text: str) -> Address | None:
    """Return the address that an entry of a forwarded field names, with or without port; `None` if it names none."""
    match = _WITH_PORT.fullmatch(text)
    if match:
        text = match[1] or match[2] or ""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        # Without the zone, which means something to the machine that wrote it only.
        return address.ipv4_mapped or IPv6Address(int(address))
    return address


def forwarded_entries(values: Iterable[str], header: str) -> Iterator[str]:
    """Yield the addresses that a field lists, from the right; `MALFORMED` where the rest cannot be parsed."""
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

    A comma may be quoted. So the element starts after the rightmost comma from which everything up to `end` is one element.
    """
    start = end + 1
    while start > 0:
        start = text.rfind(",", 0, start - 1) + 1
        found = _for_of(text, start, end)
        if found is not None:
            return start, found
    return 0, MALFORMED


def _for_of(text: str, start: int, end: int) -> str | None:
    """Return the `for` of an element, `UNKNOWN` without one; `None` if this is not an element."""
    found = ""
    while start <= end:
        pair = _PAIR.match(text, start, end)
        if pair is None:
            return None
        if pair[1] is not None and pair[1].lower() == "for":
            found = pair[3] if pair[2] is None else _ESCAPED.sub(r"\1", pair[2])
        start = max(pair.end(), start + 1)  # at the end of the element, nothing is matched
    return found or UNKNOWN


def _forwarded_client(
    peer: str | None, values: Sequence[str], proxies: Proxies
) -> Address | Literal["malformed"] | None:
    """Return the client that the proxies name; `None` if they name none."""
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
    return address  # all entries are proxies of ours


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
    # Addresses are compared after they have been taken out of their IPv6 clothes.
    return network if mapped is None else ip_network((mapped, max(0, network.prefixlen - 96)))
