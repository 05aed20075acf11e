"""Rejection mode over every method's real proposals: verifier's engine, drafter's methods, the wire's bytes between.

A tiny random target of 13 tokens, so that the law of the first two tokens can be counted: against transformers' own
probabilities, by chi-square. What a broken rule looks like is in acceptance/test_mutants; here one mutant shows that
these counts are enough to see one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers

from drafter_service.growth import draft as growth
from drafter_service.methods.interface import DraftMethod
from drafter_service.methods.ngram import NgramMethod
from drafter_service.methods.suffix import SuffixMethod, SuffixSettings
from shared.messages import SessionSpec
from shared.sampling_params import SamplingParams, SpeculationMode
from tests.engine.tiny_models import save_tiny_model
from tests.grid.driver import Driver, Session
from tests.grid.heads import HEADS
from tests.grid.models import GridModel
from tests.grid.pools import ROOMY_BLOCKS, Pools
from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value

VOCAB_SIZE = 13
PROMPT = (5, 9, 3, 5, 9, 4, 5, 9)
# Room for a whole block; two tokens are looked at.
PARAMS = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
NUM_SESSIONS = 1_280
AT_ONCE = 64
TREES = ("draft_model", *HEADS)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> GridModel:
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder = tmp_path_factory.mktemp("law")
    target = save_tiny_model("LlamaConfig", config, folder / "target", 3)
    draft = save_tiny_model("LlamaConfig", {**config, "num_hidden_layers": 1}, folder / "draft", 4)
    return GridModel(target, draft, "float32")


@pytest.fixture(scope="module")
def pools(checkpoints: GridModel) -> Iterator[Pools]:
    opened = Pools(checkpoints, num_threads=1)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def law_of_two(checkpoints: GridModel) -> np.ndarray:
    """[V * V]: probabilities of the first two tokens, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints.target, dtype=torch.float32)
    with torch.inference_mode():
        first = model(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1)
        rows = torch.tensor([[*PROMPT, token] for token in range(VOCAB_SIZE)])
        second = model(rows).logits[:, -1].double().softmax(-1)
    return (first[:, None] * second).flatten().numpy()


def build(name: str, pools: Pools) -> DraftMethod:
    if name == "draft_model":
        return pools.draft_method()
    if name == "ngram":
        return NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3)
    if name == "suffix":
        return SuffixMethod(SuffixSettings(24, 100, 10_000, 4.0, 0.0))
    return pools.head_method(name)


def sample(pools: Pools, method: DraftMethod, tree: bool, stream: int) -> tuple[np.ndarray, int, int]:
    """Counts of the first two tokens, and how many draft tokens were scored and accepted."""
    driver = Driver(pools.pool("whole", ROOMY_BLOCKS))
    counts = np.zeros(VOCAB_SIZE * VOCAB_SIZE, dtype=np.int64)
    num_drafted = num_accepted = 0
    for start in range(0, NUM_SESSIONS, AT_ONCE):
        sessions = []
        for index in range(start, start + AT_ONCE):
            key = (stream << 32) + index
            spec = SessionSpec(f"s{key}", 0, PROMPT, (), PARAMS, SpeculationMode.REJECTION, stream_key=key)
            sessions.append(Session(spec, method, gamma=3, free_run=1, tree=tree, enough=2))
        driver.run(sessions)
        for session in sessions:
            assert not session.failure
            counts[session.output[0] * VOCAB_SIZE + session.output[1]] += 1
            num_drafted += session.num_draft_tokens
            num_accepted += session.num_accepted_tokens
    return counts, num_drafted, num_accepted


CASES = [(name, tree) for name in ("ngram", "suffix", *TREES) for tree in (False, True) if tree <= (name != "ngram")]


@pytest.mark.parametrize(("name", "tree"), CASES)
def test_every_method_keeps_the_targets_law(pools: Pools, law_of_two: np.ndarray, name: str, tree: bool) -> None:
    counts, num_drafted, num_accepted = sample(pools, build(name, pools), tree, stream=CASES.index((name, tree)))
    assert num_drafted > NUM_SESSIONS
    assert num_accepted > NUM_SESSIONS // 20
    assert chi_square_p_value(counts, law_of_two) > SMALLEST_P_VALUE


def test_drafts_ranked_instead_of_drawn_would_show(
    pools: Pools, law_of_two: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: the likeliest tokens of the law are sent as if they had been drawn from it."""
    monkeypatch.setattr(growth, "draw_distinct", lambda law, count, _rng: list(law.token_ids[:count]))
    counts, _, _ = sample(pools, build("draft_model", pools), tree=False, stream=99)
    assert chi_square_p_value(counts, law_of_two) < SMALLEST_P_VALUE
