"""Hybrid models: every way to a sequence's logits gives the same bits, and they are transformers' to its own spread."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from batches import scattered_blocks
from hybrid_sequences import HybridSequence, Round, step, with_trees
from tiny_models import HYBRIDS, VOCAB_SIZE, save_tiny_model

from outrider.engine.certificate import certify
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.table import StateTable
from outrider.engine.run.runner import ModelRunner

BLOCK_SIZE = 4
LENGTH = 40
_NUM_SLOTS = 12
_DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


def checkpoint_of(name: str, checkpoints: Path) -> Path:
    if not (checkpoints / name).exists():
        save_tiny_model(*HYBRIDS[name], checkpoints / name)
    return checkpoints / name


@cache
def load(path: Path, dtype: str) -> LoadedModel:
    return load_model(str(path), dtype=dtype)


@pytest.fixture(params=[(name, dtype) for name in sorted(HYBRIDS) for dtype in _DTYPES], ids="-".join)
def loaded(request: pytest.FixtureRequest, checkpoints: Path) -> LoadedModel:
    name, dtype = request.param
    return load(checkpoint_of(name, checkpoints), dtype)


def random_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


TOKENS = random_tokens(LENGTH, 1)


def new_sequences(loaded: LoadedModel) -> list[HybridSequence]:
    """Ours and four strangers, in memory that is full of NaN."""
    runner = ModelRunner(loaded, loaded.make_cache(100, BLOCK_SIZE), loaded.make_states(_NUM_SLOTS))
    assert runner.states is not None
    for layer in runner.states.layers:
        for tensor in (layer.window, layer.state, layer.log):
            tensor.fill_(math.nan)
    table = StateTable(_NUM_SLOTS)
    lengths = (LENGTH, 1, 2, 5, 9)
    blocks = scattered_blocks(100, len(lengths))
    tokens = [TOKENS, *(random_tokens(length, length) for length in lengths[1:])]
    return [HybridSequence(runner, table, *pair) for pair in zip(tokens, blocks, strict=True)]


def alone(rounds: list[Round]) -> Callable[[LoadedModel], torch.Tensor]:
    def run(loaded: LoadedModel) -> torch.Tensor:
        ours, *_strangers = new_sequences(loaded)
        for each in rounds:
            step([(ours, each)])
        return torch.stack(ours.logits)

    return run


def in_company(rounds: list[Round]) -> Callable[[LoadedModel], torch.Tensor]:
    """Beside one-row decodes, verifications and prompts, in changing order."""

    def run(loaded: LoadedModel) -> torch.Tensor:
        ours, *strangers = new_sequences(loaded)
        order = random.Random(5)
        for each in rounds:
            batch = [(ours, each)]
            for stranger in strangers:
                if stranger.num_computed == len(stranger.token_ids):
                    stranger.rewind(0)
                rest = len(stranger.token_ids) - stranger.num_computed
                batch.append((stranger, Round(min(rest, 4), random_tokens(order.randrange(3), order.randrange(99)))))
            order.shuffle(batch)
            step(batch)
        return torch.stack(ours.logits)

    return run


def with_drafts(wrong_at_end: bool = False) -> list[Round]:
    """0 to 4 draft tokens, none to all of them right; rounds without drafts between."""
    order, position, rounds = random.Random(3), 9, [Round(9)]
    while position < LENGTH:
        right = min(order.randrange(4), LENGTH - position - 1)
        wrong = (TOKENS[(position + 1 + right) % LENGTH] + 1) % VOCAB_SIZE
        num_wrong = 4 if wrong_at_end else order.randrange(2)
        draft = [*TOKENS[position + 1 : position + 1 + right], *[wrong] * num_wrong]
        rounds.append(Round(1, draft, accepted=range(right)))
        position += 1 + right
        if order.random() < 0.4 and position < LENGTH:
            rounds.append(Round(1))
            position += 1
    return rounds


def recomputed(loaded: LoadedModel) -> torch.Tensor:
    """Half of it, its state and blocks given away, and all of it again."""
    ours, stranger, *_others = new_sequences(loaded)
    for each in with_drafts()[:6]:
        step([(ours, each)])
    ours.rewind(0)
    stranger.token_ids, stranger.block_ids = random_tokens(30, 8), ours.block_ids
    step([(stranger, Round(30))])
    step([(ours, Round(17))])
    step([(ours, Round(LENGTH - 17))])
    return torch.stack(ours.logits)


def cut_back(loaded: LoadedModel) -> torch.Tensor:
    """Every round's reply is lost once, and the round repeated with another draft."""
    ours, *_strangers = new_sequences(loaded)
    for each in with_drafts():
        before = ours.num_computed
        step([(ours, each)])
        if each.accepted or before:
            ours.rewind(before)
            assert ours.num_computed == before, "the last round can always be undone"
            step([(ours, Round(each.num_tokens, [5, 6]))])
            ours.rewind(before)
            step([(ours, each)])
    return torch.stack(ours.logits)


WAYS: dict[str, Callable[[LoadedModel], torch.Tensor]] = {
    "chunks": alone([Round(7), Round(33)]),
    "even chunks": alone([Round(16), Round(16), Round(8)]),
    "single rows": alone([Round(1)] * LENGTH),
    "single rows in company": in_company([Round(1)] * LENGTH),
    "chunks in company": in_company([Round(3), Round(17), Round(1), Round(19)]),
    "drafted chains": alone(with_drafts()),
    "long wrong drafts": alone(with_drafts(wrong_at_end=True)),
    "drafted chains in company": in_company(with_drafts()),
    "drafted trees": alone(with_trees(TOKENS, 3, VOCAB_SIZE)),
    "drafted trees in company": in_company(with_trees(TOKENS, 3, VOCAB_SIZE)),
    "recomputed": recomputed,
    "cut back": cut_back,
}


def test_every_way_gives_the_same_bits(loaded: LoadedModel) -> None:
    expected = alone([Round(LENGTH)])(loaded)
    assert bool(torch.isfinite(expected).all())
    differing = [name for name, way in WAYS.items() if not torch.equal(way(loaded), expected)]
    assert differing == []


@pytest.mark.parametrize("cut", range(1, LENGTH, 3))
def test_a_cut_anywhere_changes_no_bit(checkpoints: Path, cut: int) -> None:
    loaded = load(checkpoint_of("qwen3_5", checkpoints), "float32")
    assert torch.equal(alone([Round(cut), Round(LENGTH - cut)])(loaded), alone([Round(LENGTH)])(loaded))


@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_the_logits_are_those_of_transformers(name: str, checkpoints: Path) -> None:
    """Whose own two forms, chunks and steps, differ: ours is no farther from one than twice their distance."""
    path = checkpoint_of(name, checkpoints)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.inference_mode():
        chunks = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
        cached, rows = None, []
        cache_name = "cache_params" if name in ("mamba", "mamba2", "falcon_mamba") else "past_key_values"
        for position, token in enumerate(TOKENS):
            output = model(
                torch.tensor([[token]]),
                position_ids=torch.tensor([[position]]),
                use_cache=True,
                **{cache_name: cached},
            )
            cached = output[cache_name]
            rows.append(output.logits[0, 0])
    steps, ours = torch.stack(rows), alone([Round(LENGTH)])(load(path, "float32"))
    spread = float((chunks - steps).abs().max())
    assert min(float((ours - form).abs().max()) for form in (chunks, steps)) < 2 * spread
    assert spread < 5e-3


def test_the_certificate_holds_and_leaves_the_runners_states_alone(checkpoints: Path) -> None:
    loaded = load(checkpoint_of("qwen3_5", checkpoints), "float32")
    runner = ModelRunner(loaded, loaded.make_cache(2, BLOCK_SIZE), loaded.make_states(1))
    assert runner.states is not None
    runner.states.layers[0].state.fill_(3.0)
    certificate = certify(loaded, runner)
    assert certificate.holds, certificate.describe()
    assert [check.name for check in certificate.checks][-1] == "drafts of two rounds"
    assert bool((runner.states.layers[0].state == 3.0).all())
