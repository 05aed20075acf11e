"""EAGLE-1 and EAGLE-2 checkpoints (yuhuili/EAGLE-*), which have one format.

Not here: EAGLE-3 (eagle3), the head itself (drafter_service.heads.eagle).
A plain Llama config; `fc`, `layers.*`, and mostly the target's embedding. No norm before the first layer or after the
last one, and no output head.
"""

from __future__ import annotations

from pathlib import Path

import torch

from drafter_service.checkpoints.config_fields import read_config
from drafter_service.checkpoints.decoder_fields import read_decoder
from drafter_service.checkpoints.fill_module import build_on_meta, fill, is_target_embedding
from drafter_service.checkpoints.recognise import require_not_quantised
from drafter_service.checkpoints.target_weights import TargetWeights
from drafter_service.checkpoints.tensor_table import TensorTable
from drafter_service.heads.eagle import EagleConfig, EagleHead
from engine.attention import ATTENTION_NAME


def load_eagle(
    path: str | Path, target: TargetWeights, dtype: torch.dtype, *, attn_implementation: str = ATTENTION_NAME
) -> EagleHead:
    """The head in eval mode. An embedding equal to the target's is shared with it.

    attn_implementation must be registered by the caller (engine.attention.register_attention).
    Raises CheckpointRefused on whatever does not fit together.
    """
    folder = Path(path)
    config = read_config(folder)
    require_not_quantised(folder, config)
    table = TensorTable.read(folder)
    inner = config.mapping("model") if config.get("model_type") == "eagle" else None  # vLLM wraps the Llama config
    decoder = read_decoder(inner or config, table, target, "layers.0")
    config.require_equal("hidden_size", decoder.hidden_size, target.hidden_size, f"the target {target.path}")
    target.require_same_tokenizer(folder)
    has_lm_head = "lm_head.weight" in table
    if not has_lm_head:
        target.require_plain_lm_head(folder)
    ignored = {name for name in table.tensors if name.endswith("rotary_emb.inv_freq")}
    shares_embedding = is_target_embedding(table, target, dtype)
    if shares_embedding:
        ignored.add("embed_tokens.weight")
    head_config = EagleConfig(
        decoder,
        num_target_layers=target.num_layers,
        fc_bias="fc.bias" in table,
        has_embedding=not shares_embedding,
        has_lm_head=has_lm_head,
    )
    head = build_on_meta(
        table,
        lambda: EagleHead(
            head_config,
            embedding=target.embedding.to(dtype) if shares_embedding else None,
            lm_head=None if has_lm_head else target.lm_head.to(dtype),
            attn_implementation=attn_implementation,
        ),
    )
    return fill(head, table, dtype, ignored=ignored)
