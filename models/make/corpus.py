"""Writes the corpus that the demo family is trained on, with a manifest of the versions that it came from.

Run: `python -m models.make.corpus --help`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.training.data.corpus import CorpusConfig, build_documents, default_roots


def _versions(config: CorpusConfig) -> dict[str, str]:
    distributions = importlib.metadata.packages_distributions()
    versions = {"python": sys.version.split()[0]}
    for name, _, _ in config.roots[1:]:
        for distribution in distributions.get(name.split("/")[0], [])[:1]:
            versions[name] = importlib.metadata.version(distribution)
    return versions


def write_corpus(config: CorpusConfig, work_dir: Path) -> dict[str, object]:
    """Writes `{train,heldout}.jsonl` (one JSON string per line) and `manifest.json`; returns the manifest."""
    work_dir.mkdir(parents=True, exist_ok=True)
    documents = build_documents(config)
    manifest: dict[str, object] = {"versions": _versions(config)}
    for split, texts in documents.items():
        lines = [json.dumps(text) + "\n" for text in texts]
        (work_dir / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        chat_chars = sum(len(text) for text in texts if text.startswith("<|user|>"))
        manifest[split] = {
            "documents": len(texts),
            "chars": sum(map(len, texts)),
            "chat_chars": chat_chars,
            "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
        }
    (work_dir / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def main(
    work_dir: Annotated[Path, typer.Option(help="folder for the corpus")] = Path(".run/training"),
) -> None:
    """Collect the training text.

    Example: python -m models.make.corpus --work-dir .run/training
    """
    manifest = write_corpus(CorpusConfig(roots=default_roots()), work_dir)
    Console().print_json(data=manifest)


if __name__ == "__main__":
    typer.run(main)
