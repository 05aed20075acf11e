"""A run that was cut off and resumed is the run that was not: same losses, same weights, to the bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from models.make.family import export_model, llama_config
from models.make.train_lm import TrainConfig, Trainer, run_training
from outrider.training.errors import CheckpointError, CorpusError
from outrider.training.optim import Schedule

CONFIG = TrainConfig(
    total_steps=8,
    warmup_steps=2,
    decay_from=5,
    long_from=6,
    seq_len=16,
    long_seq_len=32,
    tokens_per_step=64,
    eval_every=4,
    checkpoint_every=4,
    heldout_sequences=4,
)


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, length in (("train", 4000), ("heldout", 400)):
        (rng.zipf(1.5, length) % 4096).astype(np.uint16).tofile(tmp_path / f"{split}.bin")
    return tmp_path


def new_trainer(config: TrainConfig, work_dir: Path) -> Trainer:
    return Trainer(config, llama_config(hidden_size=64, num_layers=1, num_heads=1, intermediate_size=64), work_dir)


def test_resumed_run_equals_uninterrupted_run(work_dir: Path) -> None:
    """The cut (after step 5) lies inside the decay tail and just before sequences grow."""
    whole = new_trainer(CONFIG, work_dir)
    expected = list(whole.steps())
    cut = new_trainer(CONFIG, work_dir)
    run = cut.steps()
    losses = [next(run) for _ in range(5)]
    cut.save(work_dir / "target.pt")
    next(run)  # a step that is lost with the process
    torch.manual_seed(99)
    resumed = new_trainer(CONFIG, work_dir)
    resumed.load(work_dir / "target.pt")
    losses += list(resumed.steps())
    assert losses == expected
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert expected[-1] < expected[0]


def test_run_leaves_checkpoint_history_and_can_be_shortened(work_dir: Path) -> None:
    checkpoint = work_dir / "target.pt"
    trainer = new_trainer(replace(CONFIG, total_steps=4), work_dir)
    run_training(trainer, checkpoint, Console(quiet=True))
    assert (work_dir / "target-history.json").exists()
    shortened = new_trainer(replace(CONFIG, total_steps=6, decay_from=4), work_dir)
    shortened.load(checkpoint)
    run_training(shortened, checkpoint, Console(quiet=True))
    assert [entry["step"] for entry in shortened.history] == [4, 6]
    assert shortened.history[1]["seconds"] > shortened.history[0]["seconds"]
    assert not checkpoint.with_suffix(".partial").exists()


def test_foreign_checkpoint_is_refused(work_dir: Path) -> None:
    new_trainer(CONFIG, work_dir).save(work_dir / "target.pt")
    with pytest.raises(CheckpointError, match="seed=1"):
        new_trainer(replace(CONFIG, seed=2), work_dir).load(work_dir / "target.pt")


def test_missing_corpus_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"models\.make\.tokenizer"):
        new_trainer(CONFIG, tmp_path)


def test_schedule_warms_up_holds_and_falls() -> None:
    factors = [Schedule(warmup_steps=4, decay_from=10, total_steps=20).factor(step) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[3:11] == [1.0] * 8
    assert factors[15] == pytest.approx(0.5)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] > 0


def test_exported_model_is_the_weights_in_bf16(work_dir: Path) -> None:
    model = new_trainer(CONFIG, work_dir).model.eval()
    export_model(model, work_dir / "model", None)
    loaded = LlamaForCausalLM.from_pretrained(work_dir / "model")
    assert loaded.dtype == torch.bfloat16
    assert loaded.generation_config.eos_token_id == [0, 4]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.bfloat16(), loaded.state_dict()[name]), name
