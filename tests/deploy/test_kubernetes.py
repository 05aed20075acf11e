"""The chart: schemas, and that labels, ports, probes and network policies fit each other and the code.

Nothing is applied to a cluster here. Settings, hardening and scaling: test_kubernetes_settings.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import kubernetes_validate
import pytest

from outrider.gateway.servers.http.app import create_app
from outrider.gateway.servers.service import GatewayService
from tests.deploy.helm import VERSIONS as HELM_VERSIONS
from tests.deploy.helm import Document, HelmError, lint, render
from tests.deploy.kubernetes_objects import (
    SERVICES,
    VALUES,
    config_of,
    container_of,
    named,
    of_kind,
    of_release,
    one,
    pod_labels,
    pod_of,
    selected,
    workloads,
)

# The oldest that has all that is used here (preStop's sleep), and the newest that the schemas are there for.
VERSIONS = ("1.30.0", kubernetes_validate.latest_version())
PART_OF = {"app.kubernetes.io/part-of": "outrider"}


# ---- by themselves ----


@pytest.mark.parametrize("version", HELM_VERSIONS)
def test_both_helms_take_it_and_make_the_same(version: str, kind: str) -> None:
    assert lint(VALUES[kind], version)["passed"]
    assert render(VALUES[kind], version) == render(VALUES[kind])


def test_without_a_model_it_says_what_to_name() -> None:
    with pytest.raises(HelmError, match="name the target"):
        render({})
    with pytest.raises(HelmError, match="give url or urlSecret"):
        render({**VALUES["folders"], "redis": {"enabled": False}})


def test_a_value_that_is_none_is_refused() -> None:
    with pytest.raises(HelmError, match="replica"):
        render({**VALUES["folders"], "gateway": {"replica": 3}})


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_what_kubernetes_knows(version: str, objects: list[Document]) -> None:
    for document in objects:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_are_strict(objects: list[Document]) -> None:
    broken = one(objects, "Deployment", "gateway") | {"surprise": 1}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_every_object_is_the_release_s_and_there_once(objects: list[Document]) -> None:
    names = [(document["kind"], document["metadata"]["name"]) for document in objects]
    assert len(names) == len(set(names))
    for document in objects:
        assert document["metadata"]["name"].startswith(named(""))
        assert document["metadata"]["labels"].items() >= PART_OF.items()
        assert "namespace" not in document["metadata"]  # the release's


def test_the_stack_is_whole(kind: str, objects: list[Document]) -> None:
    redis = set() if kind == "own-redis" else {"redis"}
    assert workloads(objects).keys() == {*SERVICES, *redis}
    for of, names in {
        "Service": {*SERVICES, *redis},
        "ConfigMap": set(SERVICES),
        "PodDisruptionBudget": set(SERVICES),
        "HorizontalPodAutoscaler": set() if kind == "own-redis" else {"verifier", "drafter"},
        "PersistentVolumeClaim": set() if kind == "folders" else {"models"},
    }.items():
        assert {document["metadata"]["name"] for document in of_kind(objects, of)} == set(map(named, names))


# ---- labels and ports ----


def test_selectors_take_the_pods_they_are_meant_for(objects: list[Document]) -> None:
    labels = pod_labels(objects)
    for name, document in workloads(objects).items():
        assert selected(document["spec"]["selector"], labels) == {name}
        for constraint in pod_of(document).get("topologySpreadConstraints", ()):
            assert selected(constraint["labelSelector"], labels) == {name}
    for document in of_kind(objects, "Service"):
        assert selected({"matchLabels": document["spec"]["selector"]}, labels) == {of_release(document)}
    for document in of_kind(objects, "PodDisruptionBudget"):
        assert selected(document["spec"]["selector"], labels) == {of_release(document)}
    for document in of_kind(objects, "HorizontalPodAutoscaler"):
        target = document["spec"]["scaleTargetRef"]
        assert target["name"] == document["metadata"]["name"]
        assert "replicas" not in one(objects, target["kind"], of_release(document))["spec"]


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


def test_the_gateway_finds_the_others(kind: str, objects: list[Document]) -> None:
    gateway = config_of(objects, "gateway")
    addresses = {"verifier": gateway.verifiers, "drafter": gateway.drafters}
    for name, (address,) in addresses.items():
        service = one(objects, "Service", name)["spec"]
        assert service["clusterIP"] == "None"  # its name is every pod's address, not one for all
        assert address == f"{named(name)}:{service['ports'][0]['port']}"
    if kind == "own-redis":
        [variable] = container_of(objects, "gateway")["env"]
        assert variable["name"] == "OUTRIDER_REDIS_URL"
        assert variable["valueFrom"] == {"secretKeyRef": {"name": "redis", "key": "url"}}
    else:
        service = one(objects, "Service", "redis")["spec"]
        assert gateway.redis_url == f"redis://{named('redis')}:{service['ports'][0]['port']}/0"


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
        for port in numbers if target in labels else ():
            is_door, is_metrics = target == "gateway", port in (9101, 9102)
            assert reaches(objects, stranger, target, port) == is_door
            assert reaches(objects, labels["gateway"], target, port) == (not is_metrics)
            assert reaches(objects, labels["drafter"], target, port) == is_door
            assert reaches(objects, monitoring, target, port) == (is_door or is_metrics)


def test_the_gateway_may_go_where_it_must(kind: str, objects: list[Document]) -> None:
    labels = pod_labels(objects)
    rules = one(objects, "NetworkPolicy", "gateway")["spec"]["egress"]
    allowed = {
        (target, entry["port"])
        for rule in rules
        for target in (selected(rule["to"][0]["podSelector"], labels) if "to" in rule else {"anywhere"})
        for entry in rule["ports"]
    }
    redis = ("anywhere", 6380) if kind == "own-redis" else ("redis", 6379)
    assert allowed == {("verifier", 7001), ("drafter", 7002), redis}


def test_the_hub_is_reached_where_something_is_to_be_fetched(kind: str, objects: list[Document]) -> None:
    outward = one(objects, "NetworkPolicy", "outward")["spec"]
    assert selected(outward["podSelector"], pod_labels(objects)) == set(SERVICES)
    everywhere = [entry["port"] for rule in outward["egress"] if "to" not in rule for entry in rule["ports"]]
    assert everywhere == ([] if kind == "folders" else [443])


def test_policies_can_be_left_out() -> None:
    objects = render({**VALUES["folders"], "networkPolicies": {"enabled": False}})
    assert not of_kind(objects, "NetworkPolicy")
