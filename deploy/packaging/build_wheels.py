"""Builds the wheels: `outrider` (everything), `outrider-client` (no torch), `outrider-audit`, -vllm and -dynamo.

    python deploy/packaging/build_wheels.py dist        # after `make protos`: the generated code goes into the wheels

All come from the one pyproject.toml: one version, and the client's dependencies are a part of the server's. The audit's
is the folder `client/audit` alone, as the package `outrider_audit`. `outrider-vllm` is what vLLM, SGLang, TensorRT-LLM
and transformers load; it has no generated code, so its dependencies are as old as theirs. `outrider-dynamo` is a worker
of NVIDIA Dynamo. Each is built from a copy with what users need: the generated code refuses runtimes older than its
generator, so the wheels that have it ask for the versions that it names. Not here: installing them (try_wheel.sh,
test_client_wheel.py).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What of `outrider` is in the client's wheel, and what only services need of the base dependencies.
CLIENT_PARTS = ("__init__.py", "py.typed", "client", "shared", "v1")
NOT_FOR_CLIENTS = {"uvloop"}
CLIENT_DESCRIPTION = "Python client and command line of Outrider: lossless speculative decoding for LLM serving"
AUDIT_DESCRIPTION = "Tests over HTTP whether a server's speculative decoding changes its output"
AUDIT_NEEDS = {"httpx", "numpy"}
VLLM_DESCRIPTION = "Outrider's drafters for vLLM, SGLang, TensorRT-LLM and transformers, asked over gRPC"
VLLM_PARTS = (
    *("__init__.py", "py.typed", "v1/descriptors.binpb"),
    *("vllm.py", "sglang.py", "tensorrt_llm.py", "transformers.py"),
    *(f"plugins/{path.name}" for path in sorted((ROOT / "plugins").glob("*.py"))),
    *("shared/__init__.py", "shared/checkpoint/__init__.py", "shared/checkpoint/tokenizer_digest.py"),
)
# The oldest that it was run with; vLLM pins its own.
VLLM_NEEDS = ["grpcio>=1.66,<2", "numpy>=1.26,<3", "protobuf>=5.29.6,<8"]
DYNAMO_DESCRIPTION = "Outrider as a worker of NVIDIA Dynamo: its requests go to a gateway, and go on there when it dies"
DYNAMO_PARTS = (
    "__init__.py",
    "py.typed",
    "plugins/__init__.py",
    "plugins/dynamo",
    "shared/__init__.py",
    "shared/errors.py",
)
DYNAMO_NEEDS = {"httpx"}
_IGNORED = shutil.ignore_patterns("__pycache__", "*.py[co]", "*.nb[ci]", "node_modules", "web")
_GRPC = re.compile(r"^GRPC_GENERATED_VERSION = '([\d.]+)'$", re.MULTILINE)
_PROTOBUF = re.compile(r"^# Protobuf Python Version: ([\d.]+)$", re.MULTILINE)


def distribution(dependency: str) -> str:
    """The name in a requirement such as `grpcio>=1.80,<2; python_version > '3'`."""
    return re.split(r"[^A-Za-z0-9_.-]", dependency, maxsplit=1)[0].lower()


def generated_with() -> dict[str, str]:
    """Distribution -> the oldest version that the generated code runs with. Raises SystemExit without that code."""
    folder = ROOT / "outrider/v1"
    if not (folder / "gateway_pb2_grpc.py").is_file():
        raise SystemExit("the gRPC code is not there: run `make protos` first")
    grpc = _GRPC.search((folder / "gateway_pb2_grpc.py").read_text())
    protobuf = _PROTOBUF.search((folder / "gateway_pb2.py").read_text())
    if grpc is None or protobuf is None:
        raise SystemExit("the generated code does not say which versions made it")
    return {"grpcio": grpc[1], "protobuf": protobuf[1]}


def with_floor(dependency: str, floors: Mapping[str, str]) -> str:
    """The requirement with its lower bound raised to the floor of its name, if it has one."""
    floor = floors.get(distribution(dependency))
    return dependency if floor is None else re.sub(r">=[\d.]+", f">={floor}", dependency, count=1)


def server_project(project: Mapping[str, Any]) -> dict[str, Any]:
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    return {**project, "optional-dependencies": extras}


def client_project(project: Mapping[str, Any]) -> dict[str, Any]:
    needs = [entry for entry in project["dependencies"] if distribution(entry) not in NOT_FOR_CLIENTS]
    kept = {name: value for name, value in project.items() if name != "optional-dependencies"}
    return {**kept, "name": "outrider-client", "description": CLIENT_DESCRIPTION, "dependencies": needs}


def audit_project(project: Mapping[str, Any]) -> dict[str, Any]:
    entries = [*project["dependencies"], *project["optional-dependencies"]["audit"]]
    needs = [entry for entry in entries if distribution(entry) in AUDIT_NEEDS]
    kept = {name: value for name, value in project.items() if name != "optional-dependencies"}
    scripts = {"outrider-audit": "outrider_audit.__main__:command"}
    named = {"name": "outrider-audit", "description": AUDIT_DESCRIPTION, "dependencies": needs, "scripts": scripts}
    return {**kept, **named}


def plugin_project(project: Mapping[str, Any], name: str, description: str, needs: list[str]) -> dict[str, Any]:
    kept = {name: value for name, value in project.items() if name not in ("optional-dependencies", "scripts")}
    return {**kept, "name": name, "description": description, "dependencies": needs}


def toml_tables(project: Mapping[str, Any]) -> str:
    """A pyproject.toml of text, lists and tables of them: in TOML they are written as in JSON."""
    tables = {name: value for name, value in project.items() if isinstance(value, dict)}
    lines = ["[project]", *(f"{name} = {json.dumps(project[name])}" for name in project.keys() - tables.keys())]
    for name, table in tables.items():
        lines += [f"[project.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    lines += ["[build-system]", 'requires = ["setuptools>=77"]', 'build-backend = "setuptools.build_meta"']
    lines += ["[tool.setuptools]", 'packages.find.include = ["outrider*"]']
    lines += ["[tool.setuptools.package-data]", '"*" = ["**/*"]']
    return "\n".join(lines) + "\n"


def build(project: dict[str, Any], parts: Iterable[str], floors: Mapping[str, str], target: Path) -> None:
    """parts: files and folders of `outrider/`; the links among them are followed."""
    project["dependencies"] = [with_floor(entry, floors) for entry in project["dependencies"]]
    sources = {ROOT / "outrider" / name: f"outrider/{name}" for name in parts}
    build_from(project, sources, target)


def build_from(project: Mapping[str, Any], sources: Mapping[Path, str], target: Path) -> None:
    """sources: file or folder -> its place in the wheel."""
    with tempfile.TemporaryDirectory(prefix="outrider-wheel-") as folder:
        stage = Path(folder)
        for source, place in sources.items():
            copy = stage / place
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=_IGNORED)
            else:
                shutil.copy(source, copy)
        for name in {"README.md", "LICENSE"} - set(sources.values()):
            shutil.copy(ROOT / name, stage)
        (stage / "pyproject.toml").write_text(toml_tables(project))
        # Without isolation nothing is downloaded.
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", str(target), str(stage)], check=True)


def main(target: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = generated_with()
    # Of a group's name a table: only the wheels that have the plugins name them.
    plugins = {f'entry-points."{group}"': named for group, named in project.pop("entry-points").items()}
    everything = [entry.name for entry in (ROOT / "outrider").iterdir() if entry.name != "__pycache__"]
    build(server_project(project) | plugins, everything, floors, target)
    build(client_project(project), CLIENT_PARTS, floors, target)
    vllm = plugin_project(project, "outrider-vllm", VLLM_DESCRIPTION, VLLM_NEEDS)
    build(vllm | plugins, VLLM_PARTS, {}, target)
    dynamo_needs = [entry for entry in project["dependencies"] if distribution(entry) in DYNAMO_NEEDS]
    build(plugin_project(project, "outrider-dynamo", DYNAMO_DESCRIPTION, dynamo_needs), DYNAMO_PARTS, {}, target)
    audit = {ROOT / "client/audit": "outrider_audit", ROOT / "docs/auditing.md": "README.md"}
    build_from(audit_project(project), audit, target)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve())
