"""A tiny target, every method that can draft for it, and its first two tokens: their law, and how often each came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.methods.suffix import SuffixMethod, SuffixSettings
from outrider.drafting.serving.combined import CombinedMethod
from outrider.shared.draft_policy.draft_methods import WITH_LOOKUP, without_lookup
from outrider.shared.messages import SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.engine.tiny_models import save_tiny_model
from tests.grid.driver import Driver, Session
from tests.grid.models import GridModel
from tests.grid.pools import ROOMY_BLOCKS, Pool, Pools

# Few enough tokens that the joint law of two has cells that fill.
LAW_VOCAB_SIZE = 13
LAW_PROMPT = (5, 9, 3, 5, 9, 4, 5, 9)
# Room for a whole block; two tokens are looked at.
_LAW_PARAMS = SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True)
NUM_SESSIONS = 1_280
_AT_ONCE = 64


def save_pair(folder: Path) -> GridModel:
    config = {
        "vocab_size": LAW_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    target = save_tiny_model("LlamaConfig", config, folder / "target", 3)
    draft = save_tiny_model("LlamaConfig", {**config, "num_hidden_layers": 1}, folder / "draft", 4)
    return GridModel(target, draft, "float32")


def law_of_two_tokens(target: Path) -> np.ndarray:
    """[V * V]: probabilities of the first two tokens after LAW_PROMPT, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        first = model(torch.tensor([LAW_PROMPT])).logits[0, -1].double().softmax(-1)
        rows = torch.tensor([[*LAW_PROMPT, token] for token in range(LAW_VOCAB_SIZE)])
        second = model(rows).logits[:, -1].double().softmax(-1)
    probabilities: np.ndarray = (first[:, None] * second).flatten().numpy()
    return probabilities


def build_method(name: str, pools: Pools) -> DraftMethod:
    if name == "draft_model":
        return pools.draft_method()
    if name == "ngram":
        return NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3)
    if name == "suffix":
        return SuffixMethod(SuffixSettings(24, 100, 10_000, 4.0, 0.0))
    if name in WITH_LOOKUP:
        suffix = SuffixMethod(SuffixSettings(24, 100, 10_000, 4.0, 0.0))
        return CombinedMethod(build_method(without_lookup(name), pools), suffix)
    return pools.head_method(name)


def count_two_tokens(
    pool: Pool, stream: int, session_of: Callable[[SessionSpec], Session]
) -> tuple[np.ndarray, int, int]:
    """[V * V]: how often each pair of first tokens came in rejection mode; and how many draft tokens were scored and
    accepted.

    stream: numbers the sessions' keys, so that no two counts have one in common.
    """
    driver = Driver(pool)
    counts = np.zeros(LAW_VOCAB_SIZE * LAW_VOCAB_SIZE, dtype=np.int64)
    num_drafted = num_accepted = 0
    for start in range(0, NUM_SESSIONS, _AT_ONCE):
        sessions = []
        for key in range((stream << 32) + start, (stream << 32) + start + _AT_ONCE):
            spec = SessionSpec(f"s{key}", 0, LAW_PROMPT, (), _LAW_PARAMS, SpeculationMode.REJECTION, stream_key=key)
            sessions.append(session_of(spec))
        driver.run(sessions)
        for session in sessions:
            assert not session.failure
            counts[session.output[0] * LAW_VOCAB_SIZE + session.output[1]] += 1
            num_drafted += session.num_draft_tokens
            num_accepted += session.num_accepted_tokens
    return counts, num_drafted, num_accepted


def sample_two_tokens(pools: Pools, method: DraftMethod, tree: bool, stream: int) -> tuple[np.ndarray, int, int]:
    """As count_two_tokens, with a drafter's method before the verifier."""
    return count_two_tokens(
        pools.pool("whole", ROOMY_BLOCKS),
        stream,
        lambda spec: Session(spec, method, gamma=3, free_run=1, tree=tree, enough=2),
    )
