"""Builds a kustomization as `kubectl kustomize` does, for what ours use: resources, namespace, images, JSON patches.

Anything else in a kustomization.yaml is refused, not ignored. test_kubernetes.py compares it with kubectl, where that
is installed.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]
_KEYS = {"apiVersion", "kind", "namespace", "resources", "images", "patches"}
_WITHOUT_NAMESPACE = {"Namespace"}


def build(folder: Path) -> list[Document]:
    """Every object, in the order of the files."""
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := spec.keys() - _KEYS:
        raise NotImplementedError(f"{folder}: {sorted(unknown)}")
    documents: list[Document] = []
    for resource in spec["resources"]:
        path = (folder / resource).resolve()
        documents += build(path) if path.is_dir() else read_documents(path)
    for patch in spec.get("patches", ()):
        _patch(documents, patch["target"], yaml.safe_load((folder / patch["path"]).read_text()))
    for document in documents:
        if "namespace" in spec and document["kind"] not in _WITHOUT_NAMESPACE:
            document["metadata"]["namespace"] = spec["namespace"]
        for container in containers_of(document):
            container["image"] = _image(container["image"], spec.get("images", ()))
    return documents


def read_documents(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text()))


def pod_of(document: Document) -> Document:
    """The pod's spec in an object that makes pods; empty for others."""
    pod: Document = document.get("spec", {}).get("template", {}).get("spec", {})
    return pod


def containers_of(document: Document) -> list[Document]:
    pod = pod_of(document)
    return [*pod.get("initContainers", ()), *pod.get("containers", ())]


def _image(image: str, rules: list[dict[str, str]]) -> str:
    name, _, tag = image.partition(":")
    for rule in rules:
        if rule["name"] == name:
            name, tag = rule.get("newName", name), rule.get("newTag", tag)
            break
    return f"{name}:{tag}" if tag else name


def _patch(documents: list[Document], target: dict[str, str], operations: list[Document]) -> None:
    found = [
        document
        for document in documents
        if document["kind"] == target["kind"] and re.fullmatch(target["name"], document["metadata"]["name"])
    ]
    if not found:
        raise LookupError(f"no object for the patch of {target}")
    for document in found:
        for operation in operations:
            _apply(document, operation)


def _apply(document: Any, operation: Document) -> None:
    """RFC 6902's add and replace of one member of an object or of an array."""
    *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
    for part in parents:
        document = document[int(part)] if isinstance(document, list) else document[part]
    if operation["op"] == "replace" and last not in document:
        raise LookupError(f"nothing to replace at {operation['path']}")
    if operation["op"] not in {"add", "replace"} or isinstance(document, list):
        raise NotImplementedError(str(operation))
    document[last] = copy.deepcopy(operation["value"])
