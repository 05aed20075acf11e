"""The repository's Python files and what they import, for the checks on both (test_import_arrows, test_folders)."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Imported as outrider.<name>.
LINKED = (
    "shared",
    "kernels",
    "engine",
    "drafting",
    "drafter_service",
    "verifier_service",
    "gateway",
    "client",
    "offline",
    "training",
    "plugins",
)
PACKAGES = (*LINKED, "benchmarks", "models", "tests", "docs")


@dataclass(frozen=True)
class SourceTree:
    """The folders of PACKAGES below `root`."""

    root: Path

    @classmethod
    def of(cls, root: Path, sources: Mapping[str, str]) -> SourceTree:
        """A tree of wrong examples."""
        for name, source in sources.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(source)
        return cls(root)

    def files(self, *packages: str) -> list[Path]:
        return [path for package in packages or PACKAGES for path in sorted((self.root / package).rglob("*.py"))]

    def module(self, path: Path) -> str:
        """The name that a file or a folder is imported by."""
        parts = path.relative_to(self.root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        return ".".join(("outrider", *parts) if parts[0] in LINKED else parts)

    def imports(self, path: Path) -> frozenset[str]:
        """Dotted names, relative ones resolved, wherever in the file: `from a import b` is a.b, `import a.b` is a.b."""
        return _imports(path, self.module(path.parent))

    def import_graph(self, files: list[Path]) -> dict[Path, set[Path]]:
        """File -> the files that it imports. A folder's `__init__` counts where it is named itself."""
        by_module = {self.module(path): path for path in files}
        graph: dict[Path, set[Path]] = {}
        for path in files:
            names = set(self.imports(path))
            for folder in path.parents:
                if folder.is_relative_to(self.root / "tests"):  # pytest puts folders of tests on the path
                    names |= {f"{self.module(folder)}.{name}" for name in self.imports(path)}
            found = (by_module.get(name) or by_module.get(name.rpartition(".")[0]) for name in names)
            graph[path] = {target for target in found if target is not None}
        return graph


@functools.cache
def _imports(path: Path, package: str) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            found.update(".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.add(node.args[0].value)
    return frozenset(found)


def circles(graph: Mapping[Path, set[Path]]) -> list[set[Path]]:
    """The strongly connected components of more than one file, and files that import themselves."""
    reached = {path: _reachable(graph, path) for path in graph}
    rings = {frozenset(other for other in reached[path] if path in reached[other]) for path in graph}
    return [set(ring) for ring in rings if ring]


def _reachable(graph: Mapping[Path, set[Path]], start: Path) -> set[Path]:
    """The files that `start` imports, by way of others too; itself only if it is in a circle."""
    seen: set[Path] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen
