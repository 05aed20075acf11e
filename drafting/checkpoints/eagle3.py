"""EAGLE-3 and P-EAGLE checkpoints: SafeAILab, SpecForge, Amazon (`midlayer.*` or `layers.0.*`), ModelOpt, speculators.

They differ in where config.json has the settings and in the layer's name. Not here: the head itself
(drafting.heads.eagle3), EAGLE-1 (eagle.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.drafting.checkpoints.config_fields import ConfigFields, read_config
from outrider.drafting.checkpoints.decoder_fields import read_decoder
from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.fill_module import build_on_meta, fill, is_targets, read_d2t
from outrider.drafting.checkpoints.recognise import foreign_algorithm, require_not_quantised
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


@dataclass(frozen=True)
class _Settings:
    """The settings of config.json in its three forms.

    `own` is the top level, `eagle` ModelOpt's block, `decoder` the layers'.
    """

    own: ConfigFields
    eagle: ConfigFields
    decoder: ConfigFields
    is_speculators: bool

    def holder(self, key: str) -> ConfigFields:
        """Returns the block that has a setting which may be in `own` or in `eagle`."""
        return self.own if self.own.get(key) is not None else self.eagle


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
    sources = _sources(table)
    decoder = read_decoder(settings.decoder, table, target, "midlayer" if _has_midlayer(table) else "layers.0")
    shares_embedding = is_targets(table, "embed_tokens.weight", target.embedding, dtype)
    config = _head_config(settings, table, target, decoder, shares_embedding)
    if not config.has_lm_head:
        target.require_plain_lm_head(folder)
    d2t = read_d2t(table, config.draft_vocab_size, decoder.vocab_size)
    given = {} if d2t is None else {"d2t": d2t}
    if config.mask_token_id is not None:
        given["mask_hidden"] = _mask_hidden(table, config, dtype)
    head = build_on_meta(
        table,
        lambda: Eagle3Head(
            config,
            embedding=target.embedding.to(dtype) if shares_embedding else None,
            lm_head=None if config.has_lm_head else target.lm_head.to(dtype),
            d2t=d2t,
            attn_implementation=attn_implementation,
        ),
    )
    ignored = {name for name in table.tensors if _USELESS.fullmatch(name)}
    if shares_embedding:
        ignored.add("embed_tokens.weight")
    return fill(head, table, dtype, sources=sources, given=given, ignored=ignored)


def _read_settings(folder: Path) -> _Settings:
    own = read_config(folder)
    require_not_quantised(folder, own)
    foreign = foreign_algorithm(own)
    if foreign is not None:
        raise CheckpointRefused(folder, f"it is a draft of algorithm {foreign}, which is not supported")
    eagle = own.mapping("eagle_config") or ConfigFields(own.file, {})
    for key, served in _MODELOPT_SETTINGS.items():
        if eagle.flag(key, served) != served:
            raise CheckpointRefused(own.file, f"eagle_config.{key} is {eagle.get(key)}, only {served} is supported")
    is_speculators = own.get("speculators_model_type") is not None
    decoder = own.mapping("transformer_layer_config") if is_speculators else own
    if decoder is None:
        raise CheckpointRefused(own.file, "transformer_layer_config is absent, not an object")
    return _Settings(own, eagle, decoder, is_speculators)


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
    settings: _Settings, table: TensorTable, target: TargetWeights, decoder: DecoderConfig, shares_embedding: bool
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


def _mask_token_id(settings: _Settings, vocab_size: int) -> int:
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


def _feature_layers(settings: _Settings, target: TargetWeights) -> tuple[int, ...]:
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
