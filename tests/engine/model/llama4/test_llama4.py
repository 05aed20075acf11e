"""Llama 4: every way to a sequence's logits gives the same bits, and they are transformers'.

The sequences cross chunks of 32 positions and steps of 16 in the scale of queries, in trees too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider.engine.certificate import certify
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.table import StateTable
from outrider.engine.run.runner import ModelRunner
from tests.engine.batches import scattered_blocks
from tests.engine.recurrent.hybrid_sequences import HybridSequence, Round, step, with_trees
from tests.engine.tiny_models import SERVED, VOCAB_SIZE, save_tiny_model

LENGTH = 70
BLOCK_SIZE = 4
# fp32, logits of order 1-10
TOLERANCE = 2e-5
CONFIG_NAME, SMALL = SERVED["llama4"]
SIZES = {
    **SMALL,
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 1],
    "moe_layers": [1, 3],
    "attention_chunk_size": 32,
    "floor_scale": 16,
}
# As in the large checkpoints: Scout, then Maverick, which has no norms of queries and keys and every other layer dense.
VARIANTS: dict[str, dict[str, Any]] = {
    "one-expert": {"num_experts_per_tok": 1, "moe_layers": [0, 1, 2, 3]},
    "no-norms": {"num_experts_per_tok": 1, "use_qk_norm": False},
    "three-experts": {"num_experts_per_tok": 3},
    "untuned": {"attn_temperature_tuning": False},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama4")


def checkpoint_of(name: str, checkpoints: Path) -> Path:
    if not (checkpoints / name).exists():
        save_tiny_model(CONFIG_NAME, SIZES | VARIANTS[name], checkpoints / name)
    return checkpoints / name


@cache
def load(path: Path, dtype: str) -> LoadedModel:
    return load_model(str(path), dtype=dtype)


def random_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


TOKENS = random_tokens(LENGTH, 1)
STRANGERS = (1, 9, 40, 60)  # tokens


def new_sequences(loaded: LoadedModel) -> list[HybridSequence]:
    """Ours and the strangers; there is no recurrent state in them."""
    lengths = (LENGTH, *STRANGERS)
    blocks = scattered_blocks(110, len(lengths))
    runner, table = ModelRunner(loaded, loaded.make_cache(110, BLOCK_SIZE)), StateTable(2 * len(lengths))
    tokens = [TOKENS, *(random_tokens(length, length) for length in STRANGERS)]
    return [HybridSequence(runner, table, *pair) for pair in zip(tokens, blocks, strict=True)]


Way = Callable[[LoadedModel], torch.Tensor]


def alone(rounds: list[Round]) -> Way:
    def run(loaded: LoadedModel) -> torch.Tensor:
        ours, *_strangers = new_sequences(loaded)
        for each in rounds:
            step([(ours, each)])
        return torch.stack(ours.logits)

    return run


def in_company(rounds: list[Round]) -> Way:
    """Beside prompts, single rows and verifications at other positions, in changing order."""

    def run(loaded: LoadedModel) -> torch.Tensor:
        ours, *strangers = new_sequences(loaded)
        order = random.Random(5)
        for each in rounds:
            batch = [(ours, each)]
            for stranger in strangers:
                rest = len(stranger.token_ids) - stranger.num_computed
                if rest:
                    draft = random_tokens(order.randrange(3), order.randrange(99))
                    batch.append((stranger, Round(min(rest, order.choice((1, 4, 33))), draft)))
            order.shuffle(batch)
            step(batch)
        return torch.stack(ours.logits)

    return run


def with_drafts(num_wrong: int) -> list[Round]:
    """Chains of 0 to 4 right tokens, then wrong ones."""
    order, position, rounds = random.Random(3), 9, [Round(9)]
    while position < LENGTH:
        right = min(order.randrange(5), LENGTH - position - 1)
        draft = [*TOKENS[position + 1 : position + 1 + right], *[5] * num_wrong]
        rounds.append(Round(1, draft, accepted=range(right)))
        position += 1 + right
    return rounds


WAYS: dict[str, Way] = {
    "chunks": alone([Round(30), Round(5), Round(35)]),
    "single rows in company": in_company([Round(1)] * LENGTH),
    "chunks in company": in_company([Round(3), Round(32), Round(1), Round(34)]),
    "drafted chains in company": in_company(with_drafts(2)),
    "drafted trees in company": in_company(with_trees(TOKENS, 4, VOCAB_SIZE)),
}


MORE_WAYS = WAYS | {
    "single rows": alone([Round(1)] * LENGTH),
    "drafted chains": alone(with_drafts(0)),
    "drafted trees": alone(with_trees(TOKENS, 4, VOCAB_SIZE)),
    **{f"cut at {cut}": alone([Round(cut), Round(LENGTH - cut)]) for cut in range(1, LENGTH)},
}


def assert_the_same_bits(loaded: LoadedModel, ways: dict[str, Way]) -> None:
    expected = alone([Round(LENGTH)])(loaded)
    assert bool(torch.isfinite(expected).all())
    assert [name for name, way in ways.items() if not torch.equal(way(loaded), expected)] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_gives_the_same_bits(checkpoints: Path, dtype: str) -> None:
    assert_the_same_bits(load(checkpoint_of("one-expert", checkpoints), dtype), WAYS)


@pytest.mark.storm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_way_and_every_cut_gives_the_same_bits(checkpoints: Path, name: str, dtype: str) -> None:
    assert_the_same_bits(load(checkpoint_of(name, checkpoints), dtype), MORE_WAYS)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_the_logits_are_those_of_transformers(checkpoints: Path, name: str) -> None:
    path = checkpoint_of(name, checkpoints)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    found = in_company([Round(3), Round(32), Round(1), Round(34)])(load(path, "float32"))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_certificate_holds(checkpoints: Path, dtype: str) -> None:
    loaded = load(checkpoint_of("three-experts", checkpoints), dtype)
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(2, BLOCK_SIZE)))
    assert certificate.holds, certificate.describe()
