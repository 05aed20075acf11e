"""The training text: Python source found on this machine, split into training and held-out documents.

Uses the running interpreter's standard library and some installed packages, without tests, generated files and
duplicates, plus a few per cent of chat documents built from documented functions. Nothing is downloaded, so another
Python or other package versions give another corpus.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.training.data.chat_documents import chat_documents
from outrider.training.errors import CorpusError

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "idlelib", "turtledemo", "pydoc_data", "lib2to3", "site-packages", "_vendor"}
    | {"__pycache__", "encodings", "unicode", "vendor", "data"}
)
# Permissive licences only (PSF, MIT, BSD, Apache-2.0, ISC); the model card names them.
_PACKAGE_LIST = """
_pytest anyio click fastapi filelock fsspec httpcore httpx huggingface_hub jinja2 markdown_it mypy networkx
nodeenv openai/_utils packaging pip/_internal platformdirs prometheus_client pydantic redis rich setuptools
starlette typer torch/distributions torch/nn/modules torch/optim transformers/generation uvicorn virtualenv
yaml
"""
PACKAGES = tuple(_PACKAGE_LIST.split())
MAX_BYTES_PER_PACKAGE = 500_000
MIN_FILE_BYTES = 400
MAX_FILE_BYTES = 200_000
MAX_LINE_CHARS = 240


@dataclass(frozen=True)
class CorpusConfig:
    """The sources and shares of the corpus.

    heldout_per_mille: the share of files (by hash of their text) excluded from training.
    """

    roots: tuple[tuple[str, Path, int], ...]
    heldout_per_mille: int = 20
    chat_share: float = 0.065


def default_roots() -> tuple[tuple[str, Path, int], ...]:
    """Returns (name, folder, maximum bytes to take) of the standard library and the chosen packages."""
    site = Path(sysconfig.get_path("purelib"))
    roots = [("python", Path(sysconfig.get_path("stdlib")), sys.maxsize)]
    roots += [(name, site / name, MAX_BYTES_PER_PACKAGE) for name in PACKAGES if (site / name).is_dir()]
    return tuple(roots)


def _is_clean(text: str) -> bool:
    """Returns whether a file looks like hand-written code: short ASCII lines, not generated, no table of numbers."""
    if not text.isascii() or "\0" in text or "\x0c" in text:
        return False
    head = text[:600].lower()
    if "generated" in head and ("do not edit" in head or "automatically" in head or "auto-generated" in head):
        return False
    lines = text.splitlines()
    if max((len(line) for line in lines), default=0) > MAX_LINE_CHARS:
        return False
    num_letters = sum(map(str.isalpha, text))
    num_digits = sum(map(str.isdigit, text))
    return num_letters > 8 * num_digits


def source_files(config: CorpusConfig) -> Iterator[tuple[str, str]]:
    """Yields (root-relative name, text) in a fixed order, each text once."""
    seen: set[bytes] = set()
    for root_name, folder, max_bytes in config.roots:
        num_bytes = 0
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if SKIPPED_FOLDERS & set(relative.parts) or path.name.endswith("_pb2.py"):
                continue
            raw = path.read_bytes()
            if not MIN_FILE_BYTES <= len(raw) <= MAX_FILE_BYTES or num_bytes + len(raw) > max_bytes:
                continue
            digest = hashlib.sha256(raw).digest()
            if digest in seen:
                continue
            seen.add(digest)
            try:
                text = raw.decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:
                continue
            if _is_clean(text):
                num_bytes += len(raw)
                yield f"{root_name}/{relative.as_posix()}", text


def is_heldout(text: str, heldout_per_mille: int) -> bool:
    """Returns whether a text is held out: a function of the text alone, so a file never changes sides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 1000 < heldout_per_mille


def build_documents(config: CorpusConfig) -> dict[str, list[str]]:
    """Returns the documents of each split, "train" and "heldout": files first, shuffled with chat documents by hash."""
    files: dict[str, list[str]] = {"train": [], "heldout": []}
    for _, text in source_files(config):
        files["heldout" if is_heldout(text, config.heldout_per_mille) else "train"].append(text)
    if not files["train"] or not files["heldout"]:
        raise CorpusError(f"too few source files under {[str(folder) for _, folder, _ in config.roots]}")
    documents: dict[str, list[str]] = {}
    for split, texts in files.items():
        chat = chat_documents(texts, max_chars=int(config.chat_share * sum(map(len, texts))))
        documents[split] = sorted(texts + chat, key=lambda text: hashlib.sha256(text.encode()).digest())
    return documents


def read_documents(work_dir: Path, split: str) -> list[str]:
    """Returns the documents of one split, in corpus order. Raises CorpusError when they do not exist."""
    path = work_dir / f"{split}.jsonl"
    if not path.exists():
        raise CorpusError(f"{path} is missing: write the corpus first")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
