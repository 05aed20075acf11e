"""Files of llama.cpp's own converter, served: logits as transformers has them of the model that was converted.

llama_cpp/NAME.gguf was written by convert_hf_to_gguf.py (of xllamacpp 2026.10) from a tiny random model in float16, the
experts of gpt-oss in MXFP4, phi3_long in Q8_0 without rounding. NAME.safetensors has 40 or 60 token_ids and the
logits of transformers 5.23 in float32, and as metadata the model's config.json and, where sentencepiece 0.2.3 made the
tokenizer, texts with its tokens (gemma4: those of the tokenizer.json that was converted). deepseek_v2_older is as the
converter wrote until April 2025: kv_b whole, the heads' widths under the general names, no expert_gating_func and no
expert groups. glm4_moe and qwen3_5 have a layer for multi-token prediction too. The multipliers of falcon_h1 are powers
of 2, which the converter multiplies weights by. Quantised files are made of these by gguf-py.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import CachedSequence, run_step
from requantise import requantised
from safetensors import safe_open
from tokenizers import Tokenizer

from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.coded_weights import RowInvariantCodes, code_kinds
from outrider.engine.model.gguf.folder import model_folder
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.model.row_invariant_modules import RowInvariantLinear
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.run.runner import ModelRunner
from outrider.kernels.linear import cpu_code_panels

_FOLDER = Path(__file__).parent / "llama_cpp"
_NAMES = sorted(file.stem for file in _FOLDER.glob("*.gguf"))
# Whose matrices are quantised, or have widths of no whole blocks.
_NOT_QUANTISABLE = {"gpt_oss", "phi3", "phi3_long", "gemma2", "granite", "olmo2", "qwen2_moe"}
_QUANTISABLE = [name for name in _NAMES if name not in _NOT_QUANTISABLE and not name.startswith("deepseek")]
_TOLERANCE = 1e-5
# Of config.json: what says nothing of the logits, or is said otherwise.
_OTHER_KEYS = {"dtype", "transformers_version", "initializer_range", "use_cache", "eos_token_id", "head_dim"}
_SAID_OTHERWISE = {
    "falcon_h1": {
        "attention_in_multiplier",
        "attention_out_multiplier",
        "embedding_multiplier",
        "key_multiplier",
        "lm_head_multiplier",
        "mlp_multipliers",
        "ssm_in_multiplier",
        "ssm_multipliers",
        "ssm_out_multiplier",
    },
    "gemma3n": {"intermediate_size"},  # layer by layer
    # The converter's number.
    "granite_hybrid": {"max_position_embeddings"},
    "granite_hybrid_dense": {"max_position_embeddings"},
    "hunyuan": {"max_position_embeddings", "rope_parameters"},
    "nemotron_h": {"max_position_embeddings"},
    "nemotron_h_moe": {"max_position_embeddings", "intermediate_size"},
    "olmo3": {"rope_parameters"},  # YaRN's attention_factor is as its paper has it
    "starcoder2": {"sliding_window"},
}
# Of those whose experts, shared experts and recurrent layers differ.
_PACKED = (
    "cohere_norms",
    "falcon_h1",
    "gemma4_moe",
    "glm4",
    "glm4_moe",
    "granite_hybrid",
    "granite_hybrid_dense",
    "granite_moe_shared",
    "lfm2_moe",
    "nemotron_h_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "starcoder2",
)
# Float32 in the file; recurrent layers' projections, which are joined; 8 inputs wide in the tiny models.
_FLOAT32 = {"shared_expert_gate", "proj", "prediction_coefs", "correction_coefs"}
_NEVER_PACKED = {*_FLOAT32, "0", "in_proj_gate", "linear_right", "per_layer_projection"}


def expected(name: str) -> tuple[list[int], torch.Tensor, dict[str, Any]]:
    with safe_open(_FOLDER / f"{name}.safetensors", framework="pt") as file:
        token_ids, logits = file.get_tensor("token_ids").tolist(), file.get_tensor("logits")
        return token_ids, logits, json.loads(file.metadata()["config"])


def runner_of(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, loaded.make_cache(4, 16), loaded.make_states(2))


def logits_of(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    rows = CachedSequence(token_ids, [0, 1, 2, 3]).rows(len(token_ids))
    if runner.loaded.recurrent_shapes:
        rows = replace(rows, state=StateRows(None, (), 0, len(token_ids)))
    return run_step(runner, [rows])[0]


@pytest.mark.parametrize("name", _NAMES)
def test_the_logits_are_those_of_the_converted_model(name: str) -> None:
    token_ids, logits, _ = expected(name)
    loaded = load_model(str(_FOLDER / f"{name}.gguf"), dtype="float32")
    torch.testing.assert_close(logits_of(runner_of(loaded), token_ids), logits, atol=_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", _NAMES)
def test_the_config_says_what_the_models_did(name: str) -> None:
    written = json.loads((Path(model_folder(str(_FOLDER / f"{name}.gguf"))) / "config.json").read_text())
    _, _, config = expected(name)
    for key in (written.keys() & config.keys()) - _OTHER_KEYS - _SAID_OTHERWISE.get(name, set()):
        if isinstance(config[key], float):
            assert written[key] == pytest.approx(config[key], rel=1e-6), key  # float32 in the file
        elif key == "rope_parameters":
            assert written[key] == {part: pytest.approx(value) for part, value in config[key].items()}
        else:
            assert written[key] == config[key], key


@pytest.mark.parametrize("name", ["ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "gemma3n", "gemma4", "phi3"])
def test_texts_are_split_as_the_original_does(name: str) -> None:
    """ernie4_5 has no space before a text, ernie4_5_moe has one."""
    tokenizer = Tokenizer.from_file(str(Path(model_folder(str(_FOLDER / f"{name}.gguf"))) / "tokenizer.json"))
    with safe_open(_FOLDER / f"{name}.safetensors", framework="pt") as file:
        tokenized = json.loads(file.metadata()["tokenized"])
    assert {text: tokenizer.encode(text, add_special_tokens=False).ids for text in tokenized} == tokenized


@pytest.mark.parametrize(
    ("name", "end_of_turn", "others"),
    [("gemma", "<end_of_turn>", [107]), ("gemma2", "<end_of_turn>", []), ("phi3", "<|end|>", [])],
)
def test_the_end_of_a_turn_ends_a_text(name: str, end_of_turn: str, others: list[int]) -> None:
    """others: what Gemma's converter writes whatever the vocabulary."""
    folder = Path(model_folder(str(_FOLDER / f"{name}.gguf")))
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(end_of_turn)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, end, *others]


def changed(folder: Path, name: str, *changes: tuple[bytes, bytes]) -> str:
    """A copy of the file, with bytes of its metadata changed that are there once."""
    content = (_FOLDER / f"{name}.gguf").read_bytes()
    for old, new in changes:
        assert content.count(old) == 1
        assert len(old) == len(new)
        content = content.replace(old, new)
    file = folder / "model.gguf"
    file.write_bytes(content)
    return str(file)


def number(key: str, value: int) -> bytes:
    return key.encode() + struct.pack("<II", 4, value)  # a value of type uint32


def test_gemma_2_27b_scales_by_the_width_of_the_model(tmp_path: Path) -> None:
    layers = "gemma2.block_count"
    file = changed(tmp_path, "gemma2", (number(layers, 4), number(layers, 46)))
    config = json.loads((Path(model_folder(file)) / "config.json").read_text())
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (16, 32 // 4)


@pytest.mark.parametrize(("context", "window"), [(4096, 2047), (8192, None)])
def test_older_files_of_phi_3_do_not_name_the_window(tmp_path: Path, context: int, window: int | None) -> None:
    length = "phi3.context_length"
    longer = (number(length, 128), number(length, context))
    file = changed(tmp_path, "phi3", longer, (b"phi3.attention.sliding_window", b"none.attention.sliding_window"))
    config = json.loads((Path(model_folder(file)) / "config.json").read_text())
    assert config["sliding_window"] == window


def test_a_file_may_have_its_own_attention_factor(tmp_path: Path) -> None:
    by_rule, own = (struct.pack("<If", 6, value) for value in (math.sqrt(1 + math.log(4) / math.log(64)), 1.5))
    file = changed(tmp_path, "phi3_long", (b"rope.scaling.attn_factor" + by_rule, b"rope.scaling.attn_factor" + own))
    config = json.loads((Path(model_folder(file)) / "config.json").read_text())
    assert config["rope_parameters"]["attention_factor"] == 1.5


@pytest.mark.skipif(not cpu_code_panels.supports(torch.bfloat16), reason="no bf16 panels here")
@pytest.mark.parametrize(("name", "codes"), [("gpt_oss", "i4"), ("phi3_long", "i8")])
def test_what_is_quantised_stays_packed(name: str, codes: str) -> None:
    token_ids, logits, _ = expected(name)
    loaded = load_model(str(_FOLDER / f"{name}.gguf"), packed_arithmetic="bf16")
    assert code_kinds(loaded.model) == [codes]
    certificate = certify(loaded, runner_of(loaded))
    assert certificate.holds, certificate.describe()
    errors = (logits_of(runner_of(loaded), token_ids).float() - logits).square().mean(-1).sqrt()
    assert errors.median() < 0.02 * logits.std()  # a row may choose other experts


@pytest.mark.skipif(not cpu_code_panels.supports(torch.bfloat16), reason="no bf16 panels here")
@pytest.mark.parametrize(
    "name", [name if name in _PACKED else pytest.param(name, marks=pytest.mark.storm) for name in _QUANTISABLE]
)
def test_a_quantised_file_stays_packed(tmp_path: Path, name: str) -> None:
    token_ids, logits, _ = expected(name)
    loaded = load_model(
        str(requantised(_FOLDER / f"{name}.gguf", tmp_path / f"{name}.gguf", "Q8_0")), packed_arithmetic="bf16"
    )
    assert code_kinds(loaded.model) == ["i8"]
    linears = [
        (part, module) for part, module in loaded.model.named_modules() if isinstance(module, RowInvariantLinear)
    ]
    plain = {part.rpartition(".")[2] for part, module in linears if not isinstance(module, RowInvariantCodes)}
    assert plain <= _NEVER_PACKED
    runner = runner_of(loaded)
    certificate = certify(loaded, runner)
    assert certificate.holds, certificate.describe()
    errors = (logits_of(runner, token_ids).float() - logits).square().mean(-1).sqrt()
    assert errors.median() < 0.05 * logits.std()  # a row may choose other experts


def gating(function: int) -> bytes:
    return number("deepseek2.expert_gating_func", function)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("deepseek_v3", gating(2), gating(1), "by the softmax, and has expert_weights_norm or exp_probs_b"),
        ("deepseek_v3", gating(2), gating(4), "expert_gating_func is 4"),
        ("deepseek_v3", b"blk.1.attn_k_b", b"blk.1.attn_x_b", r"no tensor blk\.1\.attn_k_b"),
        ("deepseek_v3", b"key_length_mla", b"key_length_mlb", r"has no deepseek2\.attention\.key_length_mla"),
        ("gpt_oss", b"blk.0.ffn_up_exps.weight", b"blk.0.ffn_in_exps.weight", r"no tensor blk\.0\.ffn_up_exps\.weight"),
        ("phi3_long", b"rope_factors_long", b"rope_factors_lung", r"no tensor rope_factors_long\.weight"),
        ("gemma2", b"attn_logit_softcapping", b"attn_logit_softcopping", "attn_logit_softcopping, which is not read"),
        (
            "glm4_moe",
            b"glm4moe.expert_gating_func" + struct.pack("<II", 4, 2),
            b"glm4moe.expert_gating_func" + struct.pack("<II", 4, 1),
            "expert_gating_func is 1",
        ),
        (
            "exaone4_full",
            b"rope_freqs.weight",
            b"blk.0.attn_q.bias",
            r'would be \["model\.layers\.0\.self_attn\.q_proj\.bias"\]',
        ),
        ("gemma4", b"rope_freqs.weight", b"rope_frqqs.weight", r"no tensor rope_freqs\.weight"),
        (
            "olmo3",
            struct.pack("<If", 6, 1.2079441541679836),
            struct.pack("<If", 6, 1.0),
            "yarn_attn_factor is 1.0, not 1.207944",
        ),
        ("granite_moe", b"blk.0.ffn_up_exps", b"blk.0.ffn_in_exps", r"no tensor blk\.0\.ffn_up_exps\.weight"),
        ("falcon_h1", b"\x00output.weight", b"\x00outpet.weight", r"no output\.weight.*serve the checkpoint"),
        ("nemotron_h_moe", b"blk.0.ssm_in", b"blk.0.ssm_on", r"no tensor blk\.0\.ssm_in\.weight or blk\.0\.attn_q"),
        ("lfm2", b"lfm2.shortconv.l_cache", b"lfm2.shortconv.x_cache", r"has no lfm2\.shortconv\.l_cache"),
        ("olmo2", b"olmo2.rope.freq_base", b"olmo2.rope.freq_bass", r"olmo2\.rope\.freq_bass, which is not read"),
    ],
)
def test_files_that_say_something_else_are_refused(
    tmp_path: Path, name: str, old: bytes, new: bytes, message: str
) -> None:
    file = changed(tmp_path, name, (old, new))
    with pytest.raises(ModelRefused, match=message):
        load_model(file, dtype="float32")
