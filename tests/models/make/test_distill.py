"""Distillation moves a draft towards its target, on its own text; acceptance figures mean what they say."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.make.distill import DistillConfig, distill
from models.make.evaluate import acceptance, accepted_tokens
from models.make.lm_data import BlockSampler
from models.make.sampling_data import continue_rows, prompt_rows, sample_continuations
from outrider.training.heads.draft_model import init_from_target

CONFIG = DistillConfig(total_steps=120, warmup_steps=2, decay_from=80, row_len=24, rows_per_step=8, own_rows=6)


def tiny_llama(hidden_size: int, seed: int, spread: float) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, spread)
    return model


@pytest.fixture
def token_ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, 3000).astype(np.uint16)


def test_loss_falls_and_agreement_rises(token_ids: np.ndarray, tmp_path: Path) -> None:
    target, draft = tiny_llama(32, 0, 0.4), tiny_llama(16, 1, 0.02)
    num_rows = sample_continuations(
        target, token_ids, tmp_path / "own.npy", 3, 60.0, lambda line: None, rows_per_batch=16, row_len=160
    )
    own = np.load(tmp_path / "own.npy")[:, -24:]
    assert own.shape == (num_rows, 24)
    assert num_rows == 48
    init_from_target(draft, target)
    frozen = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    records = list(distill(draft, target, CONFIG, BlockSampler(token_ids, 23, 0), own))
    losses, agreements = ([record[field] for record in records] for field in (1, 2))
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert np.mean(agreements[-5:]) > np.mean(agreements[:5]) + 0.05
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in target.state_dict().items())


def test_greedy_rows_equal_generate(token_ids: np.ndarray) -> None:
    """Oracle: transformers' own greedy decoding, row by row."""
    target = tiny_llama(32, 0, 0.4).bfloat16()
    prompts = prompt_rows(token_ids, 12, 5, np.random.default_rng(1))
    rows = continue_rows(target, prompts, torch.zeros(5), 20, torch.Generator().manual_seed(0))
    expected = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=20, eos_token_id=None
    )
    assert rows.shape == (5, 32)
    assert torch.equal(rows, expected)


def test_prompts_start_at_chats_every_fourth_row(token_ids: np.ndarray) -> None:
    prompts = prompt_rows(token_ids, 9, 12, np.random.default_rng(1))
    assert (prompts[::4, 0] == 2).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_perfect_draft_is_always_accepted(token_ids: np.ndarray, temperature: float) -> None:
    target = tiny_llama(32, 0, 0.4)
    prompts = prompt_rows(token_ids, 8, 4, np.random.default_rng(1))
    figures = acceptance(target, target, prompts, temperature, 24)
    assert figures["per_token"] == pytest.approx(1.0, abs=1e-5)
    assert figures["accepted_tokens_by_draft_len"] == pytest.approx(range(1, 9), abs=1e-4)
    assert figures["positions"] == 4 * 24


def test_acceptance_equals_simulated_rejection_sampling(token_ids: np.ndarray) -> None:
    """One position, target and draft laws known: the share of accepted draws of q is what the figure says."""
    target, draft = tiny_llama(32, 0, 0.3), tiny_llama(32, 3, 0.3)
    prompts = prompt_rows(token_ids, 8, 1, np.random.default_rng(1)).repeat(1000, 1)
    figures = acceptance(target, draft, prompts, 1.0, 8)
    with torch.no_grad():
        target_probs = target(input_ids=prompts[:1]).logits[0, -1].double().softmax(-1).numpy()
        draft_probs = draft(input_ids=prompts[:1]).logits[0, -1].double().softmax(-1).numpy()
    rng = np.random.default_rng(2)
    drawn = rng.choice(64, 200_000, p=draft_probs / draft_probs.sum())
    accepted = rng.random(200_000) * draft_probs[drawn] < target_probs[drawn]
    first_token = figures["accepted_tokens_by_draft_len"][0]
    assert 0.2 < accepted.mean() < 0.9, "laws too close or too far apart for the comparison to mean anything"
    assert first_token == pytest.approx(accepted.mean(), abs=0.03)


def test_accepted_tokens_by_hand() -> None:
    assert accepted_tokens(torch.full((2, 9), 0.5), 3) == pytest.approx([0.5, 0.75, 0.875])
    assert accepted_tokens(torch.tensor([[1.0, 0.0, 1.0, 1.0]]), 2) == pytest.approx([2 / 3, (1 + 0 + 2) / 3])
