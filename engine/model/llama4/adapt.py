"""Adapts Llama 4's modules to packed batches, by class, each proved at load.

A proof runs a small module of transformers' class, since a whole mixture in fp32 would take many gigabytes. It fails
for a release of transformers that changed the class, and the model is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.engine.attention.layer import ATTENTION_NAME
from outrider.engine.attention.ops import AttentionOps
from outrider.engine.errors import ModelRefused
from outrider.engine.model.llama4.attention import ATTENTION_CLASS, adapt_attention, prove_attention
from outrider.engine.model.llama4.mixture import MIXTURE_CLASS, Mixture, prove_mixture

# Config of the proofs' modules: one layer without rotation.
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["full_attention"],
    "no_rope_layers": [0],
    "moe_layers": [0],
}


def adapt(path: str, model: Any, ops: AttentionOps) -> None:
    """Adapts the modules in place; a model without such modules is unchanged.

    Must run before anything else that replaces modules. Raises ModelRefused if they are not what we know.
    """
    proved: set[type] = set()
    for name, module in list(model.named_modules()):
        kind = type(module)
        if kind.__name__ not in (ATTENTION_CLASS, MIXTURE_CLASS):
            continue
        parent_name, _, child_name = name.rpartition(".")
        layer = model.get_submodule(parent_name)
        config = model.config.get_text_config()
        try:
            if kind not in proved:
                _prove(kind, config, ops)
                proved.add(kind)
            if kind.__name__ == ATTENTION_CLASS:
                adapt_attention(layer, module, config.layer_types[module.layer_idx])
            else:
                setattr(layer, child_name, Mixture(module))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ModelRefused(path, f"{kind.__name__} is not the module that is known here: {error}") from error


@torch.inference_mode()
def _prove(kind: Any, config: Any, ops: AttentionOps) -> None:
    num_experts = 4 + int(config.num_experts_per_tok)
    small = type(config)(**(config.to_dict() | _SMALL | {"num_local_experts": num_experts}))
    small._attn_implementation = ATTENTION_NAME
    is_attention = kind.__name__ == ATTENTION_CLASS
    with torch.device("meta"):  # draws no weights from the process's generator
        module = kind(small, 0) if is_attention else kind(small)
    module.float().to_empty(device="cpu")
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    if is_attention:
        prove_attention(module, ops)
    else:
        prove_mixture(module)
