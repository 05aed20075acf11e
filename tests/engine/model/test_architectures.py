"""Every served architecture, through our attention and our cache, against transformers' eager attention.

The oracle runs each sequence alone and whole; ours is ragged, chunked, scattered over blocks, then stepped in
several tokens at a time, then asked for a tree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import CachedSequence, run_step, scattered_blocks
from latent_models import LATENT_MODELS, LATENT_PARAMS
from lean_models import LEAN_MODELS
from tiny_models import REFUSED, SERVED, VOCAB_SIZE, save_tiny_model

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.errors import ModelRefused
from outrider.engine.model.load import load_model
from outrider.engine.run.runner import ModelRunner

# fp32, two layers, logits of order 1-10; sound runs differ by less than 1e-5 (largest seen: see below).
TOLERANCE = 2e-5
BLOCK_SIZE = 4
LENGTHS = (21, 12, 17)
MODELS = SERVED | LEAN_MODELS | LATENT_MODELS
EACH_MODEL = [*sorted(SERVED), *sorted(LEAN_MODELS), *LATENT_PARAMS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(params=EACH_MODEL)
def checkpoint(request: pytest.FixtureRequest, checkpoints: Path) -> Path:
    directory = checkpoints / request.param
    if not directory.exists():
        save_tiny_model(*MODELS[request.param], directory)
    return directory


@cache
def oracle(checkpoint: Path) -> transformers.PreTrainedModel:
    # transformers' eager attention adds Falcon's linear biases twice: with its mask, and by itself.
    attention = "sdpa" if checkpoint.name.endswith("falcon_rw") else "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation=attention, experts_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def oracle_logits(checkpoint: Path, token_ids: list[int]) -> torch.Tensor:
    return oracle(checkpoint)(torch.tensor([token_ids]), use_cache=False).logits[0]


def random_tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


def new_runner(checkpoint: Path) -> ModelRunner:
    loaded = load_model(str(checkpoint))
    return ModelRunner(loaded, loaded.make_cache(num_blocks=30, block_size=BLOCK_SIZE))


def test_ragged_chunked_scattered_steps_match_eager(checkpoint: Path) -> None:
    runner = new_runner(checkpoint)
    blocks = scattered_blocks(30, 3)
    sequences = [CachedSequence(random_tokens(length, seed), blocks[seed]) for seed, length in enumerate(LENGTHS)]
    parts: list[list[torch.Tensor]] = [[], [], []]
    # (rows of sequence 0, 1, 2): whole and chunked prefill together, then two ragged multi-token steps.
    for counts in ((5, 7, 10), (9, 1, 0), (2, 4, 1), (5, 0, 6)):
        present = [index for index, count in enumerate(counts) if count]
        step = run_step(runner, [sequences[index].rows(counts[index]) for index in present])
        for index, logits in zip(present, step, strict=True):
            parts[index].append(logits)
    for sequence, logits in zip(sequences, parts, strict=True):
        assert sequence.num_cached == len(sequence.token_ids)
        expected = oracle_logits(checkpoint, sequence.token_ids)
        torch.testing.assert_close(torch.cat(logits), expected, atol=TOLERANCE, rtol=0)


def test_every_tree_row_matches_its_path_alone(checkpoint: Path) -> None:
    runner = new_runner(checkpoint)
    blocks = scattered_blocks(30, 3)
    other, context = random_tokens(6, 7), random_tokens(9, 8)
    session = CachedSequence(context, blocks[0])
    run_step(runner, [session.rows(7)])
    # Rows 0 and 1 end the chain; 2 and 3 hang below 1, 4 and 5 below 2, 6 below 3, 7 below 6.
    tree, parents = random_tokens(6, 9), [1, 1, 2, 2, 3, 6]
    rows = SessionRows(context[7:] + tree, 7, blocks[0], 8, num_chain_rows=2, parents=parents)
    logits = run_step(runner, [SessionRows(other, 0, blocks[1], 6), rows])[1]
    for row in range(2, 8):
        path: list[int] = []
        node = row
        while node >= 2:
            path.insert(0, tree[node - 2])
            node = parents[node - 2]
        expected = oracle_logits(checkpoint, context + path)[-1]
        torch.testing.assert_close(logits[row], expected, atol=TOLERANCE, rtol=0)


def test_tapped_hidden_states_are_those_of_transformers(checkpoint: Path) -> None:
    runner = new_runner(checkpoint)
    token_ids = random_tokens(8, 1)
    result = runner.forward(build_batch([SessionRows(token_ids, 0, [3, 1], 0)], BLOCK_SIZE), (0, 1, 2))
    assert result.logits.shape == (0, VOCAB_SIZE)
    with torch.inference_mode():
        expected = oracle(checkpoint)(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    assert sorted(result.hidden) == [0, 1, 2]
    for layer, hidden in result.hidden.items():
        torch.testing.assert_close(hidden, expected[layer][0], atol=TOLERANCE, rtol=0)
    untapped = runner.forward(build_batch([SessionRows(token_ids, 0, [3, 1], 1)], BLOCK_SIZE))
    assert untapped.hidden == {}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_architectures_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    config_name, arguments = REFUSED[name]
    save_tiny_model(config_name, arguments, tmp_path)
    with pytest.raises(ModelRefused, match="does not route its attention through") as refusal:
        load_model(str(tmp_path))
    assert "Fix:" in str(refusal.value)


def test_the_hook_runs_once_per_layer(checkpoint: Path) -> None:
    loaded = load_model(str(checkpoint))
    calls: list[int] = []

    def counting(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(query.shape[0])
        return loaded.attention_ops.paged_attention(query, *args, **kwargs)

    counted = replace(loaded, attention_ops=replace(loaded.attention_ops, paged_attention=counting))
    runner = ModelRunner(counted, counted.make_cache(4, 4))
    runner.forward(build_batch([SessionRows([5, 6], 0, [2], 1)], 4))
    assert calls == [2] * loaded.num_layers
