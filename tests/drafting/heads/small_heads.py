"""Small heads with random numbers everywhere, for tests of the modules themselves."""

from __future__ import annotations

from typing import Any

import torch

from outrider.drafting.heads.block import BlockConfig, BlockHead
from outrider.drafting.heads.decoder import DecoderConfig
from outrider.drafting.heads.eagle import EagleConfig, EagleHead
from outrider.drafting.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.drafting.heads.medusa import MedusaConfig, MedusaHeads
from outrider.drafting.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig

# Widths that are no multiple of a vector: that is where scalar tails and odd tiles live.
HIDDEN, VOCAB, DRAFT_VOCAB = 36, 101, 29


def decoder_config(**changes: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 50,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 18,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
    }
    return DecoderConfig(**(sizes | changes))


def randomised(module: torch.nn.Module, seed: int = 0) -> Any:
    """The same module in eval mode; every parameter random, those of one dimension around one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5)
    return module.eval()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def eagle_head(*, num_layers: int = 1, attn_implementation: str = "eager", **decoder: Any) -> EagleHead:
    config = EagleConfig(decoder_config(num_hidden_layers=num_layers, **decoder), num_target_layers=6)
    embedding, lm_head = random(VOCAB, HIDDEN, seed=1), random(VOCAB, HIDDEN, seed=2) / 6
    head = EagleHead(config, embedding=embedding, lm_head=lm_head, attn_implementation=attn_implementation)
    return randomised(head, 3)


def eagle3_head(*, num_layers: int = 1, attn_implementation: str = "eager", **settings: Any) -> Eagle3Head:
    model_type = settings.pop("model_type", "llama")
    config = Eagle3Config(
        decoder_config(num_hidden_layers=num_layers, model_type=model_type),
        feature_layers=(1, 3, 4),
        draft_vocab_size=DRAFT_VOCAB,
        **settings,
    )
    d2t = 2 * torch.arange(DRAFT_VOCAB)
    head = Eagle3Head(config, embedding=random(VOCAB, HIDDEN, seed=1), d2t=d2t, attn_implementation=attn_implementation)
    return randomised(head, 4)


def medusa_heads(*, shares_lm_head: bool = False) -> MedusaHeads:
    config = MedusaConfig(HIDDEN, VOCAB, num_heads=3, num_layers=2, shares_lm_head=shares_lm_head)
    return randomised(MedusaHeads(config, lm_head=random(VOCAB, HIDDEN, seed=2) / 6), 5)


def mlp_speculator(*, tie_weights: bool = False) -> MlpSpeculator:
    config = MlpSpeculatorConfig(VOCAB, HIDDEN, 30, n_predict=3, tie_weights=tie_weights, scale_input=True)
    return randomised(MlpSpeculator(config), 6)


def block_head(*, num_layers: int = 1, attn_implementation: str = "eager", **settings: Any) -> BlockHead:
    """DSpark over a reduced vocabulary, unless the settings say otherwise."""
    config = BlockConfig(
        decoder_config(num_hidden_layers=num_layers, model_type="qwen3"),
        **{
            "feature_layers": (1, 3, 4),
            "block_size": 4,
            "mask_token_id": 7,
            "causal": (True,) * num_layers,
            "predicts_from_anchor": True,
            "draft_vocab_size": DRAFT_VOCAB,
            "markov_rank": 6,
        }
        | settings,
    )
    reduced = config.draft_vocab_size < VOCAB
    d2t = 2 * torch.arange(DRAFT_VOCAB) if reduced else None
    lm_head = None if reduced else random(VOCAB, HIDDEN, seed=2) / 6
    embedding = random(VOCAB, HIDDEN, seed=1)
    head = BlockHead(config, embedding=embedding, lm_head=lm_head, d2t=d2t, attn_implementation=attn_implementation)
    return randomised(head, 8)  # type: ignore[no-any-return]
