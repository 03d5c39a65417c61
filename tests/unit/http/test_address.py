"""Client addresses: headers are trusted only from listed proxies, and no header raises an error."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import ConfigError
from headgate.http.address import MALFORMED, Proxies, client_address
from headgate.http.keys import by_address

PROXY, INNER_PROXY, CLIENT = "10.0.0.1", "10.0.0.2", "198.51.100.7"
NAMED = Proxies(("10.0.0.0/8", "2001:db8:1::/48"))
NAMED_FORWARDED = Proxies(("10.0.0.0/8",), header="forwarded")

values = st.text(
    alphabet=st.sampled_from("0123456789abcdef.:,;=\"'\\[]%_ \t/-forbyunknwx\x00\x7fé"), max_size=80
) | st.text(max_size=30)
header_lines = st.lists(values, max_size=3)
addresses = st.ip_addresses().map(str)


@pytest.mark.parametrize(
    ("peer", "key"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:ffff:ffff:ffff", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
        ("x" * 500, "x" * 64),
        (None, "unknown"),
    ],
)
def test_peer_address_is_the_client_by_default(peer: str | None, key: str) -> None:
    assert client_address(peer, [], None) == key
    assert by_address()({"client": None if peer is None else (peer, 1), "headers": []}) == key


@given(addresses, header_lines)
def test_headers_are_ignored_without_trusted_proxies(peer: str, lines: list[str]) -> None:
    assert client_address(peer, lines, None) == client_address(peer, [], None)
    scope = scope_of(peer, "x-forwarded-for", lines)
    assert by_address()(scope) == client_address(peer, [], None)


@given(addresses.filter(lambda address: ip_address(address) not in ip_network("10.0.0.0/8")), header_lines)
def test_headers_from_an_untrusted_peer_are_ignored(peer: str, lines: list[str]) -> None:
    named = Proxies(("10.0.0.0/8",))
    assert client_address(peer, lines, named) == client_address(peer, [], None)


@given(header_lines, addresses)
def test_client_cannot_spoof_its_address_with_x_forwarded_for(lines: list[str], client: str) -> None:
    """The proxy appends the address that it saw; earlier values come from the client."""
    expected = client_address(client, [], None)
    named = Proxies(("10.0.0.0/8",))
    if ip_address(client) in ip_network("10.0.0.0/8"):
        return
    assert client_address(PROXY, [*lines, client], named) == expected
    assert client_address(PROXY, [f"{','.join(lines)}, {client}"], named) == expected


@pytest.mark.parametrize("written", ["for={}", 'for="{}"', 'proto=https;for={};by="[2001:db8::1]"'])
@given(header_lines, addresses)
def test_client_cannot_spoof_its_address_with_forwarded(written: str, lines: list[str], client: str) -> None:
    if ip_address(client) in ip_network("10.0.0.0/8"):
        return
    element = written.format(f"[{client}]:4711" if ":" in client else client)
    expected = client_address(client, [], None)
    assert client_address(PROXY, [*lines, element], NAMED_FORWARDED) == expected
    assert client_address(PROXY, [f"{','.join(lines)}, {element}"], NAMED_FORWARDED) == expected


@pytest.mark.parametrize(
    "garbage", ["1.2.3.4, ", "x", ",", '"', '=";', "\\", " ", ";", 'a=",', ';a="', "a=;"]
)
def test_long_header_does_not_change_the_client_address(garbage: str) -> None:
    filler = garbage * 20_000
    hops = Proxies(hops=1)
    assert client_address(PROXY, [f"{filler},{CLIENT}"], NAMED) == CLIENT
    assert client_address(PROXY, [f"{filler},{CLIENT}"], hops) == CLIENT
    assert client_address(PROXY, [filler, f"for={CLIENT}"], NAMED_FORWARDED) == CLIENT
    assert client_address(PROXY, [filler], NAMED_FORWARDED) == MALFORMED


@given(
    st.none() | addresses | values, header_lines, st.sampled_from([NAMED, NAMED_FORWARDED, Proxies(hops=2)])
)
def test_hostile_headers_never_raise(peer: str | None, lines: list[str], proxies: Proxies) -> None:
    found = client_address(peer, lines, proxies)
    fallback = client_address(peer, [], None)
    if found == MALFORMED:
        return
    assert found == fallback or ip_network(found)


@pytest.mark.parametrize(
    ("forwarded", "key"),
    [
        ([CLIENT], CLIENT),
        ([f"{CLIENT}, {INNER_PROXY}"], CLIENT),
        ([CLIENT, INNER_PROXY], CLIENT),
        ([f"1.2.3.4, {CLIENT}, {INNER_PROXY}"], CLIENT),
        ([f"{CLIENT}:56789"], CLIENT),
        (["[2001:db8::5]:443"], "2001:db8::/64"),
        (["2001:db8::5"], "2001:db8::/64"),
        (["::ffff:198.51.100.7"], CLIENT),
        (["::ffff:10.0.0.9"], "10.0.0.9"),
        ([f"{INNER_PROXY}, 10.0.0.3"], INNER_PROXY),
        ([f" ,{CLIENT} ,, "], CLIENT),
        ([f"{CLIENT}, 2001:db8:1::9"], CLIENT),
        ([""], PROXY),
        (["unknown"], MALFORMED),
        (["_hidden"], MALFORMED),
        ([f"{CLIENT}, unknown"], MALFORMED),
        (["198.51.100.007"], MALFORMED),
        (["198.51.100.7.1"], MALFORMED),
        (["1.2.3.4\u00b2"], MALFORMED),
        (["[::1"], MALFORMED),
        (["a" * 9000], MALFORMED),
        ([], PROXY),
    ],
)
def test_x_forwarded_for_is_read_from_the_right(forwarded: list[str], key: str) -> None:
    assert client_address(PROXY, forwarded, NAMED) == key


@pytest.mark.parametrize(
    ("forwarded", "key"),
    [
        ([f"for={CLIENT}"], CLIENT),
        ([f"For={CLIENT};proto=https;by=10.0.0.1"], CLIENT),
        ([f"proto=https;for={CLIENT}"], CLIENT),
        ([f"for=1.2.3.4, for={CLIENT}, for={INNER_PROXY}"], CLIENT),
        ([f"for={CLIENT}", f"for={INNER_PROXY}"], CLIENT),
        (['for="[2001:db8:cafe::17]:4711"'], "2001:db8:cafe::/64"),
        (["for=[2001:db8:cafe::17]"], "2001:db8:cafe::/64"),
        ([f'for="{CLIENT}:80"'], CLIENT),
        (['for="198.51.100\\.7"'], CLIENT),
        ([f'for=1.2.3.4;note="a, for=6.6.6.6", for={CLIENT}'], CLIENT),
        ([f"for={CLIENT} , for={INNER_PROXY} ;by=x"], CLIENT),
        (["for=unknown"], MALFORMED),
        (["for=_secret"], MALFORMED),
        (["proto=https"], MALFORMED),
        ([f"for={CLIENT}, proto=https"], MALFORMED),
        (['for="1.2.3.4, for=6.6.6.6'], "6.6.6.6"),
        (['for=6.6.6.6;x=", for="[2001:db8::1]:4711"'], "2001:db8::/64"),
        (['for=6.6.6.6, for="1.2.3.4'], MALFORMED),
        ([f"for={CLIENT};"], CLIENT),
        (["for = 1.2.3.4"], MALFORMED),
        (["nonsense"], MALFORMED),
        ([""], MALFORMED),
    ],
)
def test_forwarded_is_read_from_the_right(forwarded: list[str], key: str) -> None:
    assert client_address(PROXY, forwarded, NAMED_FORWARDED) == key


@pytest.mark.parametrize(
    ("hops", "forwarded", "key"),
    [
        (1, f"1.2.3.4, {CLIENT}", CLIENT),
        (2, f"{CLIENT}, 203.0.113.1", CLIENT),
        (2, f"1.2.3.4, {CLIENT}, 203.0.113.1", CLIENT),
        (2, CLIENT, PROXY),
        (1, "garbage", MALFORMED),
        (1, "", PROXY),
        (2, "garbage", PROXY),
    ],
)
def test_proxies_can_be_counted_by_hops(hops: int, forwarded: str, key: str) -> None:
    assert client_address(PROXY, [forwarded], Proxies(hops=hops)) == key


def test_proxy_on_a_unix_socket_must_be_listed() -> None:
    assert client_address(None, [CLIENT], Proxies(("unix",))) == CLIENT
    assert client_address(None, [CLIENT], NAMED) == "unknown"


def test_trusted_proxy_may_have_an_ipv4_mapped_ipv6_address() -> None:
    assert client_address("::ffff:10.0.0.1", [CLIENT], NAMED) == CLIENT
    assert client_address(PROXY, [CLIENT], Proxies(("::ffff:10.0.0.0/104",))) == CLIENT


def test_ipv6_prefix_is_configurable() -> None:
    assert client_address("2001:db8:1:2::1", [], None, ipv6_prefix=48) == "2001:db8:1::/48"
    assert by_address(ipv6_prefix=128)({"client": ("2001:db8::1", 1)}) == "2001:db8::1"


def scope_of(peer: str | None, name: str, lines: list[str]) -> dict[str, Any]:
    fields = [(name.encode(), line.encode("latin-1", "replace")) for line in lines]
    return {"client": None if peer is None else (peer, 80), "headers": fields}


def test_only_the_configured_header_is_read() -> None:
    scope = scope_of(PROXY, "x-forwarded-for", ["1.2.3.4"])
    scope["headers"] += scope_of(PROXY, "forwarded", [f"for={CLIENT}"])["headers"]
    assert by_address(proxies=[PROXY])(scope) == "1.2.3.4"
    assert by_address(proxies=[PROXY], header="forwarded")(scope) == CLIENT
    assert by_address(hops=1)(scope_of(None, "x-forwarded-for", [CLIENT])) == CLIENT


@pytest.mark.parametrize(
    "arguments",
    [
        {"proxies": ["10.0.0.0/33"]},
        {"proxies": ["10.0.0.1/8"]},
        {"proxies": ["proxy.example"]},
        {"proxies": "10.0.0.0/8"},
        {"proxies": ["10.0.0.1"], "hops": 1},
        {"hops": 0},
        {"hops": True},
        {"hops": 1, "header": "x-real-ip"},
        {"ipv6_prefix": 0},
        {"ipv6_prefix": 129},
    ],
)
def test_invalid_settings_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        by_address(**arguments)
