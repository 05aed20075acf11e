"""Who may import whom (docs/architecture.md): held by reading every import of every file, and by a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "shared",
    "kernels",
    "engine",
    "drafter_service",
    "verifier_service",
    "gateway",
    "client",
    "offline",
    "training",
    "benchmarks",
    "tests",
)
OURS = {*PACKAGES, "outrider"}
# Package -> the packages of ours that it may import besides itself.
ALLOWED: dict[str, set[str]] = {
    "shared": {"outrider"},
    "kernels": set(),
    "engine": {"kernels", "shared"},
    "drafter_service": {"engine", "shared", "outrider"},
    "verifier_service": {"drafter_service", "engine", "shared", "outrider"},
    "gateway": {"shared", "outrider"},
    "client": {"shared", "outrider"},
    "offline": {"gateway", "engine", "drafter_service", "verifier_service", "shared"},
}
# Generated code stays at the doors. gateway and client may use it anywhere.
MAY_USE_GENERATED = {
    "shared": ("wire", "rpc"),
    "drafter_service": ("server", "remote", "__main__"),
    "verifier_service": ("server", "remote", "__main__"),
}
NO_TORCH = {"shared", "gateway", "client"}
HEAVY = {"torch", "transformers", "numba", "triton"}


def imported_modules(path: Path) -> set[str]:
    """Every module a file imports, wherever in the file: `import a.b`, `from a.b import c`, relative ones resolved."""
    package = path.relative_to(ROOT).parent.parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            found.add(".".join(part for part in (base, node.module or "") if part))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.add(node.args[0].value)
    return found


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def violations(package: str, path: Path, modules: set[str]) -> list[str]:
    """What of `modules` a file of `package` must not import."""
    broken = []
    for module in sorted(modules):
        top = module.split(".")[0]
        if top == package or (top not in OURS and top not in HEAVY):
            continue
        door = path.relative_to(ROOT / package).parts[0].removesuffix(".py")  # a file, or the folder it is in
        doors = MAY_USE_GENERATED.get(package)
        if top in HEAVY:
            wrong = package in NO_TORCH
        elif top == "outrider":
            wrong = top not in ALLOWED[package] or (doors is not None and not door.startswith(doors))
        else:
            wrong = top not in ALLOWED[package]
        if wrong:
            broken.append(f"{path.relative_to(ROOT)} imports {module}")
    return broken


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_no_arrow_points_up(package: str) -> None:
    files = files_of(package)
    assert files, f"{package} has no files: has it been renamed?"
    assert [line for path in files for line in violations(package, path, imported_modules(path))] == []


def test_every_package_of_the_tree_is_known_here() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"outrider", "docs"}  # its page generators
    assert found <= set(PACKAGES)


@pytest.mark.parametrize(
    ("package", "stem", "source", "is_broken"),
    [
        ("gateway", "app", "from engine.sampling import draw", True),
        ("gateway", "app", "def f():\n    import torch", True),
        ("gateway", "app", "import importlib\nimportlib.import_module('transformers.utils')", True),
        ("client", "cli", "import gateway.service", True),
        ("drafter_service", "engine", "from verifier_service import engine", True),
        ("drafter_service", "engine", "from outrider.v1 import drafter_pb2", True),
        ("drafter_service", "server", "from outrider.v1 import drafter_pb2", False),
        ("engine", "model", "from verifier_service.session import VerifierSession", True),
        ("engine", "model", "from outrider.v1 import common_pb2", True),
        ("engine", "model", "import torch\nfrom shared.errors import OutriderError", False),
        ("kernels", "panel", "from shared.errors import OutriderError", True),
        ("shared", "commit_log", "from outrider.v1 import common_pb2", True),
        ("shared", "wire", "from outrider.v1 import common_pb2", False),
        ("shared", "wire", "from training.errors import CorpusError", True),
        ("engine", "model", "from tests.redis_server import RedisServer", True),
    ],
)
def test_the_check_itself_sees_wrong_arrows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, stem: str, source: str, is_broken: bool
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / package / f"{stem}.py"
    path.parent.mkdir()
    path.write_text(source)
    assert bool(violations(package, path, imported_modules(path))) == is_broken


def test_gateway_and_client_load_no_torch() -> None:
    code = (
        "import sys, gateway.__main__, client.cli\n"
        f"loaded = sorted(set(sys.modules) & {HEAVY | {'engine', 'kernels'}!r})\n"
        "assert not loaded, loaded"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stderr
