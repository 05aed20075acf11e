"""MLP speculator checkpoints (ibm-ai-platform/*-accelerator).

Not here: the head itself (drafting.heads.mlp_speculator).
"""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.drafting.checkpoints.config_fields import read_config
from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.fill_module import build_on_meta, fill
from outrider.drafting.checkpoints.recognise import require_not_quantised
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig

PREFIX = "speculator."
MAX_NUM_PREDICT = 64


def load_mlp_speculator(path: str | Path, target: TargetWeights, dtype: torch.dtype) -> MlpSpeculator:
    """Loads the speculator in eval mode. Raises CheckpointRefused for any mismatch."""
    folder = Path(path)
    fields = read_config(folder)
    require_not_quantised(folder, fields)
    table = TensorTable.read(folder)
    owner = f"the target {target.path}"
    vocab_size, emb_dim = fields.integer("vocab_size"), fields.integer("emb_dim")
    fields.require_equal("vocab_size", vocab_size, target.vocab_size, owner)
    fields.require_equal("emb_dim", emb_dim, target.hidden_size, f"{owner} (hidden_size)")
    target.require_same_tokenizer(folder)
    with refusing(folder, "reading its config"):
        config = MlpSpeculatorConfig(
            vocab_size=vocab_size,
            emb_dim=emb_dim,
            inner_dim=fields.integer("inner_dim", 0, minimum=0),
            n_predict=fields.integer("n_predict", 3, maximum=MAX_NUM_PREDICT),
            n_candidates=fields.integer("n_candidates", 5),
            top_k_tokens_per_head=fields.integers("top_k_tokens_per_head", minimum=1) or (),
            tie_weights=fields.flag("tie_weights"),
            scale_input=fields.flag("scale_input"),
        )
    head = build_on_meta(table, lambda: MlpSpeculator(config))
    prefix = PREFIX if any(name.startswith(PREFIX) for name in table.tensors) else ""
    sources = {name: prefix + name for name in head.state_dict()}
    copies = _tied_copies(table, prefix, config) if config.tie_weights else {}
    for copy, original in copies.items():
        if original not in table or not torch.equal(table.floats(copy, None), table.floats(original, None)):
            cause = f"tensor {copy} differs from {original}, but tie_weights requires them to be equal"
            raise CheckpointRefused(folder, cause)
    return fill(head, table, dtype, sources=sources, ignored=copies)


def _tied_copies(table: TensorTable, prefix: str, config: MlpSpeculatorConfig) -> dict[str, str]:
    """Maps the repeated tensors of tied heads -> their originals."""
    copies = {}
    for index in range(1, config.n_predict):
        for layer, part in (("emb", "weight"), ("ln", "weight"), ("ln", "bias"), ("head", "weight")):
            copies[f"{prefix}{layer}.{index}.{part}"] = f"{prefix}{layer}.0.{part}"
        if index > 1:
            copies[f"{prefix}proj.{index}.weight"] = f"{prefix}proj.1.weight"
    return {copy: original for copy, original in copies.items() if copy in table}
