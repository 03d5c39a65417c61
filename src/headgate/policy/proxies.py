"""The sections of a policy file for proxies: `[envoy]` and `[gate]`.

    [envoy]                          # the rate-limit service of Envoy
    port = 8081
    [envoy.domains.edge]
    limiter = "edge"                 # by default the limiter with the name of the domain
    descriptors = [
      { key = "remote_address", scope = "client" },
      { key = "plan", value = "free", descriptors = [{ key = "user", scope = "free_user" }] },
    ]

    [gate]                           # GET /v1/gate/NAME
    proxies = ["127.0.0.1"]
    [gate.limiters]
    login = "address"
    api = { user = "header X-User", client = "address" }

A descriptor of Envoy is a list of entries, and the tree of `descriptors` is matched entry by entry. The node of the last
entry decides; its `scope` selects rules of the limiter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from headgate.errors import listed
from headgate.rules import SHARED

if TYPE_CHECKING:
    from headgate.policy.load import PolicySection
    from headgate.policy.model import LimiterPolicy

ENVOY_KEYS = frozenset({"host", "port", "domains"})
GATE_KEYS = frozenset({"proxies", "limiters"})
_DOMAIN_KEYS = frozenset({"limiter", "atomic", "descriptors"})
_NODE_KEYS = frozenset({"key", "value", "scope", "shared", "unlimited", "record", "replaces", "descriptors"})
_SOURCE = re.compile(r"(header|cookie) ([!#$%&'*+.^_`|~0-9A-Za-z-]+)")
_HIGHEST_PORT = 65_535
_DEEPEST = 32
"""Levels of nested descriptors."""


@dataclass(frozen=True, slots=True)
class DescriptorPolicy:
    """One node in the tree of descriptors.

    Attributes:
        key: The key of the entry.
        value: Its value, in which `*` stands for any text; `None` for any value.
        scope: The scope of the rules that decide; `None` if nothing is counted here.
        shared: Whether all values that match are counted together.
        unlimited: Whether a request that matches is admitted without counting.
        record: Whether units are recorded, and never refused.
        replaces: Scopes that do not decide a request that matches here.
        descriptors: Nodes for the next entry.
    """

    key: str
    value: str | None = None
    scope: str | None = None
    shared: bool = False
    unlimited: bool = False
    record: bool = False
    replaces: frozenset[str] = frozenset()
    descriptors: tuple[DescriptorPolicy, ...] = ()

    @property
    def is_counted_by_value(self) -> bool:
        """Whether each value is counted separately."""
        return not self.shared and (self.value is None or "*" in self.value)


@dataclass(frozen=True, slots=True)
class DomainPolicy:
    """A domain of Envoy.

    Attributes:
        limiter: The name of its limiter.
        descriptors: The tree of descriptors.
        atomic: Whether the descriptors of a request are decided together: all are charged, or none.
    """

    limiter: str
    descriptors: tuple[DescriptorPolicy, ...]
    atomic: bool = True


@dataclass(frozen=True, slots=True)
class EnvoyPolicy:
    """The rate-limit service of Envoy.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        domains: Domains by name.
    """

    host: str = "127.0.0.1"
    port: int = 8081
    domains: Mapping[str, DomainPolicy] = field(default_factory=lambda: MappingProxyType({}))


class KeySource(NamedTuple):
    """The origin of a key in a request: a header field or a cookie with this name, or the client's address."""

    kind: Literal["header", "cookie", "address"]
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """The gate for proxies that send HTTP subrequests.

    Attributes:
        proxies: Addresses and networks of the proxies whose `X-Forwarded-For` is trusted.
        limiters: For each limiter with a gate, the origin of its key, by scope; under `None` for rules without scope.
    """

    proxies: tuple[str, ...] = ()
    limiters: Mapping[str, Mapping[str | None, KeySource]] = field(
        default_factory=lambda: MappingProxyType({})
    )


def read_envoy(table: PolicySection, limiters: Mapping[str, LimiterPolicy]) -> EnvoyPolicy:
    """Return the section `[envoy]`."""
    usual = EnvoyPolicy()
    domains = table.section("domains")
    if not domains.values:
        raise table.error("no domains; write for example [envoy.domains.edge] with descriptors = [...]")
    return EnvoyPolicy(
        table.text("host", usual.host),
        table.whole("port", usual.port, 0, _HIGHEST_PORT),
        MappingProxyType({name: _read_domain(domains, name, limiters) for name in domains.values}),
    )


def _read_domain(domains: PolicySection, name: str, limiters: Mapping[str, LimiterPolicy]) -> DomainPolicy:
    table = domains.section(name, _DOMAIN_KEYS)
    limiter = table.text("limiter", name)
    found = limiters.get(limiter)
    if found is None:
        raise table.error(f"there is no limiter {limiter!r}; the limiters are {listed(limiters)}", "limiter")
    for rule in (*found.rules, *found.shadow):
        if rule.scope is None or rule.scope == SHARED:
            raise table.error(
                f"rule {rule.name!r} of limiter {limiter!r} needs a scope that descriptors can name; for one counter of "
                "everybody, map a generic_key to the scope",
                "limiter",
            )
        if rule.kind == "concurrent":
            raise table.error(
                f"rule {rule.name!r} of limiter {limiter!r} is concurrent, but Envoy does not report the end of a request",
                "limiter",
            )
    scopes = {rule.scope for rule in (*found.rules, *found.shadow) if rule.scope is not None}
    nodes = _read_nodes(table, scopes, _DEEPEST)
    if not nodes:
        raise table.error(
            'a domain needs descriptors, as in descriptors = [{ key = "remote_address", scope = "client" }]'
        )
    _check_same_parts(table, nodes)
    return DomainPolicy(limiter, nodes, table.flag("atomic", True))


def _read_nodes(parent: PolicySection, scopes: set[str], depth: int) -> tuple[DescriptorPolicy, ...]:
    tables = parent.sections("descriptors", _NODE_KEYS)
    if tables and not depth:
        raise tables[0].error("descriptors are nested too deeply")
    nodes = tuple(_read_node(table, scopes, depth) for table in tables)
    seen: set[tuple[str, str | None]] = set()
    for table, node in zip(tables, nodes, strict=True):
        if (node.key, node.value) in seen:
            raise table.error("two descriptors beside each other have the same key and value")
        seen.add((node.key, node.value))
    return nodes


def _read_node(table: PolicySection, scopes: set[str], depth: int) -> DescriptorPolicy:
    node = DescriptorPolicy(
        table.text("key"),
        table.text("value") if "value" in table.values else None,
        table.text("scope") if "scope" in table.values else None,
        table.flag("shared", False),
        table.flag("unlimited", False),
        table.flag("record", False),
        frozenset(table.texts("replaces")),
        _read_nodes(table, scopes, depth - 1),
    )
    for name in {node.scope, *node.replaces} - {None, *scopes}:
        raise table.error(
            f"no rule of the limiter has the scope {name!r}; the scopes are {listed(scopes)}",
            "scope" if name == node.scope else "replaces",
        )
    if node.unlimited and node.scope is not None:
        raise table.error("unlimited counts nothing, so leave out the scope", "unlimited")
    if node.scope in node.replaces:
        raise table.error("a descriptor cannot replace itself", "replaces")
    if node.record and node.scope is None:
        raise table.error("record needs a scope", "record")
    if node.scope is None and not node.unlimited and not node.descriptors:
        raise table.error("a descriptor needs a scope, unlimited = true, or nested descriptors")
    return node


def _check_same_parts(table: PolicySection, nodes: tuple[DescriptorPolicy, ...]) -> None:
    """Refuse two descriptors of one scope whose keys have a different number of values, and so could be equal."""
    parts: dict[str, int] = {}
    for scope, count in _parts_of(nodes, 0):
        if parts.setdefault(scope, count) != count:
            raise table.error(
                f"the descriptors with the scope {scope!r} have different numbers of counted values; give them different "
                "scopes, or mark values as shared",
                "descriptors",
            )


def _parts_of(nodes: tuple[DescriptorPolicy, ...], above: int) -> Iterator[tuple[str, int]]:
    for node in nodes:
        count = above + node.is_counted_by_value
        if node.scope is not None:
            yield node.scope, count
        yield from _parts_of(node.descriptors, count)


def read_gate(table: PolicySection, limiters: Mapping[str, LimiterPolicy]) -> GatePolicy:
    """Return the section `[gate]`."""
    proxies = table.texts("proxies")
    for place, text in enumerate(proxies):
        try:
            ip_network(text)
        except ValueError as error:
            raise table.error(
                f"{text!r} is neither an address nor a network: {error}", "proxies", place
            ) from None
    section = table.section("limiters")
    return GatePolicy(
        proxies,
        MappingProxyType({name: _read_sources(section, name, limiters, proxies) for name in section.values}),
    )


def _read_sources(
    section: PolicySection, name: str, limiters: Mapping[str, LimiterPolicy], proxies: tuple[str, ...]
) -> Mapping[str | None, KeySource]:
    limiter = limiters.get(name)
    if limiter is None:
        raise section.error(f"there is no limiter {name!r}; the limiters are {listed(limiters)}", name)
    for rule in limiter.rules:
        if rule.kind == "concurrent":
            raise section.error(
                f"rule {rule.name!r} is concurrent, but a gate does not see the end of a request", name
            )
    scopes = {rule.scope for rule in limiter.rules if rule.scope is not None} - {SHARED}
    if not scopes:
        return MappingProxyType({None: _read_source(section, name, section.text(name), proxies)})
    table = section.section(name)
    if table.values.keys() != scopes:
        raise section.error(
            f"the rules of limiter {name!r} count by {listed(scopes)}; write the origin of each, as in "
            f'{{ {min(scopes)} = "address" }}',
            name,
        )
    return MappingProxyType(
        {scope: _read_source(table, scope, table.text(scope), proxies) for scope in table.values}
    )


def _read_source(table: PolicySection, name: str, text: str, proxies: tuple[str, ...]) -> KeySource:
    if text == "address":
        if not proxies:
            raise table.error(
                'the address of a client is known only from a trusted proxy; write proxies = ["127.0.0.1"] in [gate]',
                name,
            )
        return KeySource("address")
    found = _SOURCE.fullmatch(text)
    if found is None:
        raise table.error(f"write 'address', 'header NAME' or 'cookie NAME', not {text!r}", name)
    return KeySource("header" if found[1] == "header" else "cookie", found[2])
