"""Cc, Bcc and addresses with names."""

from __future__ import annotations

import pytest

from headgate_services.mail.domain_filter import bare_address, domain_of
from tests.apps.mail.conftest import Start

FIELDS = {"cc": ["Bob <bob@example.com>"], "bcc": ["eve@example.com"], "html": "<p>Hi</p>"}


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
