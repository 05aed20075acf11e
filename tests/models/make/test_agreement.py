"""Figures of finished heads are those of the head that was exported, over the tokens that count."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from models.make.agreement import load_for_measuring, measure, score
from models.make.head_samples import HELD_OUT_FILES, write_corpus_rows, write_held_out
from models.make.make_heads import HEADS, plan
from outrider.training.data.head_data import load_windows
from outrider.training.data.tokenize_rows import RowEncoder
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.registry import build_objective
from tests.training.tiny import HEAD_METHODS, VOCAB_SIZE, write_target

HEAD = HeadOptions(num_heads=2, inner_dim=16, ttt_steps=2, draft_vocab_size=30)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and the folder of its samples."""
    folder = tmp_path_factory.mktemp("agreement")
    target_dir = write_target(folder / "target")
    rng = np.random.default_rng(0)
    for split in ("heldout", "train"):
        rng.integers(0, VOCAB_SIZE, 3000).astype(np.uint16).tofile(folder / f"{split}.bin")
    model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16)
    write_held_out(model, folder, folder, num_prompts=2)
    write_corpus_rows(folder, folder, num_rows=3)
    return target_dir, folder


def test_samples_are_the_targets_own(folders: tuple[Path, Path]) -> None:
    """Oracle: transformers' own greedy decoding."""
    target_dir, samples = folders
    model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16)
    rows = [json.loads(line) for line in (samples / HELD_OUT_FILES[0.0]).read_text().splitlines()]
    prompts = torch.tensor([row["prompt_token_ids"] for row in rows])
    mask = torch.ones_like(prompts)
    wanted = model.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=192, eos_token_id=None)
    assert wanted[:, prompts.shape[1] :].tolist() == [row["token_ids"] for row in rows]
    assert np.load(samples / "corpus.npy").shape == (3, 256)


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_figures_of_an_exported_head(folders: tuple[Path, Path], tmp_path: Path, method: str) -> None:
    target_dir, samples = folders
    target = FrozenTarget(target_dir)
    objective = build_objective(method, HEAD, target, np.arange(VOCAB_SIZE), seed=3).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    objective.export(tmp_path / "head", torch.float32, "target")
    figures = measure([tmp_path / "head"], target_dir, samples)["head"]
    assert figures["method"] == method
    assert figures["bytes"] == (tmp_path / "head/model.safetensors").stat().st_size
    for temperature, name in HELD_OUT_FILES.items():
        windows = load_windows([samples / name], RowEncoder(target_dir), VOCAB_SIZE, 2048)
        wanted = score(objective, target, windows)
        found = figures[f"temperature_{temperature:g}"]
        assert found["positions"] == 2 * 192
        assert found["overlap"] == pytest.approx(wanted.means()["overlap"], abs=1e-4)
        assert found["agreement"] == pytest.approx(wanted.means()["agreement"], abs=1e-4)
        assert 0 < found["overlap"][0] < 0.9


def test_a_target_agrees_with_itself(folders: tuple[Path, Path]) -> None:
    target_dir, samples = folders
    target = FrozenTarget(target_dir)
    windows = load_windows([samples / HELD_OUT_FILES[1.0]], RowEncoder(target_dir), VOCAB_SIZE, 2048)
    means = score(load_for_measuring(target_dir, target), target, windows).means()
    assert means == {"agreement": [1.0], "overlap": [1.0]}


def test_the_plan_names_what_earlier_steps_leave(tmp_path: Path) -> None:
    steps = plan(tmp_path / "work", tmp_path / "models")
    assert len({step.name for step in steps}) == len(steps) == 2 + 2 * len(HEADS)
    left: set[str] = set()
    for head in HEADS:
        train = next(step.arguments for step in steps if step.name == f"heads-{head.name}")
        export = next(step.arguments for step in steps if step.name == f"heads-{head.name}-export")
        run_dir = train[train.index("--output") + 1]
        assert export[export.index("--run") + 1] == run_dir
        assert "--resume" in train
        left.add(Path(export[export.index("--output") + 1]).name)
        assert head.method in HEAD_METHODS
    measured = [
        value for option, value in zip(steps[-1].arguments, steps[-1].arguments[1:], strict=False) if option == "--head"
    ]
    assert left | {"demo-draft"} == set(measured)
