"""The objects of a Kubernetes overlay, and what the tests look up in them."""

from __future__ import annotations

from typing import Any

from outrider.shared.config import load_config
from tests.deploy.kustomize import Document, containers_of
from tests.deploy.test_compose import CONFIGS, ROOT, image_environment

KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ("cpu", "gpu")
SERVICES = sorted(CONFIGS)


def of_kind(objects: list[Document], *kinds: str) -> list[Document]:
    return [document for document in objects if document["kind"] in kinds]


def one(objects: list[Document], kind: str, name: str) -> Document:
    [found] = [document for document in of_kind(objects, kind) if document["metadata"]["name"] == name]
    return found


def workloads(objects: list[Document]) -> dict[str, Document]:
    return {document["metadata"]["name"]: document for document in of_kind(objects, "Deployment", "StatefulSet")}


def container_of(objects: list[Document], name: str) -> Document:
    [container] = containers_of(workloads(objects)[name])
    return container


def config_of(objects: list[Document], name: str) -> Any:
    """What the service's own loader makes of the image's and the ConfigMap's environment; raises for a wrong value."""
    environment = image_environment(name) | one(objects, "ConfigMap", name)["data"]
    return load_config(CONFIGS[name], [], environment, prog=name, description="")


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
