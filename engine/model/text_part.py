"""The text part of a multimodal checkpoint: which model class computes it, and which tensors it reads.

A wrapper is served where transformers has its text model; images and audio are refused with each request (gateway).
Not here: the wrappers that transformers itself lists as causal language models (Llama 4, Qwen3.5, Gemma 3), and filling
the model (weights).
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from typing import Any, ClassVar, TypeVar

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_MAPPING

T = TypeVar("T")

# Wrapper types whose text part, for a text, computes what the whole model does: each is compared with transformers'
# whole model in tests/engine/model/test_multimodal.py. Others need not be: PaliGemma lets a prompt attend forwards.
WRAPPERS = frozenset(
    {
        *("aria", "deepseek_vl", "deepseek_vl_hybrid", "dots3_note", "exaone4_5", "glm46v", "glm4v", "glm4v_moe"),
        *("glm_ocr", "glmasr", "glmga", "granite_speech", "granite_speech_plus", "hyperclovax_vision_v2"),
        *("idefics2", "idefics3", "internvl", "kimi_k25", "lfm2_vl", "lighton_ocr", "llava", "llava_next"),
        *("llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"),
        *("minimax_m3_vl", "mistral3", "ovis2", "pp_chart2table", "qwen2_5_vl", "qwen2_audio", "qwen2_vl"),
        *("qwen3_asr", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "step3p7", "video_llama_3", "video_llava"),
        *("vipllava", "voxtral"),
    }
)
# Wrapper that transformers lacks -> one whose config and files say the same of the text model, and less of other parts.
READ_AS = {"intern_s2_preview": "qwen3_5_moe"}
# Where the wrapper's files keep the text model -> where the text model's own class keeps it. The first that occurs.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("model.text_model.", "model."),
)
# Type of a wrapper or text config -> the wrapper, and the class of its text part, for which transformers has no
# renaming of its own: the wrapper's fits, without the rules that move the text model into the wrapper.
_NAMED_BY_WRAPPER = {
    "glm4v_moe": ("glm4v_moe", "Glm4vMoeTextForCausalLM"),
    "minimax_m3_vl": ("minimax_m3_vl", "MiniMaxM3VLForCausalLM"),
    **dict.fromkeys(("step3p5", "step3p7"), ("step3p7", "Step3p7TextForCausalLM")),
}
# Type of a text config -> its text model, which is in none of transformers' tables.
TEXT_MODELS = {"step3p5": "Step3p7TextModel"}
_HEADS = ("lm_head.", "language_model.lm_head.")


def is_wrapper(config: Any) -> bool:
    """Returns whether only the text part of this checkpoint is built."""
    return config.model_type in WRAPPERS


def model_class(config: Any) -> type[Any] | None:
    """Returns the causal language model class of a checkpoint, or of a text part; None: it is not served."""
    classes: Mapping[type[Any], type[Any]] = AutoModelForCausalLM._model_mapping
    if config.model_type in _NAMED_BY_WRAPPER:
        wrapper, name = _NAMED_BY_WRAPPER[config.model_type]
        rules = get_checkpoint_conversion_mapping(wrapper)
        own = [rule for rule in rules if not any("language_model." in target for target in rule.target_patterns)]
        register_checkpoint_conversion_mapping(name, own, overwrite=True)
    if type(config) in classes:
        return classes[type(config)]
    text_config = config.get_text_config(decoder=True)
    if text_config.model_type in TEXT_MODELS:
        return _with_head(getattr(transformers, TEXT_MODELS[text_config.model_type]))
    if not is_wrapper(config) and config.model_type.removesuffix("_text") not in WRAPPERS:
        return None
    text_type = type(text_config)
    if text_type in classes:
        return classes[text_type]
    return _with_head(MODEL_MAPPING[text_type]) if text_type in MODEL_MAPPING else None


def text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns the tensors of the text part under its own class's names, without those of the other parts."""
    for prefix, own in _PREFIXES:
        found = {own + name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
        if found:
            break
    else:
        return dict(tensors)
    heads = {
        "lm_head." + name.removeprefix(start): part
        for name, part in tensors.items()
        for start in _HEADS
        if name.startswith(start)
    }
    return found | heads


def with_tying(config: Any, names: Container[str]) -> Any:
    """Returns a copy of a wrapper's config that says in its text config whether the output head is the embedding.

    It is where wrapper or text config ties them and the files have no head. names: of the text part's tensors.
    """
    config = copy.deepcopy(config)
    own = config.get_text_config(decoder=True)
    is_tied = any(getattr(part, "tie_word_embeddings", False) for part in (config, own))
    own.tie_word_embeddings = is_tied and "lm_head.weight" not in names
    return config


def _with_head(body_class: type[Any]) -> type[Any]:
    """Returns a causal language model: a text model that transformers has without one, and an output head."""
    base = next(part for part in body_class.__mro__[1:] if issubclass(part, PreTrainedModel))

    class TextModelWithHead(base):  # type: ignore[misc, valid-type]
        config_class = body_class.config_class
        base_model_prefix = "model"
        _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
        _supports_attention_backend = body_class._supports_attention_backend

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = body_class(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.lm_head

        def forward(
            self, input_ids: torch.Tensor | None = None, logits_to_keep: int | torch.Tensor = 0, **arguments: Any
        ) -> CausalLMOutput:
            hidden = self.model(input_ids=input_ids, **arguments).last_hidden_state
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            return CausalLMOutput(logits=self.lm_head(hidden[:, kept]))

    TextModelWithHead.__name__ = body_class.__name__.removesuffix("Model") + "ForCausalLM"
    return TextModelWithHead
