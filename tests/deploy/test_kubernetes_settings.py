"""The Kubernetes manifests: settings that the services take, hardening, and what the autoscalers ask for."""

from __future__ import annotations

import functools
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from outrider.shared.service import is_enabled_at
from tests.deploy.kubernetes_objects import (
    KUBERNETES,
    SERVICES,
    config_of,
    container_of,
    of_kind,
    one,
    pod_labels,
    workloads,
)
from tests.deploy.kustomize import Document, build, containers_of, pod_of, read_documents
from tests.deploy.test_compose import MODULES, ROOT
from tests.ports import server_port

pytestmark = pytest.mark.storm

COMPONENT = "app.kubernetes.io/component"


def seconds(quantity: str) -> Decimal:
    """Of a Kubernetes quantity without a unit, or in thousandths."""
    return Decimal(quantity.removesuffix("m")) / 1000 if quantity.endswith("m") else Decimal(quantity)


# ---- settings ----


@functools.cache
def help_of(name: str) -> str:
    command = [sys.executable, "-m", MODULES[name], "--help"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=True).stdout


@pytest.mark.parametrize("name", SERVICES)
def test_variables_are_settings_that_help_names(name: str, objects: list[Document]) -> None:
    config_of(objects, name)  # raises if a value is refused
    for variable in one(objects, "ConfigMap", name)["data"]:
        assert f"${variable})" in help_of(name)
    assert container_of(objects, name)["envFrom"] == [{"configMapRef": {"name": name}}]


@pytest.mark.parametrize("name", SERVICES)
def test_draining_ends_before_the_pod_is_killed(name: str, objects: list[Document]) -> None:
    pod = pod_of(workloads(objects)[name])
    pause = container_of(objects, name).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["terminationGracePeriodSeconds"] >= pause + config_of(objects, name).drain_s + 5


@pytest.mark.parametrize(("name", "setting"), [("gateway", "model"), ("verifier", "model"), ("drafter", "draft_model")])
def test_default_models_are_on_the_volume(name: str, setting: str, objects: list[Document]) -> None:
    value = getattr(config_of(objects, name), setting)
    for model in (value,) if isinstance(value, str) else value:
        assert (ROOT / model / "config.json").is_file()
        assert model.startswith("models/")
    [mount] = [mount for mount in container_of(objects, name)["volumeMounts"] if mount["name"] == "models"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/app/models", True)


@pytest.mark.parametrize("name", ["verifier", "drafter"])
def test_threads_are_those_that_the_pod_has(name: str, objects: list[Document]) -> None:
    """Without a number a service takes every core that it sees, and in a container it sees all of the node's."""
    assert config_of(objects, name).num_threads == int(container_of(objects, name)["resources"]["limits"]["cpu"])


@pytest.mark.parametrize("name", SERVICES)
def test_services_write_only_where_they_may(name: str, objects: list[Document]) -> None:
    pod, container = pod_of(workloads(objects)[name]), container_of(objects, name)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == {mount["name"] for mount in container["volumeMounts"]}
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    caches = set() if name == "gateway" else {image_variable(name, "NUMBA_CACHE_DIR")}
    assert writable == {image_variable(name, "HOME"), *caches}
    for mount in container["volumeMounts"]:
        if not mount.get("readOnly"):
            assert volumes[mount["name"]]["emptyDir"]["sizeLimit"]


def image_variable(name: str, variable: str) -> str:
    text = (ROOT / "deploy/docker" / f"{name}.Dockerfile").read_text()
    return text.partition(f" {variable}=")[2].split()[0]


def test_keys_are_wanted_and_come_from_a_secret(objects: list[Document]) -> None:
    keys = Path(config_of(objects, "gateway").api_keys_file)
    [mount] = [
        mount for mount in container_of(objects, "gateway")["volumeMounts"] if mount["mountPath"] == str(keys.parent)
    ]
    [volume] = [
        volume for volume in pod_of(workloads(objects)["gateway"])["volumes"] if volume["name"] == mount["name"]
    ]
    assert volume["secret"]["secretName"] == "api-keys"
    assert mount["readOnly"]
    assert not of_kind(objects, "Secret")  # none in the repository


def test_the_gpu_overlay_runs_on_gpus() -> None:
    objects = build(KUBERNETES / "overlays/gpu")
    for name in ("verifier", "drafter"):
        assert config_of(objects, name).device == "cuda"
        assert container_of(objects, name)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in container_of(objects, "gateway")["resources"]["limits"]


# ---- hardening ----


@pytest.mark.parametrize("name", [*SERVICES, "redis"])
def test_pods_are_hardened(name: str, objects: list[Document]) -> None:
    pod = pod_of(workloads(objects)[name])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    for container in containers_of(workloads(objects)[name]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
        assert ":" in container["image"].rpartition("/")[2]


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_is_shown_to_developers(name: str, objects: list[Document]) -> None:
    config = config_of(objects, name)
    assert not is_enabled_at(config.host, config.reflection)
    assert pod_of(workloads(objects)[name])["securityContext"]["runAsUser"] == 10001  # as the image says


def test_redis_starts_as_the_manifest_says(objects: list[Document], tmp_path: Path) -> None:
    container = container_of(objects, "redis")
    assert container["args"][-2:] == ["--dir", container["volumeMounts"][0]["mountPath"]]
    command = [*container["command"], *container["args"][:-1], str(tmp_path)]
    port = server_port()
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(port=port, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 200))
        settings: Any = client.config_get()
        assert settings["appendonly"] == "yes"
        assert settings["appendfsync"] in {"everysec", "always"}
        assert settings["maxmemory-policy"] == "noeviction"
        assert int(settings["maxmemory"]) * 2 <= 2 * 2**30
        client.close()
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert container["resources"]["limits"]["memory"] == "2Gi"


# ---- scaling ----


def test_autoscalers_ask_for_what_the_adapter_serves(objects: list[Document]) -> None:
    [adapter] = read_documents(KUBERNETES / "monitoring/prometheus-adapter.yaml")
    served = {rule["name"]["as"]: rule["metricsQuery"] for rule in adapter["externalRules"]}
    wanted = {}
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        [metric] = scaler["spec"]["metrics"]
        wanted[scaler["metadata"]["name"]] = metric["external"]["metric"]["name"]
        assert 0 < seconds(metric["external"]["target"]["value"]) < 1
        assert 1 < scaler["spec"]["minReplicas"] < scaler["spec"]["maxReplicas"]
    assert set(wanted.values()) == served.keys()
    assert "outrider:draft_rounds_total" in served[wanted["drafter"]]
    assert "outrider:step_queue_seconds_bucket" in served[wanted["verifier"]]


def test_prometheus_gives_pods_the_jobs_of_the_dashboard(objects: list[Document]) -> None:
    [job] = yaml.safe_load((KUBERNETES / "monitoring/prometheus-scrape.yaml").read_text())
    keep = job["relabel_configs"][0]["regex"]
    assert keep == "gateway;http|(verifier|drafter);metrics"
    targets = {rule["target_label"] for rule in job["relabel_configs"] if "target_label" in rule}
    assert targets == {"job", "namespace", "pod"}
    for name in SERVICES:
        assert pod_labels(objects)[name][COMPONENT] == name
        ports = {port["name"] for port in container_of(objects, name)["ports"]}
        assert ("http" if name == "gateway" else "metrics") in ports
