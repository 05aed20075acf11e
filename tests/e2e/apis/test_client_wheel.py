"""All wheels are built; the client's is installed into an empty environment and asks a running stack.

The server's wheel takes minutes to install: deploy/packaging/try_wheel.sh does that.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from e2e_stack import RunningStack

from outrider.shared.version import outrider_version
from outrider.v1 import gateway_pb2_grpc

pytestmark = pytest.mark.storm

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "transformers", "numba", "fastapi", "uvicorn", "numpy"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution -> its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run(
        [sys.executable, str(ROOT / "deploy/packaging/build_wheels.py"), str(folder)], check=True, timeout=200
    )
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def environment(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the client's wheel and what it needs, nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=200)
    python = str(folder / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    pip += ["--disable-pip-version-check", "-c", str(ROOT / "deploy/constraints.txt")]
    subprocess.run([*pip, str(wheels["outrider-client"])], check=True, timeout=280)
    return folder / "bin"


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_one_version_and_no_heavy_needs(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == {"outrider", "outrider-client", "outrider-audit", "outrider-vllm", "outrider-dynamo"}
    found = {name: metadata_of(wheel) for name, wheel in wheels.items()}
    assert {entry["Version"] for entry in found.values()} == {outrider_version()}
    needs = found["outrider-client"].get_all("Requires-Dist") or []
    assert not HEAVY & {re.split(r"[^\w-]", need)[0] for need in needs}
    assert {"server", "gpu", "train"} <= set(found["outrider"].get_all("Provides-Extra") or [])
    audit = found.pop("outrider-audit").get_all("Requires-Dist") or []
    assert {re.split(r"[^\w-]", need)[0] for need in audit} == {"httpx", "numpy"}
    vllm = found.pop("outrider-vllm").get_all("Requires-Dist") or []
    assert {re.split(r"[^\w-]", need)[0] for need in vllm} == {"grpcio", "numpy", "protobuf"}
    dynamo = found.pop("outrider-dynamo").get_all("Requires-Dist") or []
    assert {re.split(r"[^\w-]", need)[0] for need in dynamo} == {"httpx"}
    # Generated code refuses an older runtime, so the wheels that have it must not accept one.
    for entry in found.values():
        [need] = [need for need in entry.get_all("Requires-Dist") or [] if re.match(r"grpcio[<>]", need)]
        assert f">={gateway_pb2_grpc.GRPC_GENERATED_VERSION}" in need


def test_contents(wheels: dict[str, Path]) -> None:
    parts = {}
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            points = "".join(archive.read(entry).decode() for entry in names if entry.endswith("entry_points.txt"))
        assert ("outrider = outrider.sglang:register" in points) == (name in {"outrider", "outrider-vllm"})
        if name == "outrider-audit":
            assert {entry.split("/")[0] for entry in names if ".dist-info" not in entry} == {"outrider_audit"}
            continue
        if name == "outrider-vllm":
            engines = ("vllm", "sglang", "tensorrt_llm", "transformers")
            modules = {f"outrider/{folder}{engine}.py" for engine in engines for folder in ("", "plugins/")}
            assert modules | {"outrider/v1/descriptors.binpb"} <= set(names)
            assert not [entry for entry in names if "_pb2" in entry or "client" in entry or "dynamo" in entry]
            continue
        if name == "outrider-dynamo":
            assert "outrider/plugins/dynamo/__main__.py" in names
            assert not [entry for entry in names if "_pb2" in entry or "vllm" in entry or "client" in entry]
            continue
        assert {"outrider/v1/gateway_pb2.py", "outrider/py.typed"} <= set(names)
        assert not [entry for entry in names if entry.endswith(".pyc") or "node_modules" in entry]
        assert {entry.split("/")[0] for entry in names if ".dist-info" not in entry} == {"outrider"}
        parts[name] = {entry.split("/")[1] for entry in names if ".dist-info" not in entry}
    assert parts["outrider-client"] == {"__init__.py", "py.typed", "client", "shared", "v1"}
    assert parts["outrider"] > parts["outrider-client"] | {"gateway", "verifier_service", "drafter_service", "engine"}
    assert not {"tests", "benchmarks", "models", "packaging"} & parts["outrider"]


def test_the_client_asks_a_stack(environment: Path, stack: RunningStack, tmp_path: Path) -> None:
    address = stack.state.grpc_address
    code = (
        "import sys; from outrider import OutriderClient, SamplingParams\n"
        f"with OutriderClient({address!r}) as client:\n"
        "    print(len(client.generate('import os', SamplingParams(max_tokens=4, ignore_eos=True)).tokens))\n"
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    library = run([str(environment / "python"), "-c", code], tmp_path)
    assert library.stdout.split("\n")[:2] == ["4", "[]"], library.stderr
    outrider = str(environment / "outrider")
    assert run([outrider, "version"], tmp_path).stdout == f"{outrider_version()}\n"
    command = run([outrider, "complete", "import os", "--max-tokens", "4", "--address", address], tmp_path)
    assert command.returncode == 0, command.stderr
    assert "tokens/s" in command.stdout


def test_the_client_alone_says_how_to_serve(environment: Path, tmp_path: Path) -> None:
    model = str(ROOT / "models/demo-target")
    up = run([str(environment / "outrider"), "up", "--model", model, "--draft-model", ""], tmp_path)
    assert up.returncode == 2
    said = " ".join(up.stderr.split())
    assert "cannot serve" in said
    assert "pip install 'outrider[server]'" in said
