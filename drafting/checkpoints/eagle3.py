"""EAGLE-3 and P-EAGLE checkpoints: SafeAILab, SpecForge, Amazon (`midlayer.*` or `layers.0.*`), ModelOpt, speculators.

They differ in where config.json has the settings and in the layer's name. Not here: the head itself
(drafting.heads.eagle3), EAGLE-1 (eagle.py).
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from outrider.drafting.checkpoints.config_fields import ConfigFields
from outrider.drafting.checkpoints.decoder_fields import HeadSettings, read_decoder, read_settings
from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.fill_module import build_and_fill, is_targets
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.decoder import DecoderConfig
from outrider.drafting.heads.eagle3 import Eagle3Config, Eagle3Head, default_feature_layers
from outrider.engine.attention.layer import ATTENTION_NAME

# P-EAGLE's tensor, by which such a head is recognised, and the names of its mask token in several trainers' configs.
_MASK_HIDDEN = "mask_hidden"
_MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
_OLD_FC_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
# Tensors that only trainers use, or that are derived from others.
_USELESS = re.compile(r"t2d|verifier_(norm|lm_head)\.weight|.*rotary_emb\.inv_freq")
# ModelOpt's settings, with the only supported values.
_MODELOPT_SETTINGS = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}


def load_eagle3(
    path: str | Path, target: TargetWeights, dtype: torch.dtype, *, attn_implementation: str = ATTENTION_NAME
) -> Eagle3Head:
    """Loads the head in eval mode. An embedding equal to the target's is shared with it.

    The caller must have registered attn_implementation (engine.attention.layer.register_attention).
    Raises CheckpointRefused for any mismatch.
    """
    folder = Path(path)
    settings = _read_settings(folder)
    table = TensorTable.read(folder)
    target.require_same_tokenizer(folder)
    decoder = read_decoder(settings.decoder, table, target, "midlayer" if _has_midlayer(table) else "layers.0")
    shares_embedding = is_targets(table, "embed_tokens.weight", lambda: target.embedding, dtype)
    config = _head_config(settings, table, target, decoder, shares_embedding)
    return build_and_fill(
        Eagle3Head,
        config,
        table,
        target,
        dtype,
        attn_implementation=attn_implementation,
        sources=_sources(table),
        given={} if config.mask_token_id is None else {_MASK_HIDDEN: _mask_hidden(table, config, dtype)},
        useless=_USELESS,
    )


def _read_settings(folder: Path) -> HeadSettings:
    settings = read_settings(folder, "eagle_config", nested_first=False)
    for key, served in _MODELOPT_SETTINGS.items():
        if settings.nested.flag(key, served) != served:
            found = settings.nested.get(key)
            raise CheckpointRefused(settings.own.file, f"eagle_config.{key} is {found}, only {served} is supported")
    return settings


def _has_midlayer(table: TensorTable) -> bool:
    return any(name.startswith("midlayer.") for name in table.tensors)


def _sources(table: TensorTable) -> dict[str, str]:
    """Maps a name in the head -> the name in the file, where they differ."""
    sources = {
        f"fc_norm.{index}.weight": f"{old}.weight"
        for index, old in enumerate(_OLD_FC_NORMS)
        if f"{old}.weight" in table
    }
    if _has_midlayer(table):
        sources |= {
            name.replace("midlayer.", "layers.0.", 1): name for name in table.tensors if name.startswith("midlayer.")
        }
    return sources


def _head_config(
    settings: HeadSettings, table: TensorTable, target: TargetWeights, decoder: DecoderConfig, shares_embedding: bool
) -> Eagle3Config:
    own = settings.own
    target_hidden_size = own.integer("target_hidden_size", decoder.hidden_size)
    own.require_equal("target_hidden_size", target_hidden_size, target.hidden_size, f"the target {target.path}")
    if shares_embedding and decoder.hidden_size != target.hidden_size:
        sizes = f"hidden_size is {decoder.hidden_size}, the target {target.path} has {target.hidden_size}"
        raise CheckpointRefused(own.file, f"{sizes}, and it has no embed_tokens.weight of its own")
    reads_aux = settings.holder("use_aux_hidden_state").flag("use_aux_hidden_state", True)
    has_lm_head = "lm_head.weight" in table or own.integer("draft_vocab_size", decoder.vocab_size) < decoder.vocab_size
    has_fc_norm = "fc_norm.0.weight" in table or f"{_OLD_FC_NORMS[0]}.weight" in table
    is_parallel = _MASK_HIDDEN in table
    # Without the setting, vLLM assumes true for speculators' EAGLE-3, and every server false for all others.
    is_normed = settings.is_speculators and not is_parallel
    residual = settings.holder("norm_before_residual").flag("norm_before_residual", is_normed)
    with refusing(table.folder, "reading its config"):
        config = Eagle3Config(
            decoder,
            feature_layers=_feature_layers(settings, target) if reads_aux else (target.num_layers,),
            draft_vocab_size=own.integer("draft_vocab_size", decoder.vocab_size),
            target_hidden_size=target_hidden_size,
            norm_before_residual=residual,
            norm_before_fc=settings.holder("norm_before_fc").flag("norm_before_fc", "input_norm.weight" in table),
            fc_norm=settings.holder("fc_norm").flag("fc_norm", has_fc_norm),
            norm_output=settings.holder("norm_output").flag("norm_output"),
            fc_bias="fc.bias" in table,
            has_fc=reads_aux,
            has_embedding=not shares_embedding,
            has_lm_head=has_lm_head,
            mask_token_id=_mask_token_id(settings, decoder.vocab_size) if is_parallel else None,
        )
    return config


def _mask_token_id(settings: HeadSettings, vocab_size: int) -> int:
    for key in _MASK_KEYS:
        found = settings.holder(key).get(key)
        if isinstance(found, str) and found.isdecimal():  # as Amazon's heads have it
            found = int(found)
        if found is not None:
            named = ConfigFields(settings.own.file, {key: found})
            return named.integer(key, minimum=0, maximum=vocab_size - 1)
    raise CheckpointRefused(settings.own.file, f"it has {_MASK_HIDDEN}, but names no mask token ({_MASK_KEYS[0]})")


def _mask_hidden(table: TensorTable, config: Eagle3Config, dtype: torch.dtype) -> torch.Tensor:
    """Reads P-EAGLE's hidden state of a mask, which is stored with further dimensions of 1."""
    shape, width = table.shape(_MASK_HIDDEN), len(config.feature_layers) * config.target_hidden_size
    if math.prod(shape) != width:
        raise CheckpointRefused(table.folder, f"tensor {_MASK_HIDDEN} has shape {list(shape)}, the head reads {width}")
    return table.floats(_MASK_HIDDEN, dtype).flatten()


def _feature_layers(settings: HeadSettings, target: TargetWeights) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    holder = settings.holder(key)
    found = holder.integers(key) or default_feature_layers(target.num_layers)
    for layer in found:
        if not 0 <= layer < target.num_layers:
            cause = f"{key} names hidden state {layer} ({list(found)[:8]}), the target has 0 to {target.num_layers - 1}"
            raise CheckpointRefused(holder.file, cause)
    if list(found) != sorted(found):
        raise CheckpointRefused(holder.file, f"{key} is {list(found)[:8]}, not ascending: servers differ in the order")
    count = settings.own.integer("num_aux_hidden_states", len(found))
    settings.own.require_equal("num_aux_hidden_states", count, len(found), key)
    return found
