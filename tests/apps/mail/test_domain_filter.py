"""Which domains mail may go to; Cc, Bcc and addresses with names."""

from __future__ import annotations

import logging

import pytest

from headgate_services.mail.domain_filter import DomainFilter, bare_address, compile_patterns, domain_of
from tests.apps.mail.conftest import Start

FIELDS = {"cc": ["Bob <bob@example.com>"], "bcc": ["eve@example.com"], "html": "<p>Hi</p>"}


def outbound(allow: str = "", block: str = "") -> DomainFilter:
    return DomainFilter("outbound", compile_patterns(allow), compile_patterns(block))


@pytest.mark.parametrize(
    ("allow", "block", "address", "allowed"),
    [
        ("", "", "x@anything.example", True),
        (r"good\.com", "", "x@good.com", True),
        (r"good\.com", "", "x@GOOD.Com", True),
        (r"good\.com", "", "x@other.com", False),
        (r"good\.com, fine\.org", "", "x@fine.org", True),
        ("", r"evil\.com", "x@evil.com", False),
        ("", r"evil\.com", "x@notevil.com", True),
        ("", r"evil\.com", "x@evil.com.example", True),
        (r"evil\.com", r"evil\.com", "x@evil.com", False),
        (r"(.*\.)?acme\.com", "", "x@acme.com", True),
        (r"(.*\.)?acme\.com", "", "x@mail.eu.acme.com", True),
        (r"(.*\.)?acme\.com", "", "x@notacme.com", False),
        ("", r"evil\.com", "x@good.com@evil.com", False),
        ("", r"evil\.com", "x@evil.com@good.com", True),
        ("", r"evil\.com", '"x@evil.com"@good.com', True),
        ("", r" , ,evil\.com,", "x@evil.com", False),
    ],
)
def test_the_whole_domain_after_the_last_at_is_matched(
    allow: str, block: str, address: str, allowed: bool
) -> None:
    assert outbound(allow, block).allows(address) is allowed


@pytest.mark.parametrize(
    "address",
    ["x@evil.com.", "Ann <x@evil.com>", "<x@evil.com>", "x@evil.com,y@good.com", "x@good.com;y@evil.com",
     "x@evil.com ", "x@evil.com\n", "x@evil.com\r\nBcc: y@evil.com", "x@evil.com(good.com)", "x@evil.com\0"],
)  # fmt: skip
def test_no_way_of_writing_an_address_slips_past_the_blocklist(address: str) -> None:
    assert not outbound(block=r"evil\.com").allows(address)


@pytest.mark.parametrize("address", ["", "nobody", "x@", "@x.com", "x@.", "@"])
def test_what_has_no_domain_is_refused_without_any_list(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert domain_of(address) is None
    assert outbound().blocked([address]) == [address]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    "address", ["x@[10.0.0.1]", "x@[IPv6:2001:db8::1]", "jürgen@bücher.example", "a+b@c.d"]
)
def test_unusual_addresses_are_addresses(address: str) -> None:
    assert outbound().allows(address)


def test_blocked_domains_are_named_once_and_sorted() -> None:
    blocked = outbound(block=r".*\.bad").blocked(["1@z.bad", "2@a.bad", "3@fine.org", "4@Z.BAD", "5"])
    assert blocked == ["5", "a.bad", "z.bad"]


@pytest.mark.requirement("N-34")
async def test_one_refused_recipient_refuses_the_whole_send(start: Start) -> None:
    service = await start(outbound_domain_allowlist=r"acme\.com")
    refused = await service.send("a@acme.com", "b@zebra.org", "c@ape.org", "d@ape.org")
    assert refused.status_code == 403
    assert refused.json() == {"detail": "Recipient domain(s) blocked by outbound policy: ape.org, zebra.org"}
    assert service.provider.calls == []
    assert (await service.messages())["total"] == 0


@pytest.mark.parametrize(
    ("given", "bare", "domain"),
    [
        ("Ann <ann@example.com>", "ann@example.com", "example.com"),
        ('"Doe, Ann" <ann@example.com>', "ann@example.com", "example.com"),
        ("<ann@example.com>", "ann@example.com", "example.com"),
        ("Äнн <ann@EXAMPLE.com>", "ann@EXAMPLE.com", "example.com"),
        ("ann@example.com", "ann@example.com", "example.com"),
    ],
)
def test_an_address_may_have_a_name(given: str, bare: str, domain: str) -> None:
    assert (bare_address(given), domain_of(given)) == (bare, domain)


@pytest.mark.parametrize(
    "given",
    [
        "Ann <ann@example.com>, Bob <bob@evil.com>",
        "ann@good.com <bob@evil.com>",
        "Ann <ann@good.com> <bob@evil.com>",
        "Ann <ann@good.com",
        "Ann\r\nBcc: x@evil.com <ann@good.com>",
        "Ann <a,b@good.com>",
    ],
)
def test_what_is_not_one_address_has_no_domain(given: str) -> None:
    assert domain_of(given) is None


async def test_copies_pass_the_filter_and_reach_the_provider(start: Start) -> None:
    service = await start(outbound_domain_blocklist=r"evil\.com")
    answer = await service.send("Ann <ann@example.com>", **FIELDS)
    assert answer.status_code == 201
    [call] = service.provider.calls
    assert (call["to"], call["cc"], call["bcc"]) == (
        ["Ann <ann@example.com>"],
        ["Bob <bob@example.com>"],
        ["eve@example.com"],
    )
    assert call["html_body"] == "<p>Hi</p>"
    for field in ("cc", "bcc"):
        refused = await service.send("ann@example.com", **{field: ["Mallory <m@evil.com>"]})
        assert (refused.status_code, "evil.com" in refused.json()["detail"]) == (403, True)
    stored = (await service.messages())["items"][0]
    assert (stored["cc_addresses"], stored["bcc_addresses"]) == (FIELDS["cc"], FIELDS["bcc"])
    assert stored["html"] == "<p>Hi</p>"
