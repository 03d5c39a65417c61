"""Allowlists and blocklists of domains.

A pattern must match the whole domain; case does not matter. A domain is refused if it is on the blocklist, or if it is
not on a non-empty allowlist. An address may have a name, as in `Ann <ann@example.com>`. Text that is not a single
address with a domain is refused even without lists: `ann@example.com,bob@example.org` would pass a check of the part
after the last `@`, and still reach both domains.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_ATOM = r"""[^\s@<>()\[\],;:\\"\x00-\x1f\x7f]+"""
_QUOTED = r'''"(?:[^"\\\x00-\x1f\x7f]|\\[\x20-\x7e])*"'''  # may contain an @
_LITERAL = r"\[[0-9a-z:.]+\]"  # an IP address in place of a domain
_PLAIN = rf"(?:{_ATOM}(?:@{_ATOM})*|{_QUOTED})@(?P<domain>{_ATOM}|{_LITERAL})"
_ADDRESS = re.compile(_PLAIN, re.IGNORECASE)
_WORDS = r"""[^@<>()\[\],;:\\"\x00-\x1f\x7f]*"""
_NAMED = re.compile(rf"(?:{_WORDS}|\s*{_QUOTED}\s*)<(?P<address>{_PLAIN})>\s*", re.IGNORECASE)


def compile_patterns(text: str) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of a comma-separated list; blank entries are skipped.

    Raises:
        ValueError: An entry is not a regular expression; the message names it.
    """
    return tuple(_compile(entry.strip()) for entry in text.split(",") if entry.strip())


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error


def bare_address(address: str) -> str:
    """Return an address without its name; other text is returned unchanged."""
    match = _NAMED.fullmatch(address)
    return match["address"] if match else address


def domain_of(address: str) -> str | None:
    """Return the domain of an address in lower case without a final dot; `None` if the address is invalid."""
    match = _ADDRESS.fullmatch(bare_address(address))
    return (match["domain"].removesuffix(".").lower() or None) if match else None


@dataclass(frozen=True, slots=True)
class DomainFilter:
    """The patterns for one direction.

    Attributes:
        direction: `outbound` or `inbound`, for the log.
        allowlist: Unless empty, one of these patterns must match.
        blocklist: None of these patterns may match.
    """

    direction: str
    allowlist: tuple[re.Pattern[str], ...] = ()
    blocklist: tuple[re.Pattern[str], ...] = ()

    def blocked(self, addresses: Iterable[str]) -> list[str]:
        """Return the blocked domains, sorted and each once; empty if all are allowed.

        An address without a domain is returned as it is.
        """
        return sorted({domain_of(address) or address for address in addresses if not self.allows(address)})

    def allows(self, address: str) -> bool:
        """Return whether mail to or from this address is allowed."""
        domain = domain_of(address)
        if domain is None:
            logger.warning("%s address %r refused: it has no domain", self.direction, address)
            return False
        if hit := _first_match(self.blocklist, domain):
            logger.info("%s domain %s blocked by pattern %r", self.direction, domain, hit.pattern)
            return False
        if self.allowlist and not _first_match(self.allowlist, domain):
            logger.info("%s domain %s blocked: no allowlist pattern matches", self.direction, domain)
            return False
        logger.debug("%s domain %s allowed", self.direction, domain)
        return True


def _first_match(patterns: Iterable[re.Pattern[str]], domain: str) -> re.Pattern[str] | None:
    return next((pattern for pattern in patterns if pattern.fullmatch(domain)), None)
