"""Who may import whom (docs/architecture.md), and that no modules and no rooms import each other: held by reading every
import of every file, wherever it stands in the file, and by a fresh process. Each check is shown wrong examples too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import LINKED, PACKAGES, SourceTree, circles

ROOT = Path(__file__).resolve().parents[1]
TREE = SourceTree(ROOT)
OURS = {*PACKAGES, "generated"}
# Package -> the packages of ours that it may import besides itself. No service imports a service.
ALLOWED: dict[str, set[str]] = {
    "shared": {"generated"},
    "kernels": set(),
    "engine": {"kernels", "shared"},
    "drafting": {"engine", "shared"},
    "drafter_service": {"drafting", "engine", "shared", "generated"},
    "verifier_service": {"drafting", "engine", "shared", "generated"},
    "gateway": {"shared", "generated"},
    "client": {"shared", "generated"},
    "offline": {"gateway", "drafting", "engine", "verifier_service", "shared"},
    "training": {"client", "drafting", "engine", "shared"},
    "plugins": {"shared"},
}
# Generated code stays in these modules or folders. gateway and client may use it anywhere.
MAY_USE_GENERATED = {
    "shared": ("wire",),
    "drafter_service": ("server", "batch", "start"),
    "verifier_service": ("server", "start"),
}
# Rooms (folders) that still import each other, and what to move to end it. Entries only go.
MUTUAL_ROOMS: dict[tuple[str, str], str] = {}
NO_TORCH = {"shared", "gateway", "client", "plugins"}
HEAVY = {"torch", "transformers", "numba", "triton"}


def package_of(name: str) -> str:
    """The folder of the repository that an imported name is in; "generated" for outrider.v1."""
    parts = name.split(".")
    if parts[0] != "outrider" or len(parts) == 1:
        return parts[0]
    return "generated" if parts[1] == "v1" else parts[1]


def violations(package: str, tree: SourceTree) -> list[str]:
    """What the files of `package` import and must not."""
    doors = MAY_USE_GENERATED.get(package)
    broken = []
    for path in tree.files(package):
        door = path.relative_to(tree.root / package).parts[0].removesuffix(".py")  # a file, or the folder it is in
        for name in sorted(tree.imports(path)):
            top = package_of(name)
            if top == package or (top not in OURS and top not in HEAVY):
                continue
            if top in HEAVY:
                wrong = package in NO_TORCH
            else:
                wrong = top not in ALLOWED[package] or (top == "generated" and doors is not None and door not in doors)
            if wrong:
                broken.append(f"{path.relative_to(tree.root)} imports {name}")
    return broken


def described_circles(tree: SourceTree, files: list[Path]) -> list[str]:
    """Per circle, a line for each of its imports."""
    graph = tree.import_graph(files)
    return [
        "\n".join(
            f"{path.relative_to(tree.root)} imports {target.relative_to(tree.root)}"
            for path in sorted(circle)
            for target in sorted(graph[path] & circle)
        )
        for circle in circles(graph)
    ]


def mutual_rooms(tree: SourceTree, files: list[Path]) -> set[tuple[str, str]]:
    """Pairs of folders of which each imports a file of the other.

    A folder and one within it are no pair: the outer one has the front, which uses all, and the base, which all use.
    """
    arrows = {
        (path.parent.relative_to(tree.root), target.parent.relative_to(tree.root))
        for path, targets in tree.import_graph(files).items()
        for target in targets
    }
    return {
        (str(one), str(other))
        for one, other in arrows
        if one < other and (other, one) in arrows and not other.is_relative_to(one)
    }


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_no_arrow_points_up(package: str) -> None:
    assert TREE.files(package), f"{package} has no files: has it been renamed?"
    assert violations(package, TREE) == []


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_every_arrow_that_is_allowed_is_needed(package: str) -> None:
    imported = {package_of(name) for path in TREE.files(package) for name in TREE.imports(path)}
    assert ALLOWED[package] - imported == set(), f"{package} imports nothing of these: take them out of ALLOWED"


def test_every_package_of_the_tree_is_known_here() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"outrider"}
    assert found <= set(PACKAGES)
    assert set(ALLOWED) == set(LINKED)


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = described_circles(TREE, [*TREE.files(), ROOT / "outrider" / "__init__.py"])
    assert not found, "\n\n".join(f"circle {number}:\n{text}" for number, text in enumerate(found, 1))


def test_no_rooms_import_each_other() -> None:
    found = mutual_rooms(TREE, TREE.files(*LINKED))
    assert found - MUTUAL_ROOMS.keys() == set(), "move what both need below both, or what uses both above them"
    assert MUTUAL_ROOMS.keys() - found == set(), "these no longer do: take them out of MUTUAL_ROOMS"


def test_gateway_and_client_load_no_torch() -> None:
    unwanted = HEAVY | {"outrider.engine", "outrider.kernels", "outrider.drafting"}
    code = (
        "import sys, outrider.gateway.__main__, outrider.client.cli.main\n"
        f"loaded = sorted(set(sys.modules) & {unwanted!r})\n"
        "assert not loaded, loaded"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stderr


# ---- the checks themselves ----


@pytest.mark.parametrize(
    ("package", "stem", "source", "is_broken"),
    [
        ("gateway", "app", "from outrider.engine.sampling.laws import draw", True),
        ("gateway", "app", "from outrider import engine", True),
        ("gateway", "app", "def f():\n    import torch", True),
        ("gateway", "app", "import importlib\nimportlib.import_module('transformers.utils')", True),
        ("gateway", "app", "from outrider.verifier_service import engine", True),
        ("client", "cli", "import outrider.gateway.servers.service", True),
        ("drafter_service", "engine", "from outrider.verifier_service import engine", True),
        ("drafter_service", "engine", "from outrider.v1 import drafter_pb2", True),
        ("drafter_service", "server", "from outrider.v1 import drafter_pb2", False),
        ("drafter_service", "engine", "from outrider.drafting.session import DrafterSession", False),
        ("verifier_service", "engine", "from outrider.drafter_service import engine", True),
        ("verifier_service", "engine", "if TYPE_CHECKING:\n    from outrider.gateway.config import Config", True),
        ("drafting", "session", "from outrider.drafter_service.engine import DrafterEngine", True),
        ("drafting", "session", "from outrider.v1 import common_pb2", True),
        ("engine", "model", "from outrider.drafting.session import DrafterSession", True),
        ("engine", "model", "from outrider.verifier_service.session import VerifierSession", True),
        ("engine", "model", "from outrider.v1 import common_pb2", True),
        ("engine", "model", "import torch\nfrom outrider.shared.errors import OutriderError", False),
        ("engine", "model", "from ..gateway import config", True),
        ("engine", "model", "from tests.redis_server import RedisServer", True),
        ("kernels", "panel", "from outrider.shared.errors import OutriderError", True),
        ("shared", "commit_log", "from outrider.v1 import common_pb2", True),
        ("shared", "wire", "from outrider.v1 import common_pb2", False),
        ("shared", "wire", "from outrider.training.errors import CorpusError", True),
        ("training", "demo", "from outrider.gateway.config import Config", True),
    ],
)
def test_the_check_itself_sees_wrong_arrows(
    tmp_path: Path, package: str, stem: str, source: str, is_broken: bool
) -> None:
    tree = SourceTree.of(tmp_path, {f"{package}/{stem}.py": source})
    assert bool(violations(package, tree)) == is_broken


@pytest.mark.parametrize(
    ("of_a", "of_b", "is_circle"),
    [
        ("from outrider.engine.b import B", "from outrider.engine.a import A", True),
        ("import outrider.engine.b", "from outrider.engine import a", True),
        ("from . import b", "from .a import A", True),
        ("from outrider.engine.b import B", "if TYPE_CHECKING:\n    from outrider.engine.a import A", True),
        ("from outrider.engine.b import B", "def f():\n    from outrider.engine.a import A", True),
        ("from outrider.engine.b import B", "import_module('outrider.engine.a')", True),
        ("from outrider.engine.by_way_of import C", "from outrider.engine.a import A", True),
        ("from outrider.engine.b import B", "import a\nfrom outrider.engine import c", False),
        ("from outrider.engine.b import B", "from outrider.engine.leaf import D", False),
    ],
)
def test_the_check_itself_sees_circles(tmp_path: Path, of_a: str, of_b: str, is_circle: bool) -> None:
    sources = {"a": of_a, "b": of_b, "by_way_of": "from outrider.engine.b import B", "leaf": "", "__init__": ""}
    tree = SourceTree.of(tmp_path, {f"engine/{name}.py": source for name, source in sources.items()})
    found = described_circles(tree, tree.files("engine"))
    assert bool(found) == is_circle
    assert not is_circle or "engine/b.py imports engine/a.py" in found[0]
    assert "leaf" not in "".join(found)


def test_the_check_itself_sees_circles_of_tests(tmp_path: Path) -> None:
    tree = SourceTree.of(tmp_path, {"tests/part/a.py": "import b", "tests/b.py": "from tests.part.a import A"})
    found = described_circles(tree, tree.files())
    assert found == ["tests/b.py imports tests/part/a.py\ntests/part/a.py imports tests/b.py"]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"log/a": "import outrider.shared.wire.b", "wire/c": "import outrider.shared.log.d"}, True),
        ({"log/a": "from outrider.shared.wire import b", "wire/c": "from ..log import d"}, True),
        ({"log/a": "import outrider.shared.wire.b", "wire/c": "import outrider.shared.e"}, False),
        ({"log/x/a": "import outrider.shared.log.d", "log/d": "from .x import a"}, False),
    ],
)
def test_the_check_itself_sees_rooms(tmp_path: Path, sources: dict[str, str], expected: bool) -> None:
    """Without a circle of modules: it is the folders that import each other."""
    sources = {"log/d": "", "wire/b": "", "e": "", **sources}
    tree = SourceTree.of(tmp_path, {f"shared/{name}.py": source for name, source in sources.items()})
    assert mutual_rooms(tree, tree.files("shared")) == ({("shared/log", "shared/wire")} if expected else set())
