"""Tiny targets of Gemma 4 with an assistant each, random, written by transformers' own classes in the published layout.

transformers' models are the oracle.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

WINDOW = 8
# Several heads of keys; layers of both types of which the last ones share, or all compute, their own.
_TARGET = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "pad_token_id": 0,
}
_ASSISTANT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
_OF_BOTH = (
    *("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window"),
    *("num_global_key_value_heads", "attention_k_eq_v", "pad_token_id"),
)


@dataclass(frozen=True)
class Pair:
    """Two folders and transformers' models of them."""

    target: Path
    assistant: Path
    target_model: Any
    assistant_model: Any

    def states(self, token_ids: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """The target's hidden states [T, H] by transformers' numbering, and the keys and values that it shares."""
        with torch.inference_mode(), _sharing_everything():
            found = self.target_model(token_ids[None], output_hidden_states=True, return_shared_kv_states=True)
        return tuple(states[0] for states in found.hidden_states), dict(found.shared_kv_states)

    def step(self, token_id: int, feature: torch.Tensor, position: int, shared: dict[str, Any]) -> tuple[Any, Any]:
        """The logits [V] and the next feature [H] by transformers' assistant."""
        embedding = self.target_model.get_input_embeddings()(torch.tensor([[token_id]]))
        with torch.inference_mode(), _sharing_everything():
            found = self.assistant_model(
                inputs_embeds=torch.cat((embedding, feature[None, None]), dim=-1),
                position_ids=torch.tensor([[position]]),
                shared_kv_states=shared,
            )
        return found.logits[0, 0], found.last_hidden_state[0, 0]


def save_pair(
    folder: Path, kind: str = "gemma4", *, num_centroids: int = 0, tokenizer: Path | None = None, **changes: Any
) -> Pair:
    """kind: "gemma4" or "gemma4_unified". num_centroids: of ordered embeddings; 0: plain. tokenizer: a folder whose
    files are copied. changes: of the target's text config.
    """
    text_type, settings = f"{kind}_text", _TARGET | changes
    config = transformers.AutoConfig.for_model(text_type, **settings)
    torch.manual_seed(len(kind) + num_centroids)
    with _sharing_everything():
        target = _random(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    target.save_pretrained(folder / "target")
    of_both = {key: settings[key] for key in _OF_BOTH if key in settings}
    layers = transformers.AutoConfig.for_model(text_type, **of_both | _ASSISTANT)
    settings = {"backbone_hidden_size": config.hidden_size, "text_config": layers}
    if num_centroids:
        settings |= {"use_ordered_embeddings": True, "num_centroids": num_centroids, "centroid_intermediate_top_k": 3}
    assistant_config = transformers.AutoConfig.for_model(f"{kind}_assistant", **settings)
    with _sharing_everything():
        assistant = _random(transformers.AutoModelForCausalLM.from_config(assistant_config, dtype=torch.float32))
    if num_centroids:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(config.vocab_size))
    assistant.save_pretrained(folder / "assistant")
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer is not None else ():
        shutil.copy(tokenizer / name, folder / "target")
    for model in (target, assistant):
        model.set_attn_implementation("eager")
    return Pair(folder / "target", folder / "assistant", target, assistant)


@torch.no_grad()
def _random(model: Any) -> Any:
    """Every weight is random, norms too; logits are sharp enough to have no near ties."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn(parameter.shape))
        else:
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return model.eval()


@contextlib.contextmanager
def _sharing_everything() -> Iterator[None]:
    """transformers 5.23 refuses its own assistant, all of whose layers share the target's keys, and shares none of a
    target in which every layer computes its own.
    """
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig

    def modes(of: type[Any]) -> property:
        original = of.kv_sharing_modes

        def found(config: Any) -> list[str | None]:
            if config.num_kv_shared_layers == config.num_hidden_layers:
                return ["reuse"] * config.num_hidden_layers
            if config.num_kv_shared_layers:
                return original.fget(config)  # type: ignore[no-any-return]
            last = {layer_type: index for index, layer_type in enumerate(config.layer_types)}
            return ["store" if index in last.values() else None for index in range(config.num_hidden_layers)]

        return property(found)

    with contextlib.ExitStack() as stack:
        for of in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
            stack.enter_context(patch.object(of, "kv_sharing_modes", modes(of)))
        yield
