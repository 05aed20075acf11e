"""The draft model's objective: KL divergence from the target's distribution, plus a little cross-entropy.

A draft model reads only tokens: at position t it predicts token t+1, so its one depth is the target's logits at t.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.training.errors import SettingError
from outrider.training.export import TOKENIZER_FILES, copy_files, write_model
from outrider.training.frozen_target import FrozenTarget, require_checkpoint
from outrider.training.heads.interface import Batch, DraftScores, Objective, TargetView
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.read_out import read_out_logits
from outrider.training.heads.scoring import DepthLosses, counted_at, shifted_rows

# Tokenizer files in all forms, and the stop ids.
COPIED_FILES = (
    *TOKENIZER_FILES,
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
# weight of the cross-entropy, added to the KL divergence; the demo draft was distilled with it
CROSS_ENTROPY_WEIGHT = 0.1


@torch.no_grad()
def init_from_target(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Initialises the draft's embeddings with the principal components of the target's, at the draft's own scale."""
    embeddings = target.get_input_embeddings().weight.float()
    own = draft.get_input_embeddings().weight
    _, _, components = torch.linalg.svd(embeddings - embeddings.mean(dim=0), full_matrices=False)
    projected = embeddings @ components[: own.shape[1]].T
    own.copy_(projected * (own.std() / projected.std()))


class DraftModelObjective(Objective):
    """Trains a whole causal LM with the target's vocabulary."""

    head: PreTrainedModel

    def __init__(self, model: PreTrainedModel, target_dir: Path) -> None:
        super().__init__()
        self.head, self._target_dir = model, target_dir

    def forward(self, batch: Batch, target: TargetView, noise: torch.Generator) -> tuple[torch.Tensor, DraftScores]:
        counted = counted_at(batch.counts, 1, batch.token_ids.shape[1] - 1)
        hidden = self.head.base_model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        losses = DepthLosses(self, target)
        # The soft cross-entropy is the KL divergence plus the target's entropy, which has no gradient.
        losses.add(
            shifted_rows(hidden, 0, counted),
            lambda rows: read_out_logits(self.head, rows),
            counted,
            0,
            weight=1.0,
            labels=shifted_rows(batch.token_ids, 1, counted),
            label_weight=CROSS_ENTROPY_WEIGHT,
        )
        return losses.result()

    def export(self, out: Path, dtype: torch.dtype, target_name: str) -> None:
        write_model(self.head, out, dtype)
        copy_files(self._target_dir, out, COPIED_FILES)


def build_draft_model(options: HeadOptions, target: FrozenTarget) -> DraftModelObjective:
    """Builds a Llama of `options`' shape, whose tied embeddings start from the target's, or loads `options.init`."""
    if options.init is not None:
        require_checkpoint("--init", options.init)
        try:
            model = AutoModelForCausalLM.from_pretrained(options.init, dtype=torch.float32, use_safetensors=True)
        except (OSError, ValueError) as error:
            raise SettingError(f"--init {options.init} cannot be loaded: {error}") from error
        if model.config.vocab_size != target.vocab_size:
            sizes = f"{model.config.vocab_size} tokens, the target {target.vocab_size}"
            raise SettingError(f"--init {options.init} has {sizes}")
        return DraftModelObjective(model, target.path)
    hidden_size = options.inner_dim or 192
    num_heads = options.num_attention_heads or max(1, hidden_size // 64)
    if hidden_size % num_heads or hidden_size > target.hidden_size:
        limit = f"a multiple of {num_heads} attention heads and at most the target's {target.hidden_size}"
        raise SettingError(f"--inner-dim {hidden_size}: must be {limit}")
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=options.intermediate_size or (8 * hidden_size // 3 + 63) // 64 * 64,
        num_hidden_layers=options.num_layers or 2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=int(target.config.max_position_embeddings),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=target.config.bos_token_id,
        eos_token_id=target.config.eos_token_id,
        pad_token_id=target.config.pad_token_id,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    init_from_target(model, target.model)
    return DraftModelObjective(model, target.path)
