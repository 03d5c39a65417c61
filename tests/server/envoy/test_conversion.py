"""Configurations of envoyproxy/ratelimit as policy files."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate import ConfigError
from headgate.policy import parse_policy
from headgate_server.cli import main
from headgate_server.envoy.conversion import convert
from tests.server.envoy.asking import Service

CONFIG = """
domain: edge
descriptors:
  - key: plan
    value: free
    descriptors:
      - key: user
        rate_limit: { unit: MINUTE, requests_per_unit: 2, name: user }
  - key: path
    value: /static*
    share_threshold: true
    rate_limit: { unit: hour, requests_per_unit: 3 }
  - key: path
    value: /api*
    rate_limit: { unit: month, requests_per_unit: 1 }
  - key: path
    value: /health
    rate_limit: { unlimited: true }
  - key: trial
    shadow_mode: true
    rate_limit: { unit: second, requests_per_unit: 1 }
  - key: vip
    detailed_metric: true
    rate_limit: { unit: day, requests_per_unit: 4, replaces: [{ name: user }, { name: nobody }] }
  - key: number
    value: 42
    rate_limit: { unit: year, requests_per_unit: 1, algorithm: x }
  - key: odd
    rate_limit: { unit: fortnight, requests_per_unit: 1 }
  - key: path
    value: /health
  - key: only_metrics
    value: x
"""


def test_everything_that_is_not_converted_is_listed() -> None:
    assert convert(CONFIG).problems == [
        "descriptors[5] (vip): detailed_metric",
        "descriptors[6] (number): algorithm",
        "descriptors[7] (odd): the limit 1 per 'fortnight'",
        "descriptors[8] (path): the same key and value as one before it",
        "replaces: there is no other limit with the name 'nobody'",
    ]


async def test_converted_limits_decide_as_before() -> None:
    service = Service(convert(CONFIG).toml)
    assert await service.admitted(4, {"plan": "free", "user": "a"}) == 2
    assert await service.admitted(4, {"plan": "free", "user": "b"}, {"vip": "b"}) == 4  # replaced by vip's
    assert await service.admitted(4, {"path": "/static/a"}) == 3
    assert await service.admitted(4, {"path": "/static/b"}) == 0  # a shared threshold
    assert await service.admitted(4, {"path": "/api/a"}) == 1
    assert await service.admitted(4, {"path": "/api/b"}) == 1
    assert await service.admitted(4, {"path": "/health"}) == 4
    assert await service.admitted(4, {"trial": "a"}) == 4
    assert await service.admitted(4, {"number": "42"}) == 1
    assert await service.admitted(4, {"odd": "a"}) == 4


def test_rules_are_fixed_windows_with_scopes_by_path() -> None:
    policy = parse_policy(convert(CONFIG).toml).limiters["edge"]
    assert {rule.kind for rule in (*policy.rules, *policy.shadow)} == {"fixed_window"}
    assert [rule.scope for rule in policy.rules][:2] == ["plan_free_user", "path_static"]


def test_names_and_values_may_be_any_text() -> None:
    nodes = "".join(
        f"  - {{ key: {key!r}, value: {value!r}, rate_limit: {{ unit: day, requests_per_unit: 1 }} }}\n"
        for key, value in (("ä b", "x"), ("a", '"]'), ("a", "#"), ("a", "*"))
    )
    policy = parse_policy(convert(f"domain: 'a \"b\" [c]'\ndescriptors:\n{nodes}").toml)
    assert policy.envoy is not None
    assert [node.value for node in policy.envoy.domains['a "b" [c]'].descriptors] == ["x", '"]', "#", "*"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "not valid YAML"),
        ("- 1", "it has no domain"),
        ("domain: x", "no descriptors with a rate_limit"),
        (
            "domain: x\ndescriptors: [{ key: a, rate_limit: { unit: x, requests_per_unit: 1 } }]",
            r"no descriptors with a rate_limit; descriptors\[0\] \(a\): the limit 1 per 'x'",
        ),
        ("domain: x\ndescriptors: 5", "descriptors is a list, not int"),
        ("domain: x\ndescriptors: [{ value: 1 }]", r"descriptors\[0\]: a descriptor needs a key"),
    ],
)
def test_other_files_are_errors(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        convert(text)


def test_command_prints_lines_and_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    assert main(["import", "envoy", str(file)]) == 0
    printed = capsys.readouterr()
    assert parse_policy(printed.out).envoy is not None
    assert printed.err.count("not converted") == 5
    file.write_text("domain: x")
    assert main(["import", "envoy", str(file)]) == 1
    assert "config.yaml: it has no descriptors" in capsys.readouterr().err
