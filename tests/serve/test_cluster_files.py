"""The files of examples/cluster, checked offline by the validators of their kinds."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlinfer.cli import parser_of_all
from dlinfer.serve.options import read

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
KUBERNETES = sorted((CLUSTER / "kubernetes").glob("*.yaml"))
METRIC = re.compile(r"\b(?:lmdeploy|dlinfer|envoy)[:_]\w+")
# Histograms have these for the name that a query uses; functions and labels of a query are no metrics.
LABELS = {"envoy_response_code_class", "envoy_cluster_name"}


def run(name: str, *arguments: str | Path) -> None:
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def documents() -> Iterator[dict[str, Any]]:
    for file in KUBERNETES:
        yield from yaml.safe_load_all(file.read_text())


def metrics_of_dashboard() -> set[str]:
    """The metrics that the dashboard's queries name."""
    dashboard = json.loads((CLUSTER / "grafana" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return {name for query in queries for name in METRIC.findall(query)} - LABELS


def test_containerfile():
    run("hadolint", CLUSTER / "Containerfile")


def test_compose():
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", CLUSTER / "compose.yaml")


@pytest.mark.parametrize(
    "file", [f for f in KUBERNETES if f.name != "monitor.yaml"], ids=lambda file: file.name
)
def test_manifests(file: Path):
    run("kubernetes-validate", "--strict", file)


def test_service_monitor():
    schema = Path(__file__).with_name("servicemonitor.schema.json")
    run("check-jsonschema", "--schemafile", schema, CLUSTER / "kubernetes" / "monitor.yaml")


def test_manifests_fit_together():
    by_kind = {document["kind"]: document for document in documents()}
    pod = by_kind["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    container = pod["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert by_kind["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["Service"]["spec"]["selector"] == labels
    assert by_kind["Service"]["spec"]["ports"][0]["targetPort"] in ports
    assert (
        by_kind["Service"]["spec"]["ports"][0]["name"]
        == by_kind["ServiceMonitor"]["spec"]["endpoints"][0]["port"]
    )
    assert (
        by_kind["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
        == by_kind["Service"]["metadata"]["labels"]
    )
    assert by_kind["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "dlinfer"
    claims = {document["metadata"]["name"] for document in documents() if document["kind"].endswith("Claim")}
    assert {volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"]} == claims
    options = read([], several=False)
    assert ports["http"] == options.port


def test_commands_are_those_of_dlinfer_serve():
    compose = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]["server"]["command"]
    deployment = next(document for document in documents() if document["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    for words in (compose, pod):
        arguments = parser_of_all().parse_args(["serve", *words])
        read(arguments.server_options, several=True)
        assert arguments.model == "/model"
