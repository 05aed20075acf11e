"""Which architectures of the installed transformers are served: a tiny model of each causal language model is loaded,
certified and compared with transformers' eager attention.

    python -m tests.engine.architecture_survey      (writes the table and docs/architectures.md; minutes)
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from docs.generate.architectures_page import PAGE, TABLE, Row, Survey, architectures_page
from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.guards import require_supported_architecture
from outrider.engine.model.load import load_model
from outrider.engine.model.text_part import READ_AS, TEXT_MODELS, WRAPPERS
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.run.runner import ModelRunner
from outrider.shared.checkpoint import architectures
from outrider.shared.checkpoint.architectures import Architectures

VOCAB_SIZE = 101
_MAX_MODEL_LEN = 100
# weights; a config that did not take the small sizes
_MOST_WEIGHTS = 30_000_000
# tokens; shorter than the sequence that is compared
_WINDOW = 7
# relative to the largest logit, fp32; sound models differ by less than 1e-5
_TOLERANCE = 1e-4
# Small odd sizes, by every name that configs have for them.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "lru_width"), 80),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), 100),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_query_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_channels", "global_head_dim", "swa_head_dim", "swa_v_head_dim"), 20),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size"), 36),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 36),
    "shared_intermediate_size": 36,
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 20,
    "index_head_dim": 16,
    "index_n_heads": 8,  # with few, many keys score 0, and transformers' choice of equal ones is its own
    "index_topk": 4,
    "hidden_size_per_layer_input": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "num_kv_shared_layers": 0,
    "attention_chunk_size": _WINDOW,
    "floor_scale": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Latent attention rotates qk_rope_head_dim elements and expands to all heads.
_LATENT: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 4}
# What the sizes above cannot know.
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "head_dim": 20,
        "swa_num_key_value_heads": 4,
        "swa_num_attention_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 20,
    },
    "bailing_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": _WINDOW},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "kimi_linear": {"num_experts_per_token": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 20, "n_groups": 2, "state_size": 20},
    # transformers raises smaller time steps to it, in prompts alone; its initial ones are at the default.
    "nemotron_h": {"time_step_min": 1e-6},
    "stablelm": {"partial_rotary_factor": 0.5},
    "zamba2": {"n_mamba_heads": 8, "time_step_min": 1e-6},
    "zaya": {"num_experts_per_tok": 1},
}


def model_types() -> list[str]:
    """Every causal language model's, but multimodal ones that would be served: their text model has its own."""
    return [name for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if _refusal(name) or not _is_multimodal(name)]


def survey_one(model_type: str) -> Row:
    class_name = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[model_type]].__name__
    outcome, reason = _outcome(model_type)
    return Row(model_type=model_type, class_name=class_name, outcome=outcome, reason=reason)


def by_config_alone() -> Architectures:
    """What the engine says of the default config of each type that is, or has, a causal language model."""
    names = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, *TEXT_MODELS})
    refused = {name: reason for name in names if (reason := _refusal(name)) is not None}
    served = sorted({*(name for name in names if name not in refused), *READ_AS})
    return Architectures(transformers=transformers.__version__, served=served, refused=refused)


def _outcome(model_type: str) -> tuple[str, str]:
    refusal = _refusal(model_type)
    if refusal is not None:
        return "refused", refusal
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            _save(model_type, folder)
        except Exception:  # whatever a config of these sizes runs into
            return "untried", ""
        try:
            loaded = load_model(name, device="cpu", max_model_len=_MAX_MODEL_LEN)
        except ModelRefused as refused:
            return "refused", _shown(refused)
        runner = ModelRunner(loaded, loaded.make_cache(8, 16), loaded.make_states(1))
        _require_same_logits(model_type, folder, runner)
        certificate = certify(loaded, runner)
    return ("exact", "") if certificate.holds else ("inexact", f"differs first: {certificate.failing_operation}")


def _refusal(model_type: str) -> str | None:
    """What the config alone is refused for."""
    config = _default_config(model_type)
    if config is not None:
        try:
            require_supported_architecture(model_type, config)
        except ModelRefused as refused:
            return _shown(refused)
    return None


def _default_config(model_type: str) -> Any:
    """None for gemma4_assistant, whose defaults contradict each other."""
    try:
        return CONFIG_MAPPING[model_type]()
    except StrictDataclassClassValidationError:
        return None


def _shown(refused: ModelRefused) -> str:
    return " ".join(refused.cause.split())


def _is_multimodal(model_type: str) -> bool:
    config = _default_config(model_type)
    return config is not None and config.get_text_config() is not config


def tiny_arguments(config: Any) -> dict[str, Any]:
    """Arguments of a tiny config of this one's class."""
    fields = config.to_dict()
    sizes = _SIZES | (_LATENT if "qk_rope_head_dim" in fields else {})
    arguments = {name: size for name, size in sizes.items() if name in fields}
    if isinstance(fields.get("sliding_window"), int):
        arguments["sliding_window"] = _WINDOW
    for name, value in fields.items():  # one value per layer
        if isinstance(value, list) and len(value) == fields.get("num_hidden_layers") and name not in arguments:
            arguments[name] = [value[0], value[-1]]
    kinds = list(dict.fromkeys(fields.get("layer_types") or ()))
    if kinds:
        arguments["layer_types"] = (2 * kinds)[:2]
    return arguments | _OWN.get(config.model_type, {})


def _save(model_type: str, folder: Path) -> None:
    """A tiny random checkpoint; raises whatever the model's code raises about such sizes."""
    config_class = CONFIG_MAPPING[model_type]
    arguments = tiny_arguments(config_class())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**arguments), dtype=torch.float32)
    if sum(parameter.numel() for parameter in model.parameters()) > _MOST_WEIGHTS:
        raise ValueError(f"{model_type} is not tiny")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim < 2:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)


@torch.inference_mode()
def _require_same_logits(model_type: str, folder: Path, runner: ModelRunner) -> None:
    """Raises ValueError if a served model's logits are not those of transformers' eager attention."""
    token_ids = torch.randint(3, VOCAB_SIZE, (23,), generator=torch.Generator().manual_seed(5)).tolist()
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    expected = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    block_size = runner.cache.block_size
    state = StateRows(None, (), 0, len(token_ids))
    rows = SessionRows(token_ids, 0, [5, 2], len(token_ids), state=state)
    found = runner.forward(build_batch([rows], block_size)).logits
    distance = float((found - expected).abs().max() / expected.abs().max())
    if not distance < _TOLERANCE:
        raise ValueError(f"{model_type} is served with wrong logits: they differ by {distance:.1e} of the largest")


def table_text(survey: Survey) -> str:
    """The survey as JSON with an architecture a line."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in survey["rows"])
    version, multimodal = json.dumps(survey["transformers"]), json.dumps(survey["multimodal"])
    return f'{{\n "transformers": {version},\n "rows": [\n{rows}\n ],\n "multimodal": {multimodal}\n}}\n'


def main() -> None:
    torch.set_num_threads(1)
    architectures.TABLE.write_text(json.dumps(by_config_alone(), indent=1) + "\n", encoding="utf-8")
    rows = []
    for model_type in model_types():
        rows.append(survey_one(model_type))
        print(*rows[-1].values(), flush=True)
    survey = Survey(transformers=transformers.__version__, rows=rows, multimodal=sorted(WRAPPERS))
    TABLE.write_text(table_text(survey), encoding="utf-8")
    PAGE.write_text(architectures_page(survey), encoding="utf-8")


if __name__ == "__main__":
    main()
