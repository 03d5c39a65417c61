"""The files in deploy/, checked as far as that is possible without Docker, Kubernetes, Prometheus and Grafana."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headgate.policy import Policy, find_warnings, parse_policy
from headgate_server.cli import make_parser
from headgate_server.metrics import ServerMetrics
from headgate_server.startup import check_address, check_workers

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FUNCTIONS = {"by", "histogram_quantile", "label_values", "min", "rate", "sum"}
LABELS = {"degraded", "error", "le", "limiter", "outcome", "rule"}


def read(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def manifests() -> dict[str, Any]:
    """Return the Kubernetes objects by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(read("kubernetes.yaml"))}


def container() -> Any:
    return manifests()["Deployment"]["spec"]["template"]["spec"]["containers"][0]


def check_policy(text: str, environment: dict[str, str]) -> Policy:
    """Return a policy that a server in a container would start with."""
    policy = parse_policy(text, "headgate.toml", environment)
    assert list(find_warnings(policy, text, environment)) == []
    assert policy.envoy is not None
    check_address(policy, policy.server.host)
    check_address(policy, policy.envoy.host)
    check_workers(policy, 4, None)
    assert (policy.server.port, policy.envoy.port) == (8080, 8081)
    return policy


# Policy and Docker


def test_policy_can_be_served_by_several_workers_and_machines() -> None:
    policy = check_policy(read("headgate.toml"), {"HEADGATE_SERVER__TOKENS__PROXY__SHA256": "a" * 64})
    assert policy.server.tokens["proxy"].sha256 == "a" * 64
    assert policy.gate.limiters.keys() == {"login"}


def test_image_runs_the_server_without_root_and_checks_its_health() -> None:
    lines = [line.strip() for line in read("Dockerfile").replace("\\\n", " ").splitlines()]
    commands = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    by_name = {name: value for name, _, value in commands}
    assert by_name["USER"].isdigit()
    assert by_name["USER"] != "0"
    assert by_name["EXPOSE"].split() == ["8080", "8081"]
    assert "/healthz" in by_name["HEALTHCHECK"]
    program, *arguments = json.loads(by_name["ENTRYPOINT"])
    assert program == "headgate"
    assert make_parser().parse_args(arguments).config == by_name["COPY"].split()[1]
    check = json.loads(by_name["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "HEALTHCHECK", "exec")
    assert re.search(r"'headgate-server\[(.*)\]'", by_name["RUN"]) is not None
    assert [name for name, _, _ in commands].index("USER") > [name for name, _, _ in commands].index("RUN")


def test_compose_file_uses_the_ports_and_files_that_exist() -> None:
    services = yaml.safe_load(read("compose.yaml"))["services"]
    headgate = services["headgate"]
    check_policy(read("headgate.toml"), headgate["environment"])
    assert [port.split(":")[-1] for port in headgate["ports"]] == ["8080", "8081"]
    assert all(port.startswith("127.0.0.1:") for port in headgate["ports"])
    for volume in headgate["volumes"]:
        assert (DEPLOY / volume.split(":")[0]).is_file()
    assert headgate["depends_on"].keys() <= services.keys()
    assert "noeviction" in services["redis"]["command"]


# Kubernetes


def test_manifests_fit_together() -> None:
    found = manifests()
    assert found.keys() == {"ConfigMap", "Deployment", "Service"}
    assert all(each["apiVersion"] and each["metadata"]["name"] == "headgate" for each in found.values())
    spec = found["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert {port["targetPort"] for port in found["Service"]["spec"]["ports"]} == ports.keys()
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == volumes
    assert spec["template"]["spec"]["securityContext"]["runAsNonRoot"]


def test_config_map_is_a_policy_for_these_ports() -> None:
    environment = {each["name"]: "a" * 64 for each in container()["env"]}
    policy = check_policy(manifests()["ConfigMap"]["data"]["headgate.toml"], environment)
    assert policy.envoy is not None
    assert {port["containerPort"] for port in container()["ports"]} == {policy.server.port, policy.envoy.port}


def test_probes_ask_what_needs_no_token() -> None:
    assert container()["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container()["readinessProbe"]["grpc"] == {"port": 8081}


# systemd


def test_unit_file_is_valid(tmp_path: Path) -> None:
    text = read("headgate.service")
    [command] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *arguments = shlex.split(command)
    assert make_parser().parse_args(arguments).config == "/etc/headgate/headgate.toml"
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return
    unit = tmp_path / "headgate.service"
    installed = str(Path(sys.executable).with_name("headgate"))
    unit.write_text(text.replace(program, installed))
    verified = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
    complaints = [line for line in verified.stderr.splitlines() if "headgate.service" in line]
    assert complaints == []


# Prometheus and Grafana


def alert_expressions() -> Iterator[str]:
    for group in yaml.safe_load(read("alerts.yaml"))["groups"]:
        for rule in group["rules"]:
            assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
            yield rule["expr"]


def panel_expressions() -> Iterator[str]:
    dashboard = json.loads(read("grafana.json"))
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query")


def exported_names() -> set[str]:
    """Return the names of all samples that the server may export."""
    kinds = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
    families = text_string_to_metric_families(ServerMetrics().text().decode())
    return {family.name + suffix for family in families for suffix in kinds.get(family.type, ("",))}


@pytest.mark.parametrize("expression", [*alert_expressions(), *panel_expressions()])
def test_metrics_and_labels_of_an_expression_exist(expression: str) -> None:
    plain = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
    assert plain.count("(") == plain.count(")")
    names = set(re.findall(r"[a-z_]{2,}", plain))
    metrics = {name for name in names if name.startswith("headgate_")}
    assert metrics
    assert metrics <= exported_names()
    assert names - metrics <= FUNCTIONS | LABELS


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads(read("grafana.json"))["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)
