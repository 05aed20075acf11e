"""Rejection mode with a draft model of another tokenizer: the target's law, by chi-square.

As test_proposals_keep_the_law; here the draft's logits come from tokens of its own, of
which only some are the target's too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers

from outrider.drafter_service.config import DrafterConfig
from outrider.drafting.growth import draft as growth
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.registry import build_methods
from outrider.drafting.vocabulary.mapping import map_vocabulary
from tests.drafting.other_vocabularies import save_model, train_byte_level, train_unigram
from tests.grid.models import GridModel
from tests.grid.pools import Pools
from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value
from tests.verifier_service.drafting.drafting_pair import (
    LAW_VOCAB_SIZE,
    NUM_SESSIONS,
    law_of_two_tokens,
    sample_two_tokens,
)

TARGET_TEXT = ["the thin hen the heat the hint then the ten that tea the nine"] * 4
DRAFT_TEXT = ["in the tin the hat is the inn at the site then it sat thin the hint"] * 4
KINDS = ("byte_level", "unigram")


def tokenizer(kind: str) -> tokenizers.Tokenizer:
    if kind == "target":
        return train_byte_level(LAW_VOCAB_SIZE, TARGET_TEXT, whole_alphabet=False)
    if kind == "byte_level":
        return train_byte_level(19, DRAFT_TEXT, whole_alphabet=False)
    return train_unigram(20, DRAFT_TEXT)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By kind of tokenizer; the target has 13 tokens and two layers."""
    folder = tmp_path_factory.mktemp("mapped-law")
    settings = {"target": {"num_hidden_layers": 2, "seed": 3}, "byte_level": {"seed": 4}, "unigram": {"seed": 5}}
    return {kind: str(save_model(folder / kind, tokenizer(kind), **settings[kind])) for kind in ("target", *KINDS)}


@pytest.fixture(scope="module")
def pools(models: dict[str, str]) -> Iterator[Pools]:
    opened = Pools(GridModel(Path(models["target"]), Path(models["byte_level"]), "float32"), num_threads=1)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def law_of_two(models: dict[str, str]) -> np.ndarray:
    assert transformers.AutoConfig.from_pretrained(models["target"]).vocab_size == LAW_VOCAB_SIZE
    return law_of_two_tokens(Path(models["target"]))


def serve(models: dict[str, str], kind: str) -> DraftMethod:
    config = DrafterConfig(
        draft_model=(models[kind],),
        target_model=models["target"],
        methods=("draft_model",),
        dtype="float32",
        kv_cache_mb=16,
        num_threads=1,
    )
    return build_methods(config, lambda _line: None)["draft_model"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [False, True])
def test_the_law_is_the_targets(
    models: dict[str, str], pools: Pools, law_of_two: np.ndarray, kind: str, tree: bool
) -> None:
    vocabulary = map_vocabulary(models[kind], models["target"])
    assert vocabulary is not None
    assert LAW_VOCAB_SIZE / 3 < vocabulary.num_shared < LAW_VOCAB_SIZE
    counts, num_drafted, num_accepted = sample_two_tokens(
        pools, serve(models, kind), tree, stream=200 + tree + len(kind)
    )
    assert num_drafted > NUM_SESSIONS
    assert num_accepted > NUM_SESSIONS // 20
    assert chi_square_p_value(counts, law_of_two) > SMALLEST_P_VALUE


def test_drafts_ranked_instead_of_drawn_would_show(
    models: dict[str, str], pools: Pools, law_of_two: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the neighbour, so that these counts are seen to be enough here too."""
    monkeypatch.setattr(growth, "draw_distinct", lambda law, count, _rng: list(law.token_ids[:count]))
    counts, _, _ = sample_two_tokens(pools, serve(models, "byte_level"), tree=False, stream=299)
    assert chi_square_p_value(counts, law_of_two) < SMALLEST_P_VALUE
