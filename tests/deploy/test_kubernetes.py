"""The Kubernetes manifests: schemas, and that labels, ports, probes and network policies fit each other and the code.

Nothing is applied to a cluster here. Settings, hardening and scaling: test_kubernetes_settings.py.
"""

from __future__ import annotations

import shutil
import subprocess
from types import SimpleNamespace
from typing import cast

import kubernetes_validate
import pytest
import yaml

from outrider.gateway.servers.http.app import create_app
from outrider.gateway.servers.service import GatewayService
from tests.deploy.kubernetes_objects import (
    KUBERNETES,
    OVERLAYS,
    SERVICES,
    config_of,
    container_of,
    of_kind,
    one,
    pod_labels,
    selected,
    workloads,
)
from tests.deploy.kustomize import Document, build, pod_of

# The oldest that has all that is used here (preStop's sleep), and the newest that the schemas are there for.
VERSIONS = ("1.30.0", kubernetes_validate.latest_version())
PART_OF = {"app.kubernetes.io/part-of": "outrider"}


# ---- by themselves ----


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_builds_the_same(overlay: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not here to compare with")
    folder = KUBERNETES / "overlays" / overlay
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=True)

    def key(document: Document) -> tuple[str, str]:
        return document["kind"], document["metadata"]["name"]

    assert sorted(yaml.safe_load_all(done.stdout), key=key) == sorted(build(folder), key=key)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_what_kubernetes_knows(version: str, objects: list[Document]) -> None:
    for document in objects:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_are_strict(objects: list[Document]) -> None:
    broken = one(objects, "Deployment", "gateway") | {"surprise": 1}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_every_object_is_in_the_namespace_and_there_once(objects: list[Document]) -> None:
    names = [(document["kind"], document["metadata"]["name"]) for document in objects]
    assert len(names) == len(set(names))
    [namespace] = of_kind(objects, "Namespace")
    for document in objects:
        assert document["metadata"]["labels"].items() >= PART_OF.items()
        if document is not namespace:
            assert document["metadata"]["namespace"] == namespace["metadata"]["name"]


def test_the_stack_is_whole(objects: list[Document]) -> None:
    assert workloads(objects).keys() == {*SERVICES, "redis"}
    for kind, names in {
        "Service": {*SERVICES, "redis"},
        "ConfigMap": set(SERVICES),
        "PodDisruptionBudget": set(SERVICES),
        "HorizontalPodAutoscaler": {"verifier", "drafter"},
    }.items():
        assert {document["metadata"]["name"] for document in of_kind(objects, kind)} == names


# ---- labels and ports ----


def test_selectors_take_the_pods_they_are_meant_for(objects: list[Document]) -> None:
    labels = pod_labels(objects)
    for name, document in workloads(objects).items():
        assert selected(document["spec"]["selector"], labels) == {name}
        for constraint in pod_of(document).get("topologySpreadConstraints", ()):
            assert selected(constraint["labelSelector"], labels) == {name}
    for document in of_kind(objects, "Service"):
        assert selected({"matchLabels": document["spec"]["selector"]}, labels) == {document["metadata"]["name"]}
    for document in of_kind(objects, "PodDisruptionBudget"):
        assert selected(document["spec"]["selector"], labels) == {document["metadata"]["name"]}
    for document in of_kind(objects, "HorizontalPodAutoscaler"):
        target = document["spec"]["scaleTargetRef"]
        assert "replicas" not in one(objects, target["kind"], target["name"])["spec"]


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_those_that_the_service_listens_on(name: str, objects: list[Document]) -> None:
    config = config_of(objects, name)
    gateway_ports = {"http": config.port, "grpc": config.client_grpc_port} if name == "gateway" else {}
    expected = gateway_ports or {"grpc": config.port, "metrics": config.metrics_port}
    container = container_of(objects, name)
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == expected
    for port in one(objects, "Service", name)["spec"]["ports"]:
        assert port["port"] == expected[port["targetPort"]]
    assert config.host == "0.0.0.0"


@pytest.mark.parametrize("name", SERVICES)
def test_probes_ask_what_is_served(name: str, objects: list[Document]) -> None:
    container = container_of(objects, name)
    config = config_of(objects, name)
    # Which routes there are does not depend on the service behind them.
    app = create_app(cast(GatewayService, SimpleNamespace(version="test")))
    paths = {getattr(route, "path", "") for route in app.routes}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]
        if name == "gateway":
            assert probe["httpGet"]["port"] == "http"
            assert probe["httpGet"]["path"] in paths
        else:
            assert probe["grpc"] == {"port": config.port}  # the health of the server as a whole, by number
    assert not config.tls_cert_file  # these probes speak no TLS
    if name == "gateway":
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_the_gateway_finds_the_others(objects: list[Document]) -> None:
    gateway = config_of(objects, "gateway")
    addresses = {"verifier": gateway.verifiers, "drafter": gateway.drafters}
    for name, (address,) in addresses.items():
        service = one(objects, "Service", name)["spec"]
        assert service["clusterIP"] == "None"  # its name is every pod's address, not one for all
        assert address == f"{name}:{service['ports'][0]['port']}"
    service = one(objects, "Service", "redis")["spec"]
    assert gateway.redis_url == f"redis://redis:{service['ports'][0]['port']}/0"


def reaches(objects: list[Document], source: dict[str, str], target: str, port: int) -> bool:
    """Whether a pod of `target` takes connections from a pod with these labels (a component's, or a namespace's)."""
    labels = pod_labels(objects)
    numbers = {entry["name"]: entry["containerPort"] for entry in container_of(objects, target)["ports"]}

    def is_from(peer: Document) -> bool:
        by = peer.get("podSelector") or peer["namespaceSelector"]
        assert len(peer) == 1
        return bool(by["matchLabels"].items() <= source.items())

    return any(
        any(numbers.get(entry["port"], entry["port"]) == port for entry in rule["ports"])
        and ("from" not in rule or any(map(is_from, rule["from"])))
        for policy in of_kind(objects, "NetworkPolicy")
        if target in selected(policy["spec"]["podSelector"], labels)
        for rule in policy["spec"].get("ingress", ())
    )


def test_nobody_reaches_what_is_not_his(objects: list[Document]) -> None:
    labels = pod_labels(objects)
    assert of_kind(objects, "NetworkPolicy")
    for name in labels:  # each is under the policy that allows nothing
        closed = [
            policy for policy in of_kind(objects, "NetworkPolicy") if not policy["spec"].keys() & {"ingress", "egress"}
        ]
        assert any(name in selected(policy["spec"]["podSelector"], labels) for policy in closed)
    stranger, monitoring = {"app": "other"}, {"kubernetes.io/metadata.name": "monitoring"}
    ports = {"gateway": (8000, 8001), "verifier": (7001, 9101), "drafter": (7002, 9102), "redis": (6379,)}
    for target, numbers in ports.items():
        for port in numbers:
            is_door, is_metrics = target == "gateway", port in (9101, 9102)
            assert reaches(objects, stranger, target, port) == is_door
            assert reaches(objects, labels["gateway"], target, port) == (not is_metrics)
            assert reaches(objects, labels["drafter"], target, port) == is_door
            assert reaches(objects, monitoring, target, port) == (is_door or is_metrics)


def test_the_gateway_may_go_where_it_must(objects: list[Document]) -> None:
    labels = pod_labels(objects)
    gateway = one(objects, "NetworkPolicy", "gateway")["spec"]
    allowed = {
        (target, entry["port"])
        for rule in gateway["egress"]
        for target in selected(rule["to"][0]["podSelector"], labels)
        for entry in rule["ports"]
    }
    assert allowed == {("verifier", 7001), ("drafter", 7002), ("redis", 6379)}
    [names] = [
        policy for policy in of_kind(objects, "NetworkPolicy") if policy["metadata"]["name"] == "names-and-traces"
    ]
    assert selected(names["spec"]["podSelector"], labels) == set(SERVICES)
