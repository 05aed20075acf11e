"""A tiny target, every method that can draft for it, and the law of its first two tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.methods.suffix import SuffixMethod, SuffixSettings
from tests.engine.tiny_models import save_tiny_model
from tests.grid.models import GridModel
from tests.grid.pools import Pools

# Few enough tokens that the joint law of two has cells that fill.
LAW_VOCAB_SIZE = 13
LAW_PROMPT = (5, 9, 3, 5, 9, 4, 5, 9)


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
    return pools.head_method(name)
