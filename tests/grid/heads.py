"""Trained heads for the grid: the demo family's own, and random ones for the random targets, through their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.drafter_service.config import DrafterConfig
from outrider.drafting.checkpoints import export
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.heads.block import BlockConfig, BlockHead
from outrider.drafting.heads.decoder import DecoderConfig
from outrider.drafting.heads.eagle import EagleConfig, EagleHead
from outrider.drafting.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.drafting.heads.medusa import MedusaConfig, MedusaHeads
from outrider.drafting.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from outrider.drafting.methods.heads import build_head_method
from outrider.drafting.methods.interface import DraftMethod
from outrider.engine.model.loaded import LoadedModel

HEADS = ("medusa", "mlp_speculator", "eagle", "eagle3", "dspark", "dflash")
_DEMO = Path(__file__).parents[2] / "models"
_NUM_AHEAD = 4


def head_method(kind: str, target: LoadedModel, dtype: str, folder: Path) -> DraftMethod:
    """The method over a head for this target; random heads are written below `folder`.

    Of the demo family only the heads that ship are trained; the others are random for it too.
    """
    path = _DEMO / f"demo-{kind.replace('_', '-')}"
    if Path(target.path).parent != _DEMO or not path.exists():
        path = folder / kind
        if not path.exists():
            save_random_head(kind, target, path)
    config = DrafterConfig(target_model=target.path, dtype=dtype, device=target.device.type, kv_cache_mb=16)
    return build_head_method(kind, str(path), config, num_threads=torch.get_num_threads())


def save_random_head(kind: str, target: LoadedModel | TargetWeights, path: Path) -> None:
    """In its public layout."""
    torch.manual_seed(HEADS.index(kind))
    hidden_size, vocab_size = target.hidden_size, target.vocab_size
    if kind == "medusa":
        heads = MedusaHeads(MedusaConfig(hidden_size, vocab_size, num_heads=_NUM_AHEAD))
        export.export_medusa(heads, path, target=target.path)
    elif kind == "mlp_speculator":
        config = MlpSpeculatorConfig(vocab_size, hidden_size, n_predict=_NUM_AHEAD, inner_dim=48)
        export.export_mlp_speculator(MlpSpeculator(config), path)
    elif kind in ("dspark", "dflash"):
        _save_random_block(kind, target, path)
    else:
        _save_random_eagle(kind, target, path)


def _decoder(target: LoadedModel | TargetWeights, **changes: Any) -> DecoderConfig:
    return DecoderConfig(
        hidden_size=target.hidden_size,
        intermediate_size=100,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=20,
        vocab_size=target.vocab_size,
        **changes,
    )


def _save_random_block(kind: str, target: LoadedModel | TargetWeights, path: Path) -> None:
    """DSpark causal in the block, with a Markov head; DFlash not, in two layers."""
    is_dspark = kind == "dspark"
    num_layers = 1 if is_dspark else 2
    config = BlockConfig(
        _decoder(target, model_type="qwen3", num_hidden_layers=num_layers),
        feature_layers=(0, target.num_layers - 1),
        block_size=_NUM_AHEAD + (0 if is_dspark else 1),
        mask_token_id=1,
        causal=(is_dspark,) * num_layers,
        predicts_from_anchor=is_dspark,
        markov_rank=16 if is_dspark else 0,
        has_embedding=True,
    )
    shape = (target.vocab_size, target.hidden_size)
    head = BlockHead(config, embedding=torch.randn(shape), lm_head=torch.randn(shape))
    export.export_block(head, path, target=target.path, target_architecture=target.architecture)


def _save_random_eagle(kind: str, target: LoadedModel | TargetWeights, path: Path) -> None:
    decoder = _decoder(target)
    shape = (target.vocab_size, target.hidden_size)
    own: dict[str, Any] = {"embedding": torch.randn(shape), "lm_head": torch.randn(shape)}
    if kind == "eagle":
        eagle_config = EagleConfig(decoder, target.num_layers, has_embedding=True, has_lm_head=True)
        export.export_eagle(EagleHead(eagle_config, **own), path)
    else:
        # A shallow target has fewer layers than the head reads: one is read twice.
        layers = (0, target.num_layers - 1, target.num_layers - 1)
        eagle3_config = Eagle3Config(decoder, feature_layers=layers, has_embedding=True)
        head = Eagle3Head(eagle3_config, **own)
        export.export_eagle3(head, path, target=target.path, target_architecture=target.architecture)
