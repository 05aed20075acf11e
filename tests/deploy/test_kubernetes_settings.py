"""The chart: settings that the services take, hardening, and what the autoscalers ask for."""

from __future__ import annotations

import functools
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import redis
import yaml

from outrider.drafting.methods.registry import plan_methods
from outrider.shared.checkpoint import fetch as fetch_module
from outrider.shared.checkpoint.fetch import parser as fetch_parser
from outrider.shared.errors import ConfigError
from outrider.shared.service import is_enabled_at
from tests.deploy.conftest import rendered
from tests.deploy.helm import Document, render
from tests.deploy.kubernetes_objects import (
    KUBERNETES,
    SERVICES,
    VALUES,
    adapter_rules,
    config_of,
    container_of,
    containers_of,
    named,
    of_kind,
    of_release,
    one,
    pod_labels,
    pod_of,
    workloads,
)
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
    config_of(objects, name)  # raises if a flag or a value is refused
    variables = set(one(objects, "ConfigMap", name)["data"]) - {"HF_HOME"}
    for variable in variables:
        assert f"${variable})" in help_of(name)
    assert container_of(objects, name)["envFrom"] == [{"configMapRef": {"name": named(name)}}]


def test_what_the_values_say_of_settings_and_flags_arrives() -> None:
    objects = rendered("hub")
    assert config_of(objects, "gateway").metrics_prefix == "vllm"
    assert config_of(objects, "verifier").tensor_parallel_size == 2
    objects = rendered("own-redis")
    assert config_of(objects, "gateway").slo_itl_ms == 40
    assert config_of(objects, "verifier").max_num_seqs == 128
    assert config_of(objects, "gateway").redis_url == "redis://from-a-secret"
    assert {name: workloads(objects)[name]["spec"]["replicas"] for name in ("verifier", "drafter")} == {
        "verifier": 3,
        "drafter": 0,
    }


def test_a_flag_that_a_service_does_not_know_is_found_out() -> None:
    objects = render({**VALUES["folders"], "verifier": {"args": ["--tensor-parallel", "two"]}})
    with pytest.raises(ConfigError, match="tensor-parallel-size"):
        config_of(objects, "verifier")  # a flag's beginning is that flag, and "two" no number
    objects = render({**VALUES["folders"], "drafter": {"args": ["--tensor-parallel-size", "2"]}})
    with pytest.raises(SystemExit):
        config_of(objects, "drafter")


@pytest.mark.parametrize("name", SERVICES)
def test_draining_ends_before_the_pod_is_killed(name: str, objects: list[Document]) -> None:
    pod = pod_of(workloads(objects)[name])
    pause = container_of(objects, name).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["terminationGracePeriodSeconds"] >= pause + config_of(objects, name).drain_s + 5


@pytest.mark.parametrize("name", SERVICES)
def test_models_are_on_the_claim(name: str, kind: str, objects: list[Document]) -> None:
    config = config_of(objects, name)
    values = VALUES[kind]
    if name == "drafter":
        draft = values.get("draftModel", "")
        assert (config.draft_model, config.target_model) == ((draft,) if draft else (), values["model"])
        if not draft:
            assert set(plan_methods((), config.methods, config.target_model)) == {"ngram", "suffix"}
    else:
        assert config.model == values["model"]
    [mount] = [mount for mount in container_of(objects, name)["volumeMounts"] if mount["name"] == "models"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/app/models", True)
    [volume] = [volume for volume in pod_of(workloads(objects)[name])["volumes"] if volume["name"] == "models"]
    claim = "checkpoints" if kind == "folders" else one(objects, "PersistentVolumeClaim", "models")["metadata"]["name"]
    assert volume["persistentVolumeClaim"] == {"claimName": claim}


@pytest.mark.parametrize("name", SERVICES)
def test_hub_ids_are_fetched_first_and_nothing_is_fetched_later(name: str, kind: str, objects: list[Document]) -> None:
    fetches = pod_of(workloads(objects)[name]).get("initContainers", [])
    if kind == "folders":
        assert not fetches
        return
    [fetch] = fetches
    given = fetch_parser().parse_args(fetch["args"])
    values = VALUES[kind]
    drafts = [values["draftModel"]] if name == "drafter" and "draftModel" in values else []
    assert (given.models, given.no_weights) == ([*drafts, values["model"]], name == "gateway")
    assert fetch["command"] == ["/opt/venv/bin/python", "-m", fetch_module.__name__]
    variables = {entry["name"]: entry for entry in fetch["env"]}
    assert variables["HF_HUB_OFFLINE"]["value"] == "0"
    [mount] = [mount for mount in fetch["volumeMounts"] if mount["name"] == "models"]
    assert not mount.get("readOnly")
    assert variables["HF_HOME"]["value"].startswith(f"{mount['mountPath']}/")
    if kind == "hub":
        assert variables["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
        assert variables["HF_ENDPOINT"]["value"] == "https://hub.example.com"
    # The service reads the same cache and asks nobody.
    settings = one(objects, "ConfigMap", name)["data"]
    assert settings["HF_HOME"] == variables["HF_HOME"]["value"]
    assert "HF_HUB_OFFLINE" not in settings
    assert image_variable(name, "HF_HUB_OFFLINE") == "1"


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


def test_keys_come_from_a_secret() -> None:
    objects = rendered("hub")
    keys = Path(config_of(objects, "gateway").api_keys_file)
    [mount] = [
        mount for mount in container_of(objects, "gateway")["volumeMounts"] if mount["mountPath"] == str(keys.parent)
    ]
    [volume] = [
        volume for volume in pod_of(workloads(objects)["gateway"])["volumes"] if volume["name"] == mount["name"]
    ]
    assert volume["secret"]["secretName"] == "api-keys"
    assert mount["readOnly"]
    for kind in VALUES:
        assert not of_kind(rendered(kind), "Secret")  # they are made by hand
    assert not config_of(rendered("folders"), "gateway").api_keys_file


def test_gpus() -> None:
    objects = rendered("hub")
    for name, number in (("verifier", 2), ("drafter", 1)):
        assert config_of(objects, name).device == "cuda"
        assert container_of(objects, name)["resources"]["limits"]["nvidia.com/gpu"] == number
        assert container_of(objects, name)["image"].endswith("-cuda")
    assert config_of(objects, "verifier").kv_cache_mb == 0  # what the GPU has
    assert config_of(rendered("folders"), "verifier").kv_cache_mb == 2048
    gateway = container_of(objects, "gateway")
    assert "nvidia.com/gpu" not in gateway["resources"]["limits"]
    assert not gateway["image"].endswith("-cuda")


# ---- hardening ----


@pytest.mark.parametrize("name", [*SERVICES, "redis"])
def test_pods_are_hardened(name: str, kind: str, objects: list[Document]) -> None:
    if (name, kind) == ("redis", "own-redis"):
        assert name not in workloads(objects)
        return
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
        assert ":" in container["image"].rpartition("/")[2]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container_of(objects, name).keys()


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_is_shown_to_developers(name: str, objects: list[Document]) -> None:
    config = config_of(objects, name)
    assert not is_enabled_at(config.host, config.reflection)
    assert pod_of(workloads(objects)[name])["securityContext"]["runAsUser"] == 10001  # as the image says


def test_redis_starts_as_the_chart_says(tmp_path: Path) -> None:
    container = container_of(rendered("folders"), "redis")
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


def test_autoscalers_ask_for_what_the_adapter_serves(kind: str, objects: list[Document]) -> None:
    served = {rule["name"]["as"]: rule["metricsQuery"] for rule in adapter_rules()}
    wanted: dict[str, set[str]] = {}
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        metrics = [metric["external"] for metric in scaler["spec"]["metrics"]]
        wanted[of_release(scaler)] = {metric["metric"]["name"] for metric in metrics}
        assert all(0 < seconds(metric["target"]["value"]) < 1 for metric in metrics)
        assert 1 < scaler["spec"]["minReplicas"] < scaler["spec"]["maxReplicas"]
    if kind == "own-redis":
        assert not wanted
        return
    assert set().union(*wanted.values()) == served.keys()
    assert {name for name, query in served.items() if "draft" in query} == wanted["drafter"]


def test_drafters_may_be_scaled_from_none() -> None:
    objects = render({**VALUES["folders"], "autoscaling": {"drafter": {"minReplicas": 0}}})
    scaler = one(objects, "HorizontalPodAutoscaler", "drafter")
    assert scaler["spec"]["minReplicas"] == 0
    kubernetes_validate.validate(scaler, kubernetes_validate.latest_version(), strict=True)


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
