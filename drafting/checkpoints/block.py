"""Checkpoints of one-pass block heads: z-lab's and JetSpec's DFlash, DeepSpec's and SpecForge's DSpark, speculators'.

    layout       recognised by                                   settings in            hidden layer ids
    z-lab        architecture DFlashDraftModel                   dflash_config, top     output of layer id
    JetSpec      the same, dflash_config.causal_head             dflash_config, top     output of layer id
    SpecForge    dflash_config.projector_type "dspark"           dflash_config, top     output of layer id
    DeepSpec     architecture Qwen3DSparkModel                   top                    output of layer id
    speculators  speculators_model_type "dflash" or "dspark"     top                    transformers' numbering
The output of layer id is hidden state id + 1 in transformers' numbering. Not here: the head itself
(drafting.heads.block), and which folders are read here (recognise.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from outrider.drafting.checkpoints.config_fields import ConfigFields
from outrider.drafting.checkpoints.decoder_fields import HeadSettings, read_decoder, read_settings
from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.fill_module import build_and_fill, is_targets
from outrider.drafting.checkpoints.recognise import block_kind
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.block import MARKOV_KINDS, BlockConfig, BlockHead
from outrider.drafting.heads.decoder import DecoderConfig
from outrider.engine.attention.layer import ATTENTION_NAME

# The base of RoPE where a config names none: Qwen3's, as vLLM takes it for these heads.
_ROPE_THETA = 1e6
# Tensors that only trainers use; a confidence head says how far a draft may be trusted, which is measured here.
_USELESS = re.compile(r"t2d|verifier_(norm|lm_head)\.weight|confidence_head\..*|.*rotary_emb\.inv_freq")
# Settings that change the head's numbers, with the only values that are computed here.
_NEUTRAL = {
    "attention_sink_bias": False,
    "attention_value_scale": None,
    "input_embedding_scale": None,
    "output_multiplier": None,
    "final_logit_softcapping": None,
}
_PROJECTORS = (None, "dflash", "dspark")
# The same setting under the names of several trainers, the first found counts.
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def load_block(
    path: str | Path, target: TargetWeights, dtype: torch.dtype, *, attn_implementation: str = ATTENTION_NAME
) -> BlockHead:
    """Loads the head in eval mode. An embedding or output head equal to the target's is shared with it.

    The caller must have registered attn_implementation (engine.attention.layer.register_attention).
    Raises CheckpointRefused for any mismatch, and for settings that would change the head's numbers.
    """
    folder = Path(path)
    settings = _read_settings(folder)
    table = TensorTable.read(folder)
    target.require_same_tokenizer(folder)
    decoder = read_decoder(settings.decoder, table, target, "layers.0", rope_theta=_ROPE_THETA, may_slide=True)
    if decoder.hidden_size != target.hidden_size:
        sizes = f"hidden_size is {decoder.hidden_size}, the target {target.path} has {target.hidden_size}"
        raise CheckpointRefused(settings.own.file, f"{sizes}: the two must share an embedding")
    shares_embedding = is_targets(table, "embed_tokens.weight", lambda: target.embedding, dtype)
    config = _head_config(settings, table, target, decoder, shares_embedding=shares_embedding, dtype=dtype)
    return build_and_fill(
        BlockHead, config, table, target, dtype, attn_implementation=attn_implementation, useless=_USELESS
    )


def _read_settings(folder: Path) -> HeadSettings:
    settings = read_settings(folder, "dflash_config", nested_first=True)
    own = settings.own
    if block_kind(own) is None:
        raise CheckpointRefused(folder, "it is not a DFlash or DSpark head")
    if (folder / "mask_embedding.pt").exists():
        raise CheckpointRefused(folder, "its mask embedding is a pickle (mask_embedding.pt), which is never loaded")
    for key, neutral in _NEUTRAL.items():
        found = settings.holder(key).get(key)
        if found not in (None, neutral):
            raise CheckpointRefused(own.file, f"{key} is {found!r}, which is not computed here")
    projector = settings.holder("projector_type").get("projector_type")
    if projector not in _PROJECTORS:
        raise CheckpointRefused(own.file, f"projector_type is {str(projector)[:40]!r}, not dflash or dspark")
    return settings


def _head_config(
    settings: HeadSettings,
    table: TensorTable,
    target: TargetWeights,
    decoder: DecoderConfig,
    *,
    shares_embedding: bool,
    dtype: torch.dtype,
) -> BlockConfig:
    own = settings.own
    target_hidden_size = settings.holder("target_hidden_size").integer("target_hidden_size", target.hidden_size)
    own.require_equal("target_hidden_size", target_hidden_size, target.hidden_size, f"the target {target.path}")
    draft_vocab_size = own.integer("draft_vocab_size", decoder.vocab_size)
    shares_lm_head = draft_vocab_size == decoder.vocab_size and is_targets(
        table, "lm_head.weight", lambda: target.lm_head, dtype
    )
    rank = settings.holder("markov_rank").get("markov_rank") or 0
    sliding, window = _windows(settings, decoder.num_hidden_layers)
    with refusing(table.folder, "reading its config"):
        return BlockConfig(
            decoder,
            feature_layers=_feature_layers(settings, decoder, target),
            block_size=settings.holder("block_size").integer("block_size", maximum=256),
            mask_token_id=_mask_token_id(settings, decoder.vocab_size),
            causal=_causal(settings, sliding),
            predicts_from_anchor=_predicts_from_anchor(settings),
            sliding_window=window,
            sliding=sliding,
            draft_vocab_size=draft_vocab_size,
            markov_rank=settings.holder("markov_rank").integer("markov_rank") if rank else 0,
            markov_kind=settings.holder("markov_head_type").text("markov_head_type", MARKOV_KINDS[0]),
            has_embedding=not shares_embedding,
            has_lm_head=not shares_lm_head,
        )


def _feature_layers(settings: HeadSettings, decoder: DecoderConfig, target: TargetWeights) -> tuple[int, ...]:
    """Returns the hidden states that it reads, in transformers' numbering."""
    if settings.is_speculators:
        key, first = "aux_hidden_state_layer_ids", 0
        found = settings.own.integers(key) or (2, target.num_layers // 2, target.num_layers - 3)
    else:
        key, first = "target_layer_ids", 1
        found = settings.holder(key).integers(key, minimum=-1) or _spread_layers(decoder, target)
    layers = tuple(layer + first for layer in found)
    for named, layer in zip(found, layers, strict=True):
        if not 0 <= layer < target.num_layers:
            most = target.num_layers - 1 - first
            raise CheckpointRefused(
                settings.own.file,
                f"{key} names layer {named} ({list(found)[:8]}), of the target's at most {most} can be read",
            )
    return layers


def _spread_layers(decoder: DecoderConfig, target: TargetWeights) -> tuple[int, ...]:
    """Returns z-lab's choice of layers where a config names none: one per layer of the head, evenly spread."""
    count, last = decoder.num_hidden_layers, target.num_layers - 3
    if count == 1:
        return (target.num_layers // 2,)
    return tuple(round(1 + index * (last - 1) / (count - 1)) for index in range(count))


def _mask_token_id(settings: HeadSettings, vocab_size: int) -> int:
    for key in _MASK_KEYS:
        if settings.holder(key).get(key) is not None:
            return settings.holder(key).integer(key, minimum=0, maximum=vocab_size - 1)
    raise CheckpointRefused(settings.own.file, "it names no mask token (mask_token_id)")


def _windows(settings: HeadSettings, num_layers: int) -> tuple[tuple[bool, ...], int | None]:
    """Returns which layers see a window only, and its size."""
    named = settings.decoder.get("layer_types")
    kinds = named if isinstance(named, list) else ["full_attention"] * num_layers
    if len(kinds) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        cause = f"layer_types is {str(named)[:80]}, not full_attention or sliding_attention for {num_layers} layers"
        raise CheckpointRefused(settings.own.file, cause)
    uses_window = settings.holder("use_swa").flag("use_swa")
    sliding = tuple(uses_window or kind == "sliding_attention" for kind in kinds)
    if not any(sliding):
        return sliding, None
    holder = settings.holder("swa_window_size")
    key = "swa_window_size" if holder.get("swa_window_size") is not None else "sliding_window"
    return sliding, (holder if key == "swa_window_size" else settings.decoder).integer(key)


def _causal(settings: HeadSettings, sliding: tuple[bool, ...]) -> tuple[bool, ...]:
    """Returns per layer whether its block rows see only those up to their own; sliding layers do by default."""
    own, nested = settings.own, settings.nested
    if nested.flag("causal_head"):
        return (True,) * len(sliding)
    for holder, key in ((own, "is_causal"), (nested, "causal")):
        if holder.get(key) is not None:
            return (holder.flag(key),) * len(sliding)
    if own.flag("sliding_window_non_causal"):
        return (False,) * len(sliding)
    return sliding


def _predicts_from_anchor(settings: HeadSettings) -> bool:
    key = "sample_from_anchor"
    if settings.holder(key).get(key) is not None:
        return settings.holder(key).flag(key)
    if not settings.is_speculators or block_kind(settings.own) == "dflash":
        return block_kind(settings.own) == "dspark"
    # speculators' reader and vLLM's take different defaults for an absent key: the number of tokens decides.
    proposals = (settings.own.mapping("speculators_config") or settings.own).get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals and isinstance(proposals[0], dict) else {}
    behind = settings.own.integer("block_size", maximum=256) - ConfigFields(settings.own.file, first).integer(
        "speculative_tokens", 1, maximum=256
    )
    if first and behind in (0, 1):
        return behind == 0
    cause = "it does not say whether its first row predicts (sample_from_anchor), nor how many tokens it drafts"
    raise CheckpointRefused(settings.own.file, cause)
