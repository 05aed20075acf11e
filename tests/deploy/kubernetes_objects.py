"""What the chart makes of several sets of values, and what the tests look up in it."""

from __future__ import annotations

from typing import Any

import yaml

from outrider.shared.config import load_config
from tests.deploy.helm import RELEASE, Document
from tests.deploy.test_compose import CONFIGS, ROOT, image_environment

KUBERNETES = ROOT / "deploy/kubernetes"  # beside the chart
SERVICES = sorted(CONFIGS)
# What people have: folders on a claim and CPUs; the Hub, GPUs and keys; a Redis of their own, settings, no autoscaler.
VALUES: dict[str, dict[str, Any]] = {
    "folders": {
        "model": "models/demo-target",
        "draftModel": "models/demo-draft",
        "models": {"existingClaim": "checkpoints"},
    },
    "hub": {
        "model": "org/big@main",
        "draftModel": "org/small",
        "hub": {"tokenSecret": "hub", "endpoint": "https://hub.example.com"},
        "models": {"size": "200Gi", "storageClass": "shared"},
        "gateway": {"apiKeysSecret": "api-keys", "args": ["--metrics-prefix", "vllm"]},
        "verifier": {"gpus": 2, "args": ["--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8"]},
        "drafter": {"gpus": 1},
    },
    "own-redis": {
        "model": "org/big",
        "redis": {"enabled": False, "urlSecret": "redis", "port": 6380},
        "gateway": {"env": {"OUTRIDER_SLO_ITL_MS": "40"}, "service": {"type": "LoadBalancer"}},
        "verifier": {"replicas": 3, "env": {"OUTRIDER_MAX_NUM_SEQS": "128"}},
        "drafter": {"replicas": 0},
        "autoscaling": {"enabled": False},
    },
}


def named(component: str) -> str:
    """The name of a component's objects."""
    return f"{RELEASE}-{component}"


def of_release(document: Document) -> str:
    """The component's name in that of its object."""
    name: str = document["metadata"]["name"]
    return name.removeprefix(f"{RELEASE}-")


def pod_of(document: Document) -> Document:
    """The pod's spec in an object that makes pods; empty for others."""
    pod: Document = document.get("spec", {}).get("template", {}).get("spec", {})
    return pod


def containers_of(document: Document) -> list[Document]:
    pod = pod_of(document)
    return [*pod.get("initContainers", ()), *pod.get("containers", ())]


def adapter_rules() -> list[Document]:
    """What prometheus-adapter serves to the autoscalers."""
    rules: list[Document] = yaml.safe_load((KUBERNETES / "monitoring/prometheus-adapter.yaml").read_text())[
        "externalRules"
    ]
    return rules


def of_kind(objects: list[Document], *kinds: str) -> list[Document]:
    return [document for document in objects if document["kind"] in kinds]


def one(objects: list[Document], kind: str, name: str) -> Document:
    [found] = [document for document in of_kind(objects, kind) if document["metadata"]["name"] == named(name)]
    return found


def workloads(objects: list[Document]) -> dict[str, Document]:
    return {of_release(document): document for document in of_kind(objects, "Deployment", "StatefulSet")}


def container_of(objects: list[Document], name: str) -> Document:
    container: Document
    [container] = pod_of(workloads(objects)[name])["containers"]
    return container


def config_of(objects: list[Document], name: str) -> Any:
    """What the service's own parser makes of the container's flags, of its ConfigMap and of its image's environment.

    Raises for a flag that it does not know or a wrong value.
    """
    container = container_of(objects, name)
    environment = image_environment(name) | one(objects, "ConfigMap", name)["data"]
    environment |= {entry["name"]: "redis://from-a-secret" for entry in container.get("env", ())}
    return load_config(CONFIGS[name], container.get("args", []), environment, prog=name, description="")


def pod_labels(objects: list[Document]) -> dict[str, dict[str, str]]:
    return {name: document["spec"]["template"]["metadata"]["labels"] for name, document in workloads(objects).items()}


def selected(selector: Document, labels: dict[str, dict[str, str]]) -> set[str]:
    """Names of the workloads whose pods a label selector takes."""

    def takes(given: dict[str, str]) -> bool:
        expressions = selector.get("matchExpressions", ())
        assert all(expression["operator"] == "In" for expression in expressions)
        return selector.get("matchLabels", {}).items() <= given.items() and all(
            given.get(expression["key"]) in expression["values"] for expression in expressions
        )

    return {name for name, given in labels.items() if takes(given)}
