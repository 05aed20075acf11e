"""How the folders are kept: none is crowded, outrider/ links to each, and each is imported by way of outrider alone."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.source_tree import LINKED, SourceTree

ROOT = Path(__file__).resolve().parents[1]
TREE = SourceTree(ROOT)
# modules; side by side in one folder, `__init__` not counted
MAX_MODULES = 20
# In a string: code that runs in another process.
BARE_IMPORT = re.compile(rf"(?:^|;)\s*(?:from|import) ({'|'.join(LINKED)})(?:\.\w+)*(?: import |$|[;,])", re.MULTILINE)


def crowded_folders(tree: SourceTree) -> list[str]:
    modules = (path.relative_to(tree.root) for path in tree.files() if path.stem != "__init__")
    sizes = Counter(path.parent for path in modules)
    return [f"{folder} has {size} modules" for folder, size in sorted(sizes.items()) if size > MAX_MODULES]


def wrong_links(root: Path) -> list[str]:
    """What of outrider/ does not lead to the folder of its name, and what should."""
    links = {path.name: path.readlink() for path in (root / "outrider").iterdir() if path.is_symlink()}
    wrong = [f"outrider/{name} is a link to {to}" for name, to in links.items() if to != Path("..") / name]
    wrong += [f"outrider/{name} is no package of ours" for name in links.keys() - set(LINKED)]
    wrong += [f"outrider/{name} is missing" for name in set(LINKED) - links.keys()]
    return sorted(wrong)


def bare_imports(tree: SourceTree) -> list[str]:
    """Imports by a folder's name alone, in code and in strings of code."""
    found = []
    for path in tree.files():
        names = {name.split(".")[0] for name in tree.imports(path)} & set(LINKED)
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(BARE_IMPORT.findall(node.value))
        found += [f"{path.relative_to(tree.root)} imports {name}, not outrider.{name}" for name in sorted(names)]
    return found


def test_no_folder_is_crowded() -> None:
    assert crowded_folders(TREE) == []


def test_the_links_of_outrider_lead_to_the_folders() -> None:
    assert wrong_links(ROOT) == []


def test_a_clone_without_links_runs_too(tmp_path: Path) -> None:
    """As git writes it where there are none: each link is a file with its target. No module is loaded twice."""
    (tmp_path / "outrider").mkdir()
    shutil.copy(ROOT / "outrider" / "__init__.py", tmp_path / "outrider")
    for name in LINKED:
        (tmp_path / "outrider" / name).write_text(f"../{name}")
    shutil.copytree(ROOT / "shared", tmp_path / "shared")
    code = "import sys, outrider.shared.errors as errors; print(errors.__file__, 'shared' in sys.modules)"
    command = [sys.executable, "-c", code]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert outcome.stdout.split() == [str(tmp_path / "shared" / "errors.py"), "False"], outcome.stderr


def test_nothing_is_imported_by_a_bare_folder_name() -> None:
    assert bare_imports(TREE) == []


# ---- the checks themselves ----


def test_the_check_itself_sees_crowded_folders(tmp_path: Path) -> None:
    full = {f"gateway/openai/m{place}.py": "" for place in range(MAX_MODULES)} | {"gateway/openai/__init__.py": ""}
    assert crowded_folders(SourceTree.of(tmp_path, full)) == []
    tree = SourceTree.of(tmp_path, {"gateway/openai/one_more.py": ""})
    assert crowded_folders(tree) == [f"gateway/openai has {MAX_MODULES + 1} modules"]


def test_the_check_itself_sees_wrong_links(tmp_path: Path) -> None:
    (tmp_path / "outrider").mkdir()
    for name in set(LINKED) - {"client"}:
        (tmp_path / "outrider" / name).symlink_to(Path("..") / ("engine" if name == "shared" else name))
    (tmp_path / "outrider" / "demo").symlink_to("../demo")
    assert wrong_links(tmp_path) == [
        "outrider/client is missing",
        "outrider/demo is no package of ours",
        "outrider/shared is a link to ../engine",
    ]


@pytest.mark.parametrize(
    "form", ["from {} import x", "from {}.b.c import x", "import {}", "import {}.b", "import sys; import {}"]
)
def test_the_check_itself_sees_bare_folder_names(tmp_path: Path, form: str) -> None:
    code = form.format("shared")
    lazy, in_a_string = f"def f():\n    {code}", f"CODE = {code!r}"
    right = f"{form.format('outrider.shared')}\nTEXT = 'from shared memory, import'"
    tree = SourceTree.of(tmp_path, {"client/a.py": lazy, "client/b.py": in_a_string, "client/c.py": right})
    assert bare_imports(tree) == [f"client/{stem}.py imports shared, not outrider.shared" for stem in "ab"]
