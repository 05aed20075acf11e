"""Describes the MTP layer of each family of models, and its tensors' names in a checkpoint.

The layer is layer 0 of a one-layer model of the target's own class, so renaming and merging of experts are
transformers'. Not here: reading them (mtp.py), writing them (export_mtp.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.engine.model.guards import read_config
from outrider.engine.model.text_part import model_class as model_class_of

EMBEDDING, LM_HEAD, NORM = "model.embed_tokens.", "lm_head.", "model.norm."


@dataclass(frozen=True)
class MtpFamily:
    """A family's naming of its MTP layer's tensors.

    names: prefix of a tensor's name in the head -> in the file; {n}: the target's num_hidden_layers, {last}: the number
    of the MTP layer's last block. layer: settings with which a one-layer model is the MTP layer; firsts: settings that
    are the first entry of this list of the target's config, if it has one; blocks: the key of the target's config that
    says of which blocks, where there are several. unused: prefixes of names that the file may have in addition.
    embedding, norm: transformers' names. is_written: export_mtp can write it. All families concatenate embedding and
    feature in this order.
    """

    names: Mapping[str, str]
    layer: Mapping[str, Any] = field(default_factory=dict)
    firsts: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    blocks: str = ""
    embedding: str = EMBEDDING
    norm: str = NORM
    is_written: bool = True


def _after_layers(norm: str) -> dict[str, str]:
    return {
        "embedding_norm.": "model.layers.{n}.enorm.",
        "hidden_norm.": "model.layers.{n}.hnorm.",
        "fc.": "model.layers.{n}.eh_proj.",
        NORM: f"model.layers.{{n}}.{norm}.",
        "model.layers.0.": "model.layers.{n}.",
    }


_COPIES = {EMBEDDING: "model.layers.{n}.embed_tokens.", LM_HEAD: "model.layers.{n}.shared_head.head."}
_DEEPSEEK = _after_layers("shared_head.norm") | _COPIES
_QWEN = {
    "embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "hidden_norm.": "mtp.pre_fc_norm_hidden.",
    "fc.": "mtp.fc.",
    NORM: "mtp.norm.",
    "model.layers.0.": "mtp.layers.0.",
}
_ERNIE = {  # no norm after the layer
    "embedding_norm.": "model.mtp_emb_norm.0.",
    "hidden_norm.": "model.mtp_hidden_norm.0.",
    "fc.": "model.mtp_linear_proj.0.",
    "model.layers.0.": "model.mtp_block.0.",
}
_NEMOTRON = {
    "embedding_norm.": "mtp.layers.0.enorm.",
    "hidden_norm.": "mtp.layers.0.hnorm.",
    "fc.": "mtp.layers.0.eh_proj.",
    "model.norm_f.": "mtp.layers.{last}.final_layernorm.",
    "model.layers.": "mtp.layers.",
}
_MIMO = {
    "embedding_norm.": "model.mtp.layers.0.enorm.",
    "hidden_norm.": "model.mtp.layers.0.hnorm.",
    "fc.": "model.mtp.layers.0.eh_proj.",
    NORM: "model.mtp.layers.0.final_layernorm.",
    "model.layers.0.post_attention_layernorm.": "model.mtp.layers.0.pre_mlp_layernorm.",
    "model.layers.0.": "model.mtp.layers.0.",
}
_STEP = _after_layers("transformer.shared_head.norm") | {LM_HEAD: "model.layers.{n}.transformer.shared_head.output."}
_BLOCKS = frozenset({"full_attention", "moe", "mlp"})
_FULL_ATTENTION = {"layer_types": ["full_attention"]}
_DENSE = {"mlp_layer_types": ["dense"]}
_INDEXED = {"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"]}
# Maps the model_type of the text model's config, like MTP_NAMES.
FAMILIES = {
    # Its own output head is unused, as hy_v3's.
    "bailing_hybrid": MtpFamily(
        _after_layers("final_layernorm"),
        {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]},
        unused=("model.layers.{n}.shared_head.",),
        embedding="model.word_embeddings.",
        is_written=False,  # its target is recurrent
    ),
    "deepseek_v3": MtpFamily(_DEEPSEEK, {"first_k_dense_replace": 0}),
    "deepseek_v32": MtpFamily(_DEEPSEEK, _INDEXED, is_written=False),  # its indexer is not trained
    "dots3_note_text": MtpFamily(
        _after_layers("shared_head.norm") | {EMBEDDING: "model.mtp.embed_tokens."},  # the head's own
        {"layer_types": ["sliding_attention"]} | _DENSE,
        firsts={"layer_types": "mtp_layer_types"},
        is_written=False,  # sliding attention is not trained
    ),
    "ernie4_5_moe": MtpFamily(_ERNIE, {"moe_layer_start_index": 1, "moe_layer_end_index": 1}),  # a dense layer
    "exaone_moe": MtpFamily(
        _QWEN,
        _FULL_ATTENTION | _DENSE,
        firsts={"layer_types": "mtp_layer_types"},
        is_written=False,  # sliding attention is not trained
    ),
    "glm4_moe": MtpFamily(_DEEPSEEK, {"first_k_dense_replace": 0}),
    "glm4_moe_lite": MtpFamily(_DEEPSEEK, {"mlp_layer_types": ["sparse"]}),
    "glm_moe_dsa": MtpFamily(
        _DEEPSEEK,
        _INDEXED | {"indexer_types": ["full"]},
        is_written=False,  # its indexer is not trained
    ),
    "glm_ocr_text": MtpFamily(
        {ours: theirs.replace("model.", "model.language_model.", 1) for ours, theirs in _DEEPSEEK.items()},
        is_written=False,  # its settings are nested
    ),
    # Its own output head is unused: like the model's reference, the target's is used.
    "hy_v3": MtpFamily(
        _after_layers("final_layernorm"), {"mlp_layer_types": ["sparse"]}, unused=("model.layers.{n}.shared_head.",)
    ),
    "mimo_v2_flash": MtpFamily(
        _MIMO,
        {"layer_types": ["sliding_attention"]} | _DENSE,
        is_written=False,  # sliding attention is not trained
    ),
    "nemotron_h": MtpFamily(
        _NEMOTRON,
        blocks="mtp_layers_block_type",
        embedding="model.embeddings.",
        norm="model.norm_f.",
        is_written=False,  # of several blocks
    ),
    "qwen3_5_moe_text": MtpFamily(_QWEN, _FULL_ATTENTION),
    "qwen3_5_text": MtpFamily(_QWEN, _FULL_ATTENTION),
    "qwen3_next": MtpFamily(_QWEN, _FULL_ATTENTION | {"mlp_only_layers": [], "decoder_sparse_step": 1}),
    "step3p5": MtpFamily(
        _STEP,
        {"swiglu_limits": None, "swiglu_limits_shared": None, "num_nextn_predict_layers": 0, "pad_token_id": 0},
        firsts={"layer_types": "mtp_layer_types", "mlp_layer_types": "mtp_mlp_layer_types"},
        is_written=False,  # its settings are nested
    ),
}


class MtpLayout:
    """The first MTP layer in the checkpoint of one target, whether it is there or not.

    config: of the target's text model; layer_config: of the one-layer model. That has one token: embedding and output
    head of the model that is built from it are not used. starts: prefix of a tensor's name in the head -> in the file.
    """

    def __init__(self, folder: Path, table: TensorTable) -> None:
        """Reads the layout. Raises CheckpointRefused. The family of the target must be one of FAMILIES."""
        with refusing(folder, "reading its config"):
            self.config: Any = read_config(str(folder)).get_text_config()
        self.family = FAMILIES[self.config.model_type]
        with refusing(folder, "building its MTP layer"):
            self.layer_config = _one_layer(folder, self.config, self.family)
        numbers = {"n": self.num_layers, "last": self.layer_config.num_hidden_layers - 1}
        self.starts = {ours: theirs.format(**numbers) for ours, theirs in self.family.names.items()}
        # Some Qwen3.5-MoE checkpoints merge experts; a missing layer is written as the target's other layers are.
        names = [name for name in table.tensors if name.endswith(".mlp.experts.down_proj")]
        own = self.file_name("model.layers.0.")
        self._merges_experts = f"{own}mlp.experts.down_proj" in names or (
            bool(names) and not any(name.startswith(own) for name in table.tensors)
        )
        with refusing(folder, "building its MTP layer"), torch.device("meta"):
            self._outline = self.new_model()

    @property
    def num_layers(self) -> int:
        """Returns the number of the target's own layers."""
        return int(self.config.num_hidden_layers)

    @property
    def has_norm(self) -> bool:
        """Returns whether there is a norm after the layer."""
        return self.family.norm in self.starts

    def new_model(self) -> Any:
        """Builds the one-layer model with new weights, on torch's current device."""
        model_class: Any = model_class_of(self.layer_config)
        return model_class(self.layer_config)

    def stored(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns tensors of the one-layer model by their names before transformers renames and merges them."""
        named = dict(tensors)
        if self._merges_experts:
            return named
        written = revert_weight_conversion(self._outline, named)
        return {name.replace("backbone.", "model.", 1): tensor for name, tensor in written.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Maps the name in the head (`stored`) of every tensor that the file must have -> its shape."""
        stored = self.stored(self._outline.state_dict())
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items() if name.startswith("model.")}
        del shapes[f"{self.family.embedding}weight"]
        if not self.has_norm:
            del shapes[f"{self.family.norm}weight"]
        width = self.layer_config.hidden_size
        return shapes | {
            "embedding_norm.weight": (width,),
            "hidden_norm.weight": (width,),
            "fc.weight": (width, 2 * width),
        }

    def file_name(self, name: str) -> str:
        """Returns the name in the file of a tensor of the head (`stored`)."""
        ours = next(start for start in self.starts if name.startswith(start))
        return self.starts[ours] + name.removeprefix(ours)

    def end_names(self) -> dict[str, str]:
        """Maps the head's embedding and output head to their names in the file, for a family that has its own."""
        return {ours: f"{self.starts[ours]}weight" for ours in (EMBEDDING, LM_HEAD) if ours in self.starts}

    def unused_starts(self) -> tuple[str, ...]:
        """Returns prefixes of names that the file may have in addition."""
        return tuple(start.format(n=self.num_layers) for start in self.family.unused)


def _one_layer(folder: Path, config: Any, family: MtpFamily) -> Any:
    """Returns a copy of the target's config whose only layer is the MTP layer, or whose layers are its blocks."""
    edited = copy.deepcopy(config)
    if family.blocks:
        blocks = getattr(config, family.blocks)
        if "full_attention" not in blocks or not _BLOCKS.issuperset(blocks):
            cause = f"{family.blocks} is {blocks}; an MTP layer has attention and, apart from it, no recurrent block"
            raise CheckpointRefused(folder, cause)
        edited.layer_types = list(blocks)
    settings = {"num_hidden_layers": 1, "vocab_size": 1, "pad_token_id": None, "tie_word_embeddings": False}
    firsts = {name: found[:1] for name, key in family.firsts.items() if (found := getattr(config, key, None))}
    for name, value in (settings | dict(family.layer) | firsts).items():
        setattr(edited, name, value)
    of_layers = config.to_dict().get("per_layer_config")
    if of_layers:  # the layer has what the target's layers of its kind have
        alike = (own for layer, own in of_layers.items() if config.layer_types[int(layer)] == edited.layer_types[0])
        own = next(alike, None)
        edited.per_layer_config = None if own is None else {0: own}
    return edited
