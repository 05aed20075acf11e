"""EAGLE-1 and EAGLE-2 checkpoints (yuhuili/EAGLE-*), which share one format.

They have a plain Llama config; `fc`, `layers.*`, and usually the target's embedding; no norm before the first or after
the last layer, which Mistral's heads have, and no output head. Not here: EAGLE-3 (eagle3.py), the head itself
(drafting.heads.eagle), Mistral's own layout (engine/model/folders/mistral_folder.py).
"""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.drafting.checkpoints.config_fields import read_config
from outrider.drafting.checkpoints.decoder_fields import read_decoder
from outrider.drafting.checkpoints.fill_module import build_on_meta, fill, is_targets
from outrider.drafting.checkpoints.recognise import require_not_quantised
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.eagle import EagleConfig, EagleHead
from outrider.drafting.heads.frozen import use_targets
from outrider.engine.attention.layer import ATTENTION_NAME


def load_eagle(
    path: str | Path, target: TargetWeights, dtype: torch.dtype, *, attn_implementation: str = ATTENTION_NAME
) -> EagleHead:
    """Loads the head in eval mode. An embedding equal to the target's is shared with it.

    The caller must have registered attn_implementation (engine.attention.layer.register_attention).
    Raises CheckpointRefused for any mismatch.
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
    shares_embedding = is_targets(table, "embed_tokens.weight", lambda: target.embedding, dtype)
    if shares_embedding:
        ignored.add("embed_tokens.weight")
    head_config = EagleConfig(
        decoder,
        num_target_layers=target.num_layers,
        fc_bias="fc.bias" in table,
        has_embedding=not shares_embedding,
        has_lm_head=has_lm_head,
        has_norms="norm.weight" in table,
    )
    embedding = target.frozen_embedding(dtype) if shares_embedding else None
    lm_head = None if has_lm_head else target.frozen_lm_head(dtype)
    head = build_on_meta(
        table,
        lambda: EagleHead(head_config, embedding=embedding, lm_head=lm_head, attn_implementation=attn_implementation),
    )
    fill(head, table, dtype, ignored=ignored)
    if target.model is not None:
        use_targets(head, target.model)
    return head
