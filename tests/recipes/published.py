"""Tiny checkpoints in the layouts that the recipes' models are published in, by their Hub ids.

Sizes are tiny and weights random; model type, tensor names, packed formats, MTP layers and draft heads are as the
models' cards and vLLM's loaders have them. The tokenizer is one of bytes with the family's markers, the chat template a
plain one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from outrider.gateway.tool_calls.formats import output_format
from tests.drafting import assistants
from tests.drafting.checkpoints.plain_writer import write_mistral
from tests.drafting.mtp_targets import save_mtp_target
from tests.engine.model.multimodal_models import random_model, save_as_published
from tests.engine.model.quantised.packed_writers import CASES, LINEAR
from tests.gateway.tool_tokenizers import EOS, TEMPLATE, backend_of

VOCAB = 384
CONTEXT = 262_144
Write = Callable[[Path], None]


def write_published(repo: str, folder: Path, reasoning_parser: str, tool_call_parser: str) -> None:
    """Writes the checkpoint, a target with a tokenizer that has its family's markers."""
    folder.mkdir(parents=True, exist_ok=True)
    PUBLISHED[repo](folder)
    if not (folder / "config.json").is_file():
        return
    markers = output_format(reasoning_parser, tool_call_parser).markers()
    special = tuple(dict.fromkeys(text for text in markers if text[0] in "<[" and text[-1] in ">]"))
    backend = backend_of(special)
    backend.save(str(folder / "tokenizer.json"))
    assert backend.get_vocab_size() <= VOCAB, repo
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": TEMPLATE}))
    config = _config(folder)
    (config.get("text_config") or config)["eos_token_id"] = backend.token_to_id(EOS)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)


# --- targets -------------------------------------------------------------------------------------------------------


def mtp_target(family: str, folder: Path, **changes: Any) -> None:
    save_mtp_target(family, folder, vocab_size=VOCAB, **{"max_position_embeddings": CONTEXT} | changes)


def with_images(write: Write, model_type: str, class_name: str, folder: Path) -> None:
    """A text model, as its checkpoints with images have it."""
    write(folder)
    config = _config(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    renamed["model.visual.merger.linear_fc1.weight"] = torch.zeros(8, 8)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    whole = {"architectures": [class_name], "model_type": model_type, "text_config": config, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(whole))


def dots3_note(folder: Path) -> None:
    """Its text model's settings are at the top, and nothing there says that it has an MTP layer."""
    mtp_target("dots3_note", folder)
    other_parts = {
        "vision_config": {"adapter_out_dim": 32},
        "audio_config": {"whisper_adapter_out_dim": 32},
    }
    config = {name: value for name, value in _config(folder).items() if name != "num_nextn_predict_layers"}
    tensors = load_file(folder / "model.safetensors") | {"vision_encoder.post_trunk_norm.weight": torch.zeros(8)}
    _write(folder, config | {"model_type": "dots3_note"} | other_parts, tensors)


def intern_s2_preview(folder: Path) -> None:
    """Qwen3.5's text model and images, and time series."""
    write = partial(mtp_target, "qwen3_5_moe")
    with_images(write, "intern_s2_preview", "InternS2PreviewForConditionalGeneration", folder)
    tensors = load_file(folder / "model.safetensors") | {"model.time_series.norm.weight": torch.zeros(8)}
    config = _config(folder) | {"ts_config": {"model_type": "interns2_preview_time_series"}}
    _write(folder, config | {"auto_map": {"AutoConfig": "configuration_interns2_preview.Config"}}, tensors)


def without_images(folder: Path) -> None:
    """Step-3.5: the text model of Step-3.7, alone."""
    mtp_target("step3p7", folder)
    config = _config(folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: part for name, part in tensors.items() if name.startswith(("model.", "lm_head."))}
    _write(folder, config["text_config"] | {"architectures": ["Step3p5ForCausalLM"]}, kept)


@torch.no_grad()
def wrapper(name: str, folder: Path, **changes: Any) -> None:
    save_as_published(random_model(name, vocab_size=VOCAB, max_position_embeddings=CONTEXT, **changes), folder)


def plain(model_type: str, folder: Path, **settings: Any) -> None:
    torch.manual_seed(2)
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **heads, **ends, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)


def gemma4(folder: Path) -> None:
    pair = assistants.save_pair(folder / "pair", vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    _move(pair.target, folder)


def gemma4_assistant(folder: Path) -> None:
    pair = assistants.save_pair(folder / "pair", vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    _move(pair.assistant, folder)


def _move(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        file.rename(folder / file.name)


# --- packed weights ------------------------------------------------------------------------------------------------


def packed(write: Write, case_name: str, folder: Path) -> None:
    """Another checkpoint whose linears are packed, those of its MTP layer too; stacked experts one by one."""
    write(folder)
    case, generator = CASES[case_name], np.random.default_rng(5)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if _LINEAR.search(name) and not _OTHER_PARTS.search(name)]:
        *experts, outputs, inputs = tensors[name].shape
        if "nvfp4" in case_name and inputs % 16:
            continue
        found = [case.pack(generator, outputs, inputs)[0] for _ in range(experts[0] if experts else 1)]
        parts = {key: torch.stack([each[key] for each in found]) for key in found[0]} if experts else found[0]
        module = name.removesuffix(".weight")
        del tensors[name]
        tensors |= {f"{module}{ending}": tensor for ending, tensor in parts.items()}
        tensors |= {f"{module}{ending}": torch.tensor(value) for ending, value in case.extra.items()}
    config = _config(folder) | {"dtype": "bfloat16"}
    if case.side_file is None:
        config["quantization_config"] = case.settings
    else:
        (folder / case.side_file).write_text(json.dumps(case.settings))
    _write(folder, config, tensors)


# --- draft heads ---------------------------------------------------------------------------------------------------


def _numbers(*shape: int, seed: int) -> torch.Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return 1 + 0.1 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5


def _layer(prefix: str, hidden: int, num_inputs: int, *, norms: bool = False) -> dict[str, torch.Tensor]:
    """A Llama layer with two heads of 16 over one."""
    shapes = {
        "self_attn.q_proj.weight": (32, num_inputs),
        "self_attn.k_proj.weight": (16, num_inputs),
        "self_attn.v_proj.weight": (16, num_inputs),
        "self_attn.o_proj.weight": (hidden, 32),
        "mlp.gate_proj.weight": (40, hidden),
        "mlp.up_proj.weight": (40, hidden),
        "mlp.down_proj.weight": (hidden, 40),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if norms:
        shapes |= {"self_attn.q_norm.weight": (16,), "self_attn.k_norm.weight": (16,)}
    return {f"{prefix}.{name}": _numbers(*shape, seed=place) for place, (name, shape) in enumerate(shapes.items())}


def _decoder(hidden: int, model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{model_type.title()}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    } | changes


def eagle3_speculator(folder: Path, *, hidden: int) -> None:
    """In the speculators format, with a reduced vocabulary."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target", "architectures": ["ForCausalLM"]},
        },
        "transformer_layer_config": _decoder(hidden),
        "draft_vocab_size": 96,
        "target_hidden_size": None,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": None,
    }
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[4 * torch.arange(96)] = True
    tensors = _layer("layers.0", hidden, 2 * hidden) | {
        "layers.0.hidden_norm.weight": _numbers(hidden, seed=31),
        "fc.weight": _numbers(hidden, 3 * hidden, seed=32),
        "norm.weight": _numbers(hidden, seed=33),
        "lm_head.weight": _numbers(96, hidden, seed=34),
        "embed_tokens.weight": _numbers(VOCAB, hidden, seed=35),
        "d2t": 3 * torch.arange(96),
        "t2d": t2d,
    }
    _write(folder, config, tensors)


def eagle3_with_all(folder: Path, *, hidden: int, num_kv_heads: int) -> None:
    """As SpecForge's, with an embedding and an output head of its own, of the whole vocabulary."""
    config = _decoder(hidden, architectures=["LlamaForCausalLMEagle3"], num_key_value_heads=num_kv_heads)
    tensors = _layer("midlayer", hidden, 2 * hidden) | {
        "midlayer.hidden_norm.weight": _numbers(hidden, seed=31),
        "fc.weight": _numbers(hidden, 3 * hidden, seed=32),
        "norm.weight": _numbers(hidden, seed=33),
        "lm_head.weight": _numbers(VOCAB, hidden, seed=34),
        "embed_tokens.weight": _numbers(VOCAB, hidden, seed=35),
    }
    for seed, name in enumerate(("k_proj", "v_proj"), 40):
        tensors[f"midlayer.self_attn.{name}.weight"] = _numbers(16 * num_kv_heads, 2 * hidden, seed=seed)
    _write(folder, config | {"draft_vocab_size": VOCAB}, tensors)


def dflash(folder: Path, *, hidden: int, layers: tuple[int, ...], speculators: bool) -> None:
    """z-lab's layout, or the speculators format."""
    decoder = _decoder(hidden, "qwen3", architectures=["DFlashDraftModel"])
    tensors = _layer("layers.0", hidden, hidden, norms=True) | {
        "fc.weight": _numbers(hidden, len(layers) * hidden, seed=60),
        "hidden_norm.weight": _numbers(hidden, seed=61),
        "norm.weight": _numbers(hidden, seed=62),
    }
    config: dict[str, Any] = decoder | {
        "block_size": 16,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": list(layers)},
    }
    if speculators:
        config = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "speculators_version": "0.5.0",
            "transformer_layer_config": decoder,
            "block_size": 8,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
            "mask_token_id": 5,
            "draft_vocab_size": VOCAB,
            "target_hidden_size": hidden,
            "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}]},
        }
    _write(folder, config, tensors)


def dspark(folder: Path, *, hidden: int, layers: tuple[int, ...]) -> None:
    """The speculators format, with a Markov head."""
    dflash(folder, hidden=hidden, layers=layers, speculators=True)
    rank = 6
    markov = {
        "markov_head.markov_w1.weight": _numbers(VOCAB, rank, seed=70),
        "markov_head.markov_w2.weight": _numbers(VOCAB, rank, seed=71),
        "confidence_head.proj.weight": _numbers(1, hidden + rank, seed=72),
        "confidence_head.proj.bias": _numbers(1, seed=73),
    }
    own = {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "markov_rank": rank}
    _write(folder, _config(folder) | own, load_file(folder / "model.safetensors") | markov)


def eagle3_with_latents(folder: Path, *, hidden: int) -> None:
    """An EAGLE-3 head whose layer has latent attention."""
    config = _decoder(hidden, architectures=["Eagle3DeepseekV2ForCausalLM"], draft_vocab_size=VOCAB) | _LATENT_SIZES
    tensors = _with_latents(_layer("layers.0", hidden, 2 * hidden)) | {
        "fc.weight": _numbers(hidden, 3 * hidden, seed=32),
        "norm.weight": _numbers(hidden, seed=33),
        "lm_head.weight": _numbers(VOCAB, hidden, seed=34),
        "layers.0.hidden_norm.weight": _numbers(hidden, seed=31),
    }
    _write(folder, config, tensors)


_LATENT_SIZES = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def _with_latents(layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer of `_layer` with DeepSeek's attention in place of Llama's."""
    found = {name: part for name, part in layer.items() if ".self_attn." not in name}
    for name, query in ((name, part) for name, part in layer.items() if name.endswith(".q_proj.weight")):
        inputs, hidden = query.shape[1], layer[name.replace(".q_proj.", ".o_proj.")].shape[0]
        shapes = {"q_a_proj": (24, inputs), "q_a_layernorm": (24,), "q_b_proj": (48, 24), "o_proj": (hidden, 32)}
        shapes |= {"kv_a_proj_with_mqa": (24, inputs), "kv_a_layernorm": (16,), "kv_b_proj": (64, 16)}
        for place, (part, shape) in enumerate(shapes.items()):
            found[name.replace(".q_proj.", f".{part}.")] = _numbers(*shape, seed=90 + place)
    return found


def mistral_eagle(folder: Path, *, hidden: int, has_latents: bool = False) -> None:
    sizes = {"dim": hidden, "n_layers": 1, "head_dim": 16, "hidden_dim": 40, "n_heads": 2, "n_kv_heads": 1}
    tensors = _layer("layers.0", hidden, hidden) | {
        "fc.weight": _numbers(hidden, 2 * hidden, seed=20),
        "norm.weight": _numbers(hidden, seed=23),
    }
    rest = {"norm_eps": 1e-5, "vocab_size": VOCAB, "rope_theta": 10000.0, "max_position_embeddings": CONTEXT}
    if has_latents:
        yarn = {"original_max_position_embeddings": 8192, "factor": 128, "apply_scale": False, "beta": 32, "alpha": 1}
        scaling = {"beta": 0.1, "original_max_position_embeddings": 8192}
        sizes |= _LATENT_SIZES | {"yarn": yarn, "llama_4_scaling": scaling}
        tensors = _with_latents(tensors)
    write_mistral(folder, sizes | rest, tensors)


def only_config(folder: Path, **config: Any) -> None:
    """Of a type that is refused by its config.json."""
    _write(folder, config, {"model.embed_tokens.weight": torch.zeros(8, 8)})


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    copies = {name: part.contiguous().clone() for name, part in tensors.items()}
    save_file(copies, folder / "model.safetensors", {"format": "pt"})


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


_LINEAR = re.compile(rf"{LINEAR}|indexer\.(wk|wq_b)\.weight$")
_OTHER_PARTS = re.compile("visual|vision|projector")
_QWEN3_5 = partial(with_images, partial(mtp_target, "qwen3_5"), "qwen3_5", "Qwen3_5ForConditionalGeneration")
_QWEN3_5_MOE = partial(
    with_images, partial(mtp_target, "qwen3_5_moe"), "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"
)
_STEP = partial(mtp_target, "step3p7")
_MINIMAX_M3 = partial(
    wrapper,
    "minimax_m3_vl",
    num_hidden_layers=6,
    layer_types=["full_attention", *["minimax_m3_sparse"] * 5],
    mlp_layer_types=["dense", *["sparse"] * 5],
    index_n_heads=2,
    index_head_dim=20,
    index_block_size=4,
    index_topk_blocks=6,
)
_ERNIE = partial(mtp_target, "ernie4_5_moe")
_NEMOTRON = partial(mtp_target, "nemotron_h")
_LAGUNA = partial(
    plain,
    "laguna",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    sliding_window=64,
)
_GLM_DSA = partial(mtp_target, "glm_moe_dsa")
_DEEPSEEK_V4 = partial(only_config, model_type="deepseek_v4", architectures=["DeepseekV4ForCausalLM"], vocab_size=8)
_FP8 = "fp8-block"
PUBLISHED: dict[str, Write] = {
    "Eco-Tech/Qwen3.8-27B-w8a8": partial(packed, _QWEN3_5, "ascend-w8a8"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": partial(mtp_target, "qwen3_next"),
    "Qwen/Qwen3-VL-235B-A22B-Instruct-FP8": partial(
        packed, partial(wrapper, "qwen3_vl_moe", num_hidden_layers=8), _FP8
    ),
    "RedHatAI/Qwen3-VL-235B-A22B-Instruct-speculator.eagle3": partial(eagle3_speculator, hidden=80),
    "Qwen/Qwen3.5-122B-A10B-FP8": partial(packed, _QWEN3_5_MOE, _FP8),
    "Qwen/Qwen3.5-27B-FP8": partial(packed, _QWEN3_5, _FP8),
    "Qwen/Qwen3.5-397B-A17B-FP8": partial(packed, _QWEN3_5_MOE, _FP8),
    "Qwen/Qwen3.6-35B-A3B": _QWEN3_5_MOE,
    "baidu/ERNIE-4.5-21B-A3B-PT": _ERNIE,
    "baidu/ERNIE-4.5-300B-A47B-PT": _ERNIE,
    "deepseek-ai/DeepSeek-V4-Flash": _DEEPSEEK_V4,
    "deepseek-ai/DeepSeek-V4-Flash-0731": _DEEPSEEK_V4,
    "dots-studio/dots3-note-prev-fp8": partial(packed, dots3_note, _FP8),
    "google/gemma-4-31B-it": partial(with_images, gemma4, "gemma4", "Gemma4ForConditionalGeneration"),
    "google/gemma-4-31B-it-assistant": gemma4_assistant,
    "inclusionAI/Ling-3.0-flash": partial(mtp_target, "bailing_hybrid"),
    "internlm/Intern-S2-Preview": intern_s2_preview,
    "meta-llama/Llama-3.1-8B-Instruct": partial(plain, "llama", num_hidden_layers=8),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": partial(eagle3_speculator, hidden=48),
    "mindlab-research/Macaron-V1-Coding-Venti": _GLM_DSA,
    "mistralai/Mistral-Medium-3.5-128B": partial(wrapper, "mistral3 ministral3"),
    "mistralai/Mistral-Medium-3.5-128B-EAGLE": partial(mistral_eagle, hidden=80),
    "mistralai/Mistral-Small-4-119B-2603": partial(wrapper, "mistral3 mistral4"),
    "mistralai/Mistral-Small-4-119B-2603-eagle": partial(mistral_eagle, hidden=80, has_latents=True),
    "nvidia/Kimi-K2.6-NVFP4": partial(packed, partial(wrapper, "kimi_k25", num_hidden_layers=8), "modelopt-nvfp4"),
    "lightseekorg/kimi-k2.6-eagle3-mla": partial(eagle3_with_latents, hidden=80),
    "nvidia/MiniMax-M3-NVFP4": partial(packed, _MINIMAX_M3, "modelopt-nvfp4"),
    "Inferact/MiniMax-M3-EAGLE3": partial(eagle3_with_all, hidden=80, num_kv_heads=2),
    "Inferact/MiniMax-M3-EAGLE3-GQA": partial(eagle3_with_all, hidden=80, num_kv_heads=1),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": partial(packed, _NEMOTRON, "modelopt-nvfp4"),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": partial(packed, _NEMOTRON, "modelopt-nvfp4"),
    "nvidia/Qwen3.6-27B-NVFP4": partial(packed, _QWEN3_5, "modelopt-nvfp4"),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": partial(packed, _QWEN3_5_MOE, "modelopt-nvfp4"),
    "poolside/Laguna-S-2.1": _LAGUNA,
    "poolside/Laguna-S-2.1-DFlash": partial(dflash, hidden=48, layers=(0, 2), speculators=False),
    "poolside/Laguna-XS-2.1": _LAGUNA,
    "poolside/Laguna-XS-2.1-DFlash": partial(dflash, hidden=48, layers=(0, 2), speculators=False),
    "poolside/Laguna-XS.2": _LAGUNA,
    "poolside/Laguna-XS.2-speculator.dflash": partial(dflash, hidden=48, layers=(0, 2), speculators=True),
    "stepfun-ai/Step-3.5-Flash": without_images,
    "stepfun-ai/Step-3.7-Flash": _STEP,
    "stepfun-ai/Step-3.7-Flash-FP8": partial(packed, _STEP, _FP8),
    "stepfun-ai/Step-3.7-Flash-NVFP4": partial(packed, _STEP, "modelopt-nvfp4"),
    "tencent/Hy3": partial(mtp_target, "hy_v3"),
    "tencent/Hy3-preview": partial(mtp_target, "hy_v3"),
    "zai-org/GLM-4.5-FP8": partial(packed, partial(mtp_target, "glm4_moe"), "ct-fp8"),
    "zai-org/GLM-4.7-FP8": partial(packed, partial(mtp_target, "glm4_moe"), "ct-fp8"),
    "zai-org/GLM-5-FP8": partial(packed, _GLM_DSA, _FP8),
    "zai-org/GLM-5.1-FP8": partial(packed, _GLM_DSA, _FP8),
    "zai-org/GLM-5.2-FP8": partial(packed, partial(_GLM_DSA, max_position_embeddings=1_048_576), _FP8),
    "RedHatAI/GLM-5.2-speculator.dspark": partial(dspark, hidden=32, layers=(0,)),
    "zai-org/GLM-OCR": partial(mtp_target, "glm_ocr"),
}
