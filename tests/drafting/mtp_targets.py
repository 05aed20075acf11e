"""Tiny random targets with an MTP layer in each public layout, written by hand, and the layer's published equations.

The decoder layer inside is one of transformers' own: the last layer of a model that is one layer deeper than the
target. transformers saves it under its names, and everything else of the MTP layer is named here a second time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

HIDDEN, NUM_LAYERS = 32, 2
Tensors = dict[str, torch.Tensor]

_COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_GROUPS = {"n_group": 1, "topk_group": 1}
_LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,  # the least that the CPU kernel takes
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
# Fewer keys than the tests have tokens.
_INDEXER = {"index_topk": 5, "index_n_heads": 8, "index_head_dim": 16}
_LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QWEN_MOE = {"num_experts": 4, "shared_expert_intermediate_size": 16, **_EXPERTS}
# Within the layer's own norms, as published: "model.layers.2" is the layer after the target's two.
_DEEPSEEK = {
    "enorm": "model.layers.2.enorm.weight",
    "hnorm": "model.layers.2.hnorm.weight",
    "fc": "model.layers.2.eh_proj.weight",
    "norm": "model.layers.2.shared_head.norm.weight",
    "embedding": "model.layers.2.embed_tokens.weight",
    "lm_head": "model.layers.2.shared_head.head.weight",
}
_QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "fc": "mtp.fc.weight",
    "norm": "mtp.norm.weight",
}


@dataclass(frozen=True)
class Family:
    """config: of the target. deeper: what the model has besides whose last layer is the MTP layer. names: of the MTP
    layer's other tensors in the file. layer: what the decoder layer's names start with there; {}: the block's number,
    of a layer with several blocks. root: of the other layers' names. vision: the other part of a model with images.
    renamed: parts of the layer -> as the file names them. with_mtp: lists of the file's config, the MTP layer in them.
    """

    model_type: str
    config: Mapping[str, Any]
    names: Mapping[str, str]
    layer: str
    deeper: Mapping[str, Any] = field(default_factory=dict)
    one_plus_weight: bool = False
    count_key: str = "num_nextn_predict_layers"
    num_blocks: int = 1
    root: str = "model"
    embedding: str = "model.embed_tokens.weight"
    vision: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    with_mtp: Mapping[str, Any] = field(default_factory=dict)

    @property
    def whole_type(self) -> str:
        """Of the model with images."""
        return "step3p7" if self.model_type == "step3p5" else self.model_type.removesuffix("_text")


def _qwen(model_type: str, **config: Any) -> Family:
    layers = ["linear_attention", "full_attention"]
    deeper = {"layer_types": [*layers, "full_attention"]}
    count_key = "num_nextn_predict_layers" if model_type == "qwen3_next" else "mtp_num_hidden_layers"
    whole = {**_COMMON, "head_dim": 16, **_LINEAR, "layer_types": layers, **config}
    return Family(model_type, whole, _QWEN, "mtp.layers.0.", deeper, one_plus_weight=True, count_key=count_key)


FAMILIES = {
    "glm4_moe": Family(
        "glm4_moe",
        {**_COMMON, **_EXPERTS, **_GROUPS, "head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1},
        _DEEPSEEK,
        "model.layers.2.",
    ),
    "glm4_moe_lite": Family(
        "glm4_moe_lite",
        {**_COMMON, **_EXPERTS, **_LATENT, "n_routed_experts": 4, "mlp_layer_types": ["dense", "sparse"]},
        _DEEPSEEK,
        "model.layers.2.",
        {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {**_COMMON, **_EXPERTS, **_GROUPS, **_LATENT, "n_routed_experts": 4, "first_k_dense_replace": 1},
        _DEEPSEEK,
        "model.layers.2.",
    ),
    "deepseek_v32": Family(
        "deepseek_v32",
        {
            **_COMMON,
            **_EXPERTS,
            **_GROUPS,
            **_LATENT,
            **_INDEXER,
            "n_routed_experts": 4,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["indexed_attention", "indexed_attention"],
        },
        _DEEPSEEK,
        "model.layers.2.",
        {"mlp_layer_types": ["dense", "sparse", "sparse"], "layer_types": ["indexed_attention"] * 3},
    ),
    "glm_moe_dsa": Family(
        "glm_moe_dsa",
        {
            **_COMMON,
            **_EXPERTS,
            **_GROUPS,
            **_LATENT,
            **_INDEXER,
            "n_routed_experts": 4,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["indexed_attention", "indexed_attention"],
            "indexer_types": ["full", "shared"],
        },
        _DEEPSEEK,
        "model.layers.2.",
        {
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["indexed_attention"] * 3,
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        {
            **_COMMON,
            **_EXPERTS,
            **_GROUPS,
            **{key: value for key, value in _LATENT.items() if key != "q_lora_rank"},
            "head_dim": 16,
            "num_experts": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        {**{key: _DEEPSEEK[key] for key in ("enorm", "hnorm", "fc")}, "norm": "model.layers.2.final_layernorm.weight"},
        "model.layers.2.",
        {
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        embedding="model.word_embeddings.weight",
    ),
    "dots3_note": Family(
        "dots3_note_text",
        {
            **_COMMON,
            **_EXPERTS,
            **_GROUPS,
            **_LATENT,
            **_INDEXER,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "n_routed_experts": 4,
            "shared_experts_intermediate_size": 16,
            "sliding_window": 4,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 10,
            "swa_kv_lora_rank": 24,
            "swa_head_dim": 20,
            "swa_qk_nope_head_dim": 12,
            "swa_v_head_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["indexed_attention", "sliding_attention"],
        },
        {**{key: _DEEPSEEK[key] for key in ("enorm", "hnorm", "fc", "norm")}, "own": "model.mtp.embed_tokens.weight"},
        "model.layers.2.",
        {
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "layer_types": ["indexed_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "glm_ocr": Family(
        "glm_ocr_text",
        {**_COMMON, "head_dim": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
        {kind: name.replace("model.", "model.language_model.", 1) for kind, name in _DEEPSEEK.items()},
        "model.language_model.layers.2.",
        root="model.language_model",
        embedding="model.language_model.embed_tokens.weight",
        vision={"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": HIDDEN},
    ),
    "exaone_moe": Family(
        "exaone_moe",
        {
            **_COMMON,
            **_EXPERTS,
            **_GROUPS,
            "head_dim": 16,
            "num_experts": 4,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "mtp_layer_types": ["sliding_attention"],
        },
        _QWEN,
        "mtp.layers.0.",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
    ),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        {
            **_COMMON,
            **_EXPERTS,
            "num_attention_heads": 4,
            "head_dim": 24,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        {
            "enorm": "model.mtp.layers.0.enorm.weight",
            "hnorm": "model.mtp.layers.0.hnorm.weight",
            "fc": "model.mtp.layers.0.eh_proj.weight",
            "norm": "model.mtp.layers.0.final_layernorm.weight",
        },
        "model.mtp.layers.0.",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
        renamed={"post_attention_layernorm": "pre_mlp_layernorm"},
    ),
    "step3p7": Family(
        "step3p5",
        {
            **_COMMON,
            **_EXPERTS,
            "head_dim": 16,
            "n_routed_experts": 4,
            "share_expert_dim": 16,
            "sliding_window": 4,
            "num_sliding_attention_heads": 4,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        {
            **{key: _DEEPSEEK[key] for key in ("enorm", "hnorm", "fc")},
            "norm": "model.layers.2.transformer.shared_head.norm.weight",
            "lm_head": "model.layers.2.transformer.shared_head.output.weight",
        },
        "model.layers.2.",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
        one_plus_weight=True,
        vision={"width": 32, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14},
        with_mtp={
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
    ),
    "hy_v3": Family(
        "hy_v3",
        {**_COMMON, **_EXPERTS, "head_dim": 16, "num_experts": 4, "mlp_layer_types": ["dense", "sparse"]},
        {**{key: _DEEPSEEK[key] for key in ("enorm", "hnorm", "fc")}, "norm": "model.layers.2.final_layernorm.weight"},
        "model.layers.2.",
        {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        {**_COMMON, "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
        {
            "enorm": "model.mtp_emb_norm.0.weight",
            "hnorm": "model.mtp_hidden_norm.0.weight",
            "fc": "model.mtp_linear_proj.0.weight",
        },
        "model.mtp_block.0.",
        {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            **{key: value for key, value in _COMMON.items() if key != "num_hidden_layers"},
            **_EXPERTS,
            "layers_block_type": ["linear_attention", "full_attention"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "time_step_min": 1e-6,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 16,
            "mtp_layers_block_type": ["full_attention", "moe"],
        },
        {
            "enorm": "mtp.layers.0.enorm.weight",
            "hnorm": "mtp.layers.0.hnorm.weight",
            "fc": "mtp.layers.0.eh_proj.weight",
            "norm": "mtp.layers.1.final_layernorm.weight",
        },
        "mtp.layers.{}.",
        {"layers_block_type": ["linear_attention", "full_attention", "full_attention", "moe"]},
        num_blocks=2,
        root="backbone",
        embedding="backbone.embeddings.weight",
    ),
    "qwen3_next": _qwen("qwen3_next", **_QWEN_MOE, decoder_sparse_step=1),
    "qwen3_5": _qwen("qwen3_5_text"),
    "qwen3_5_moe": _qwen("qwen3_5_moe_text", **_QWEN_MOE),
}


@dataclass(frozen=True)
class MtpTarget:
    """A written folder. tensors: the file's. deeper: transformers' model whose last layer is the MTP layer."""

    family: Family
    folder: Path
    config: dict[str, Any]
    tensors: Tensors
    deeper: Any

    @property
    def mtp_names(self) -> list[str]:
        """The tensors of the MTP layer in the file."""
        starts = tuple(self.family.layer.format(block) for block in range(self.family.num_blocks))
        return sorted(name for name in self.tensors if name.startswith(starts) or name in self.family.names.values())

    def rewritten(self, folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
        """Another folder with these tensors and changes of config.json; None takes a key out."""
        own = self.config["text_config"] if self.family.vision else self.config
        changed = {key: value for key, value in (own | config).items() if value is not None}
        return write(folder, {**self.config, "text_config": changed} if self.family.vision else changed, tensors)

    def equations(self, token_ids: Sequence[int], features: torch.Tensor) -> torch.Tensor:
        """Rows of tokens [T] and features [T, H] of a whole sequence, without a cache -> next features [T, H]."""
        tensors, names = self.tensors, self.family.names
        embedded = tensors[names.get("own", self.family.embedding)][list(token_ids)]
        mixed = torch.cat((self._rms(embedded, names["enorm"]), self._rms(features, names["hnorm"])), dim=1)
        hidden = (mixed @ tensors[names["fc"]].T)[None]
        num_rows = len(token_ids)
        positions = torch.arange(num_rows)[None]
        lowest = torch.finfo(torch.float32).min
        mask = torch.full((num_rows, num_rows), lowest).triu(1)[None, None]
        body = self.deeper.model.language_model if self.family.vision else self.deeper.model
        axes = positions.expand(3, 1, -1) if self.family.model_type == "glm_ocr_text" else positions
        kind = (getattr(body.config, "layer_types", None) or [""])[-1]
        if kind == "sliding_attention":
            mask = mask + torch.full((num_rows, num_rows), lowest).tril(-body.config.sliding_window)
        by_kind = (kind,) if hasattr(getattr(body, "rotary_emb", None), "layer_types") else ()
        rotary = {"position_embeddings": body.rotary_emb(hidden, axes, *by_kind)} if hasattr(body, "rotary_emb") else {}
        with torch.inference_mode():
            for layer in body.layers[-self.family.num_blocks :]:
                output = layer(hidden, attention_mask=mask, position_ids=positions, **rotary)
                hidden = output[0] if isinstance(output, tuple) else output
        return self._rms(hidden[0], names["norm"]) if "norm" in names else hidden[0]

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.tensors["lm_head.weight"].T

    def _rms(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.tensors[name] + (1 if self.family.one_plus_weight else 0)
        config = self.deeper.config.get_text_config()
        eps = config.rms_norm_eps if hasattr(config, "rms_norm_eps") else config.layer_norm_epsilon
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * weight


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


@torch.no_grad()
def save_mtp_target(name: str, folder: Path, *, tokenizer: Path | None = None, **changes: Any) -> MtpTarget:
    """tokenizer: a folder whose tokenizer.json is copied. changes: of the config."""
    family = FAMILIES[name]
    settings = {**family.config, **changes}
    depth = {"num_hidden_layers": NUM_LAYERS + 1} if family.num_blocks == 1 else {}
    deeper = _random_model(family, {**settings, **depth, **family.deeper})
    saved = folder.with_name(f"{folder.name}-deeper")
    deeper.save_pretrained(saved)
    tensors = load_file(saved / "model.safetensors")
    shutil.rmtree(saved)
    for block in range(family.num_blocks):
        last = f"{family.root}.layers.{NUM_LAYERS + block}."
        tensors = {
            family.layer.format(block) + part.removeprefix(last) if part.startswith(last) else part: tensor
            for part, tensor in tensors.items()
        }
        for part, published in family.renamed.items():
            tensors = {
                name.replace(part, published) if name.startswith(family.layer.format(block)) else name: tensor
                for name, tensor in tensors.items()
            }
    tensors |= _others(family, tensors)
    config = {
        **settings,
        **family.with_mtp,
        "model_type": family.model_type,
        **_named(deeper),
        family.count_key: 1,
    }
    if family.vision:
        parts = {"text_config": config, "vision_config": dict(family.vision)}
        config = {"model_type": deeper.config.model_type, **parts, **_named(deeper)}
    write(folder, config, tensors)
    if tokenizer is not None:
        shutil.copy(tokenizer / "tokenizer.json", folder)
    deeper.set_attn_implementation("eager")
    return MtpTarget(family, folder, config, tensors, deeper)


def _named(model: Any) -> dict[str, Any]:
    return {"architectures": [type(model).__name__], "dtype": "float32"}


def _random_model(family: Family, settings: Mapping[str, Any]) -> Any:
    """Every weight is random, norms and the routers' biases too; logits are sharp enough to have no near ties."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.model_type, **settings)
    if family.vision:
        parts = {"text_config": config.to_dict(), "vision_config": dict(family.vision)}
        config = transformers.AutoConfig.for_model(family.whole_type, **parts)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    biases = [buffer for part, buffer in model.named_buffers() if "bias" in part]
    for tensor in (*model.parameters(), *biases):
        drawn = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 1:
            tensor.add_(0.1 * drawn)
        else:
            tensor.copy_(drawn / tensor.shape[-1] ** 0.5)
    model.get_output_embeddings().weight.mul_(3.0)
    return model


def _others(family: Family, tensors: Tensors) -> Tensors:
    """What the MTP layer has besides its decoder layer; embedding and output head are copies, as published."""
    generator = torch.Generator().manual_seed(11)
    lies_at = 0.0 if family.one_plus_weight else 1.0
    found = {}
    for kind, name in family.names.items():
        if kind == "fc":
            found[name] = torch.randn((HIDDEN, 2 * HIDDEN), generator=generator) / (2 * HIDDEN) ** 0.5
        elif kind == "own":  # another embedding
            found[name] = tensors[family.embedding].flip(0)
        elif kind == "embedding":
            found[name] = tensors[family.embedding].clone()
        elif kind == "lm_head":
            found[name] = tensors["lm_head.weight"].clone()
        else:
            found[name] = lies_at + 0.1 * torch.randn(HIDDEN, generator=generator)
    return found
