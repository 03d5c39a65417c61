"""Which domains mail may go to and come from.

A pattern must match the whole domain, whatever its case. A hit in the blocklist refuses; then, if there is an allowlist,
no hit in it refuses too. An address may have a name, as in `Ann <ann@example.com>`. What is not one address with a domain is
refused even without any lists, since its destination is unknown: `ann@example.com,bob@example.org` would slip past a
list that looks at what follows the last `@`, and still reach the domain it names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_ATOM = r"""[^\s@<>()\[\],;:\\"\x00-\x1f\x7f]+"""
_QUOTED = r'''"(?:[^"\\\x00-\x1f\x7f]|\\[\x20-\x7e])*"'''  # may hold an @ of its own
_LITERAL = r"\[[0-9a-z:.]+\]"  # an IP address in place of a domain
_PLAIN = rf"(?:{_ATOM}(?:@{_ATOM})*|{_QUOTED})@(?P<domain>{_ATOM}|{_LITERAL})"
_ADDRESS = re.compile(_PLAIN, re.IGNORECASE)
_WORDS = r"""[^@<>()\[\],;:\\"\x00-\x1f\x7f]*"""
_NAMED = re.compile(rf"(?:{_WORDS}|\s*{_QUOTED}\s*)<(?P<address>{_PLAIN})>\s*", re.IGNORECASE)


def compile_patterns(text: str) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of a comma-separated text; blank entries are skipped.

    Raises:
        ValueError: One of them is not a regular expression; the message says which.
    """
    return tuple(_compile(entry.strip()) for entry in text.split(",") if entry.strip())


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error


def bare_address(address: str) -> str:
    """Return an address without the name that it may have; what is no address stays as it is."""
    match = _NAMED.fullmatch(address)
    return match["address"] if match else address


def domain_of(address: str) -> str | None:
    """Return the domain of an address in lower case, without the dot that may close it; `None` if it has none."""
    match = _ADDRESS.fullmatch(bare_address(address))
    return (match["domain"].removesuffix(".").lower() or None) if match else None


@dataclass(frozen=True, slots=True)
class DomainFilter:
    """The lists for one direction.

    Attributes:
        direction: `outbound` or `inbound`, for the log.
        allowlist: If there are any, one of them must match.
        blocklist: None of them may match.
    """

    direction: str
    allowlist: tuple[re.Pattern[str], ...] = ()
    blocklist: tuple[re.Pattern[str], ...] = ()

    def blocked(self, addresses: Iterable[str]) -> list[str]:
        """Return what to name when refusing: the blocked domains, sorted, each once; empty if all are allowed.

        An address without a domain is named as it stands.
        """
        return sorted({domain_of(address) or address for address in addresses if not self.allows(address)})

    def allows(self, address: str) -> bool:
        """Return whether mail may go to, or come from, this address."""
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
