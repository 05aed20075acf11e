"""docker-compose.yml, the Dockerfiles and prometheus.yml against the code: settings, ports, folders, hardening.

Nothing is started here: test_images.py does that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from outrider.client.cli import main as outrider_command
from outrider.client.cli.app import app
from outrider.drafter_service.config import DrafterConfig
from outrider.drafting.methods.registry import plan_methods
from outrider.gateway.config import GatewayConfig
from outrider.shared.checkpoint import fetch as fetch_module
from outrider.shared.config import ENV_PREFIX, load_config
from outrider.shared.service import is_enabled_at
from outrider.verifier_service.config import VerifierConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS: dict[str, type[Any]] = {"gateway": GatewayConfig, "drafter": DrafterConfig, "verifier": VerifierConfig}
MODULES = {
    "gateway": "outrider.gateway",
    "drafter": "outrider.drafter_service",
    "verifier": "outrider.verifier_service",
}
# Of the profile cpu, which .env makes the default; gpu has ON_GPU in place of the verifier.
ALL_SERVICES = {*CONFIGS, "models", "redis", "prometheus", "grafana"}
ON_GPU = "verifier-gpu"
_INTERPOLATION = re.compile(r"\$\{([A-Z_]+)(?::?-([^}]*))?\}")


def with_defaults(value: Any) -> Any:
    """The tree with every ${NAME:-default} replaced by its default, as Compose does in an empty environment."""
    if isinstance(value, dict):
        return {key: with_defaults(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_defaults(item) for item in value]
    return _INTERPOLATION.sub(lambda match: match[2] or "", value) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    tree: dict[str, Any] = with_defaults(yaml.safe_load((ROOT / "docker-compose.yml").read_text()))
    return tree


@pytest.fixture(scope="module")
def scrape_ports() -> dict[str, int]:
    """Port by the DNS name that Prometheus looks up."""
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    lookups = [lookup for job in config["scrape_configs"] for lookup in job["dns_sd_configs"]]
    assert all(lookup["type"] == "A" for lookup in lookups)
    return {name: lookup["port"] for lookup in lookups for name in lookup["names"]}


def image_environment(name: str) -> dict[str, str]:
    """The OUTRIDER_ variables that an image's ENV lines set."""
    pairs = re.findall(rf"({ENV_PREFIX}[A-Z_]+)=(\S+)", dockerfile(name))
    return dict(pairs)


def dockerfile(name: str) -> str:
    return (ROOT / "deploy/docker" / f"{name}.Dockerfile").read_text()


def container_config(name: str, compose: dict[str, Any]) -> Any:
    """What the service's own loader makes of the container's environment."""
    environment = image_environment(name) | compose["services"][name]["environment"]
    return load_config(CONFIGS[name], [], environment, prog=name, description="")


def resolved_by_docker(variables: dict[str, str]) -> dict[str, Any]:
    """What Docker Compose itself makes of the file. Skips the test where there is no Docker Compose to ask."""
    if shutil.which("docker") is None:
        pytest.skip("the docker command is not here")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("the docker command here has no Compose")
    command = ["docker", "compose", "-f", str(ROOT / "docker-compose.yml"), "config", "--format", "json"]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    tree: dict[str, Any] = json.loads(done.stdout)
    return tree


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text.removesuffix("s"))


def test_the_stack_has_its_services(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {*ALL_SERVICES, ON_GPU}


def test_the_profiles() -> None:
    assert resolved_by_docker({})["services"].keys() == ALL_SERVICES
    assert resolved_by_docker({"COMPOSE_PROFILES": "gpu"})["services"].keys() == {*ALL_SERVICES, ON_GPU} - {"verifier"}


def test_the_verifier_on_a_gpu_is_the_other_one_but_for_its_device(compose: dict[str, Any]) -> None:
    cpu, gpu = compose["services"]["verifier"], compose["services"][ON_GPU]
    assert {key for key in cpu.keys() | gpu.keys() if cpu.get(key) != gpu.get(key)} == {
        *("profiles", "image", "build", "environment", "networks", "deploy", "mem_limit")
    }
    config = load_config(
        VerifierConfig, [], image_environment("verifier") | gpu["environment"], prog=ON_GPU, description=""
    )
    assert (config.device, config.port) == ("cuda", container_config("verifier", compose).port)
    assert gpu["networks"] == {"inside": {"aliases": ["verifier"]}}
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "1", "capabilities": ["gpu"]}
    # What triton compiles is written to a volume, and its compiler is an argument that the image knows.
    assert f"verifier-cache:{gpu['environment']['TRITON_CACHE_DIR'].rpartition('/')[0]}" in gpu["volumes"]
    assert all(re.search(rf"^ARG {name}\b", dockerfile("verifier"), re.MULTILINE) for name in gpu["build"]["args"])


@pytest.mark.parametrize("name", sorted(ALL_SERVICES))
def test_every_service_is_hardened(name: str, compose: dict[str, Any]) -> None:
    service = compose["services"][name]
    assert service["user"].split(":")[0] not in {"", "0", "root"}
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert any(mount.startswith("/tmp") for mount in service["tmpfs"])
    assert "privileged" not in service


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_wrong_setting_does_not_restart_for_ever(name: str, compose: dict[str, Any]) -> None:
    policy, _, attempts = compose["services"][name]["restart"].partition(":")
    assert policy == "on-failure"
    assert 1 <= int(attempts) <= 20


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_root_file_system_is_not_written(name: str, compose: dict[str, Any]) -> None:
    """All that a service writes is memory with a bound, or a volume of its own; what is mounted from here is read."""
    service = compose["services"][name]
    assert all(re.fullmatch(r"/[a-z]+:size=\d+m,mode=1777", mount) for mount in service["tmpfs"])
    mounted = [volume.split(":") for volume in service["volumes"]]
    assert all(mount[-1] == "ro" for mount in mounted if mount[0].startswith((".", "/")))
    assert {mount[0] for mount in mounted if mount[-1] != "ro"} <= {f"{name}-cache"}
    assert re.search(r"\bHOME=/tmp\b", dockerfile(name))
    assert re.search(r"\bPYTHONDONTWRITEBYTECODE=1\b", dockerfile(name))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_nothing_is_shown_to_developers_in_a_container(name: str, compose: dict[str, Any]) -> None:
    config = container_config(name, compose)
    assert not is_enabled_at(config.host, config.reflection)
    if name == "gateway":
        assert not is_enabled_at(config.host, config.api_docs)


def test_keys_and_certificates_come_from_a_folder_that_git_does_not_keep(compose: dict[str, Any]) -> None:
    for name in CONFIGS:
        assert "./deploy/secrets:/run/outrider:ro" in compose["services"][name]["volumes"]
    assert (ROOT / "deploy/secrets/.gitignore").read_text().splitlines()[1:] == ["*", "!.gitignore"]
    for name in CONFIGS:
        config = container_config(name, compose)
        assert {config.tls_cert_file, config.tls_key_file, config.tls_ca_file} == {""}
    assert not container_config("gateway", compose).api_keys_file


def test_keys_and_tls_reach_the_containers() -> None:
    names = ("OUTRIDER_API_KEYS_FILE", *(f"GATEWAY_TLS_{kind}_FILE" for kind in ("CERT", "KEY", "CA")))
    fleet = tuple(f"FLEET_TLS_{kind}_FILE" for kind in ("CERT", "KEY", "CA"))
    tree = resolved_by_docker({name: f"/run/outrider/{name}" for name in (*names, *fleet)})
    gateway = container_config("gateway", tree)
    assert gateway.api_keys_file == "/run/outrider/OUTRIDER_API_KEYS_FILE"
    doors = (gateway.tls_cert_file, gateway.tls_key_file, gateway.tls_ca_file)
    assert doors == tuple(f"/run/outrider/{name}" for name in names[1:])
    inwards = (gateway.fleet_tls_cert_file, gateway.fleet_tls_key_file, gateway.fleet_tls_ca_file)
    assert inwards == tuple(f"/run/outrider/{name}" for name in fleet)
    for name in ("verifier", "drafter"):
        config = container_config(name, tree)
        assert (config.tls_cert_file, config.tls_key_file, config.tls_ca_file) == inwards


def test_docker_compose_reads_the_file_as_these_tests_do(compose: dict[str, Any]) -> None:
    services = resolved_by_docker({})["services"]
    for name in ALL_SERVICES:
        service, resolved = compose["services"][name], services[name]
        for key in ("user", "read_only", "cap_drop", "security_opt", "restart", "tmpfs", "stop_grace_period"):
            assert resolved.get(key) == service.get(key)
        assert resolved.get("environment", {}) == service.get("environment", {})
        assert set(resolved["networks"]) == set(service["networks"])
        published = [f"{port['host_ip']}:{port['published']}:{port['target']}" for port in resolved.get("ports", [])]
        assert published == service.get("ports", [])
        assert [mount["target"] for mount in resolved["volumes"]] == [
            volume.split(":")[1] for volume in service["volumes"]
        ]


@pytest.mark.parametrize("name", sorted(ALL_SERVICES))
def test_every_service_is_checked_and_given_time_to_stop(name: str, compose: dict[str, Any]) -> None:
    service = compose["services"][name]
    assert "healthcheck" in service or "HEALTHCHECK" in dockerfile(name)
    assert "stop_grace_period" in service


@pytest.mark.parametrize("name", sorted(ALL_SERVICES))
def test_ports_are_published_on_loopback_unless_asked_otherwise(name: str, compose: dict[str, Any]) -> None:
    published = compose["services"][name].get("ports", [])
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert bool(published) == (name in {"gateway", "prometheus", "grafana"})


@pytest.mark.parametrize("name", sorted({"redis", "prometheus", "grafana"}))
def test_images_from_elsewhere_are_pinned(name: str, compose: dict[str, Any]) -> None:
    _, _, tag = compose["services"][name]["image"].partition(":")
    assert re.match(r"v?\d+\.\d+\.\d+", tag)


@pytest.mark.parametrize("name", sorted({*ALL_SERVICES, ON_GPU}))
def test_memory_and_processes_are_bounded(name: str, compose: dict[str, Any]) -> None:
    service = compose["services"][name]
    assert service["pids_limit"] <= 2048
    assert re.fullmatch(r"\d+g", service["mem_limit"])


def test_redis_has_memory_to_rewrite_its_log(compose: dict[str, Any]) -> None:
    redis = compose["services"]["redis"]
    maxmemory = redis["command"][redis["command"].index("--maxmemory") + 1]
    assert int(redis["mem_limit"].removesuffix("g")) >= 2 * int(maxmemory.removesuffix("gb"))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_variable_is_a_setting_of_its_service(name: str, compose: dict[str, Any]) -> None:
    known = {ENV_PREFIX + field.name.upper() for field in dataclasses.fields(CONFIGS[name])}
    given = image_environment(name).keys() | compose["services"][name]["environment"].keys()
    assert given - known == {"HF_HOME"}
    container_config(name, compose)  # raises if a value is refused


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_draining_ends_before_the_container_is_killed(name: str, compose: dict[str, Any]) -> None:
    service = compose["services"][name]
    assert service["stop_signal"] == "SIGTERM"
    assert service["init"] is True
    assert seconds(service["stop_grace_period"]) > container_config(name, compose).drain_s


def test_drafters_can_be_scaled(compose: dict[str, Any]) -> None:
    assert not {"container_name", "ports", "hostname", "deploy"} & compose["services"]["drafter"].keys()


def test_the_gateway_finds_the_others_by_name(compose: dict[str, Any]) -> None:
    gateway = container_config("gateway", compose)
    assert gateway.drafters == (f"drafter:{container_config('drafter', compose).port}",)
    assert gateway.verifiers == (f"verifier:{container_config('verifier', compose).port}",)
    assert gateway.redis_url.startswith("redis://redis:6379")
    for name in ("drafter", "verifier", "redis", "prometheus"):
        assert set(compose["services"][name]["networks"]) & set(compose["services"]["gateway"]["networks"])


def test_the_commit_log_is_append_only(compose: dict[str, Any]) -> None:
    command = compose["services"]["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--appendfsync") + 1] in {"everysec", "always"}
    # A bound, or the machine kills it; and at the bound it refuses instead of throwing logs away.
    assert command[command.index("--maxmemory") + 1] == "1gb"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert any(volume.endswith(":/data") for volume in compose["services"]["redis"]["volumes"])


@pytest.mark.parametrize(("name", "setting"), [("gateway", "model"), ("verifier", "model"), ("drafter", "draft_model")])
def test_default_models_are_in_the_repository(name: str, setting: str, compose: dict[str, Any]) -> None:
    models = getattr(container_config(name, compose), setting)
    assert models
    for model in (models,) if isinstance(models, str) else models:
        assert (ROOT / model / "config.json").is_file()
    assert "./models:/app/models:ro" in compose["services"][name]["volumes"]
    assert re.search(r"^WORKDIR /app$", dockerfile(name), re.MULTILINE)


def test_a_model_of_the_hub_is_downloaded_before_the_services_start_without_a_network() -> None:
    variables = {"MODEL": "org/big", "DRAFT_MODEL": "org/small", "LOCAL_DRAFT_MODEL": "", "HF_TOKEN": "secret"}
    services = resolved_by_docker(variables)["services"]
    fetch = services["models"]
    assert fetch["entrypoint"] == ["/opt/venv/bin/python", "-m", fetch_module.__name__]
    assert fetch_module.parser().parse_args(fetch["command"]).models == ["org/big", "org/small", ""]
    assert (fetch["environment"]["HF_HUB_OFFLINE"], fetch["environment"]["HF_TOKEN"]) == ("0", "secret")
    assert set(fetch["networks"]) == {"edge"}
    home = fetch["environment"]["HF_HOME"]
    [writable] = [mount for mount in fetch["volumes"] if not mount.get("read_only")]
    assert (writable["source"], writable["target"]) == ("hub", home)
    for name in CONFIGS:
        service = services[name]
        assert service["depends_on"]["models"]["condition"] == "service_completed_successfully"
        assert service["environment"]["HF_HOME"] == home
        assert "HF_TOKEN" not in service["environment"]
        assert re.search(r"\bHF_HUB_OFFLINE=1\b", dockerfile(name))
        [mount] = [mount for mount in service["volumes"] if mount["target"] == home]
        assert mount["read_only"]
    assert container_config("gateway", {"services": services}).model == "org/big"
    assert container_config("verifier", {"services": services}).model == "org/big"
    drafter = container_config("drafter", {"services": services})
    assert (drafter.draft_model, drafter.target_model) == (("org/small",), "org/big")


def test_without_a_draft_model_drafters_look_up() -> None:
    services = resolved_by_docker({"MODEL": "org/big", "DRAFT_MODEL": ""})["services"]
    config = container_config("drafter", {"services": services})
    assert set(plan_methods(config.draft_model, config.methods, config.target_model)) == {"ngram", "suffix"}


def test_prometheus_asks_the_ports_that_serve_metrics(scrape_ports: dict[str, int], compose: dict[str, Any]) -> None:
    assert scrape_ports == {
        "gateway": container_config("gateway", compose).port,
        "drafter": container_config("drafter", compose).metrics_port,
        "verifier": container_config("verifier", compose).metrics_port,
    }


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_dockerfile(name: str, compose: dict[str, Any]) -> None:
    text = dockerfile(name)
    config = container_config(name, compose)
    final_stage = text[text.rindex("\nFROM ") :]
    assert text.count("\nFROM ") >= 2
    assert "/opt/tools" not in final_stage
    assert "\nUSER 10001:10001\n" in final_stage
    assert "\nSTOPSIGNAL SIGTERM\n" in final_stage
    assert f'ENTRYPOINT ["/opt/venv/bin/python", "-m", "{MODULES[name]}"]' in final_stage
    grpc_port = config.client_grpc_port if name == "gateway" else config.port
    assert f'"-IS", "/opt/app/outrider/shared/healthcheck.py", "127.0.0.1:{grpc_port}"' in final_stage
    assert "http://" not in final_stage  # the check asks over TLS where the service speaks TLS
    assert config.host == "0.0.0.0"


@pytest.mark.parametrize("name", [*sorted(CONFIGS), "outrider"])
def test_copied_folders_exist_and_reach_the_build(name: str) -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile(name), re.MULTILINE)
        for source in line.split()[:-1]
    ]
    modules = MODULES.values() if name == "outrider" else (MODULES[name],)
    assert {module.removeprefix("outrider.") for module in modules} <= set(sources)
    sources += re.findall(r"--mount=type=bind,source=([^,]+)", dockerfile(name))
    for source in sources:
        path = ROOT / source
        assert path.exists()
        assert f"!{source}/" in ignore if path.is_dir() else f"!{source}" in ignore


def test_the_image_with_all_services_serves_what_it_is_given() -> None:
    final_stage = dockerfile("outrider").rpartition("\nFROM ")[2]
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", final_stage, re.MULTILINE)
    python, dash_m, module, *arguments = json.loads(entry)
    assert (python, dash_m, module) == ("/opt/venv/bin/python", "-m", outrider_command.__name__)
    given = typer.main.get_command(app).commands["serve"].make_context("serve", [*arguments[1:], "org/big"]).params  # type: ignore[attr-defined]
    assert (arguments[0], given["model"], given["host"]) == ("serve", "org/big", "0.0.0.0")
    assert str(given["run_dir"]).startswith("/tmp/")  # the only folder, but for the volume's, that its user may write
    assert "\nUSER 10001:10001\n" in final_stage
    assert "HF_HUB_OFFLINE" not in final_stage
    assert "redis-server" in final_stage


def test_no_torch_in_the_gateway_image() -> None:
    assert "torch==" not in dockerfile("gateway")
    assert "engine" not in dockerfile("gateway")


@pytest.mark.parametrize("name", ["drafter", "verifier"])
def test_torch_is_pinned_and_comes_first(name: str) -> None:
    text = dockerfile(name)
    assert re.search(r"^ARG TORCH=torch==\d+\.\d+\.\d+$", text, re.MULTILINE)
    assert text.index('"$TORCH"') < text.index("'.[engine,tracing]'")


@pytest.mark.parametrize("name", ["drafter", "verifier"])
def test_compiled_kernels_outlive_the_container(name: str, compose: dict[str, Any]) -> None:
    folder = re.search(r"NUMBA_CACHE_DIR=(\S+)", dockerfile(name))
    assert folder is not None
    assert f"{name}-cache:{folder[1]}" in compose["services"][name]["volumes"]
    assert f"{name}-cache" in compose["volumes"]
    assert re.search(rf"^COPY .*--chown=10001:10001 \S+ {folder[1]}$", dockerfile(name), re.MULTILINE)
