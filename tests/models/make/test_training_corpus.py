"""The corpus is a function of the files: same tree, same documents; files keep their side of the split."""

import ast
import shutil
from pathlib import Path

import numpy as np
import pytest

from models.make.corpus import write_corpus
from models.make.lm_data import BlockSampler
from outrider.training.data.chat_documents import chat_documents, request_for
from outrider.training.data.corpus import (
    CorpusConfig,
    build_documents,
    is_heldout,
    read_documents,
    source_files,
)
from outrider.training.errors import CorpusError

MODULE = '''"""Module {i}."""


def area_{i}(width, height):
    """Return the area of rectangle number {i}.

    Both sides are lengths in the same unit; the result is in its square.
    """
    if width < 0 or height < 0:
        raise ValueError("negative side")
    return width * height


class Shape{letters}:
    """A shape with a name, an owner, and nothing else that could be of interest to anybody who reads on."""

    name = "shape"
    owner = "nobody in particular, because shapes belong to everybody who can draw them on a sheet of paper"
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """80 different modules, one twice, one under tests/, one not ASCII."""
    root = tmp_path / "tree"
    for i in range(80):
        path = root / f"package{i % 3}" / f"module_{i:02d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MODULE.format(i=i, letters="abcdefghij"[i // 10] + "abcdefghij"[i % 10]))
    shutil.copy(root / "package0" / "module_00.py", root / "copy.py")
    (root / "tests").mkdir()
    (root / "tests" / "test_module.py").write_text(MODULE.format(i="T", letters="Tests"))
    (root / "accents.py").write_text(MODULE.format(i="É", letters="Accents"), encoding="utf-8")
    return root


def config_of(root: Path) -> CorpusConfig:
    return CorpusConfig(roots=(("tree", root, 10**9),), heldout_per_mille=200, chat_share=0.2)


def test_files_are_filtered_and_deduplicated(tree: Path) -> None:
    names = [name for name, _ in source_files(config_of(tree))]
    assert len(names) == 80
    assert names == sorted(names)
    assert not any("tests/" in name or "accents" in name for name in names)


def test_same_files_give_the_same_documents(tree: Path, tmp_path: Path) -> None:
    """Also when the files were created in another order."""
    other = tmp_path / "other"
    for path in sorted(tree.rglob("*.py"), reverse=True):
        copy = other / path.relative_to(tree)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    assert build_documents(config_of(tree)) == build_documents(config_of(other))


def test_split_is_disjoint_and_stable(tree: Path) -> None:
    before = build_documents(config_of(tree))
    assert before["heldout"]
    assert not set(before["train"]) & set(before["heldout"])
    (tree / "aaa_new.py").write_text(MODULE.format(i="New", letters="New"))
    after = build_documents(config_of(tree))
    files = [text for text in before["train"] if not text.startswith("<|user|>")]
    assert set(files) <= set(after["train"])
    assert all(is_heldout(text, 200) for text in before["heldout"] if not text.startswith("<|user|>"))


def test_chat_documents_come_from_their_own_split_and_parse(tree: Path) -> None:
    documents = build_documents(config_of(tree))
    for texts in documents.values():
        files = "".join(text for text in texts if not text.startswith("<|user|>"))
        chats = [text for text in texts if text.startswith("<|user|>")]
        assert chats
        for chat in chats:
            reply = chat.split("<|assistant|>\n")[1].removesuffix("<|end|>\n")
            assert reply in files
            assert isinstance(ast.parse(reply).body[0], ast.FunctionDef)
        assert sum(map(len, chats)) <= 0.2 * len(files)


@pytest.mark.parametrize(
    ("docstring", "request_text"),
    [
        ("Return the area.", "Write a function `f` that returns the area"),
        ("Copies x to y.\n\nMore.", "Write a function `f` that copies x to y"),
        ("Apply the rule", "Write a function `f` that applies the rule"),
        ("Pushes it on", "Write a function `f` that pushes it on"),
        ("The area.", None),
        ("Return", None),
    ],
)
def test_requests_are_sentences(docstring: str, request_text: str | None) -> None:
    assert request_for("f", docstring) == request_text


def test_chat_budget_is_kept() -> None:
    texts = [MODULE.format(i=i, letters="x") for i in range(9)]
    everything = chat_documents(texts, max_chars=10**6)
    assert len(everything) == 9
    assert len(chat_documents(texts, max_chars=len(everything[0]) + 5)) == 1


def test_written_corpus_reads_back(tree: Path, tmp_path: Path) -> None:
    manifest = write_corpus(config_of(tree), tmp_path / "work")
    assert read_documents(tmp_path / "work", "train") == build_documents(config_of(tree))["train"]
    assert manifest == write_corpus(config_of(tree), tmp_path / "again")
    with pytest.raises(CorpusError, match=r"train\.jsonl is missing"):
        read_documents(tmp_path, "train")


def test_every_block_is_dealt_once_an_epoch() -> None:
    ids = np.arange(1001, dtype=np.uint16)
    sampler = BlockSampler(ids, seq_len=10, seed=4)
    epochs = [np.concatenate([sampler.batch(5 * epoch + step, 20)[:, 0] for step in range(5)]) for epoch in (0, 1)]
    for starts in epochs:
        assert sorted(starts) == list(range(0, 1000, 10))
    assert epochs[0].tolist() != epochs[1].tolist()
    again = BlockSampler(ids, seq_len=10, seed=4).batch(7, 20)
    assert again.equal(sampler.batch(7, 20))
    with pytest.raises(CorpusError, match="do not fill"):
        BlockSampler(ids, seq_len=2000, seed=4)
