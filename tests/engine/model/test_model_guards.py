"""What load_model refuses: every case would otherwise load and be silently wrong, or unsafe."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import HYBRIDS, REFUSED, SERVED, save_tiny_model
from triton import knobs

from outrider.engine.attention.layer import ATTENTION_NAME, register_attention
from outrider.engine.attention.ops import resolve_attention_ops
from outrider.engine.errors import BackendUnavailable, ModelRefused
from outrider.engine.model.load import load_model


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny_model(*SERVED["llama"], tmp_path / "llama")


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(config))


def test_reports_progress_and_facts(llama: Path) -> None:
    messages: list[str] = []
    loaded = load_model(str(llama), on_progress=messages.append)
    assert len(messages) == 4
    assert (loaded.architecture, loaded.num_layers, loaded.hidden_size) == ("LlamaForCausalLM", 2, 80)
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (101, 128, (2,))
    assert loaded.bytes_per_block(16) == 2 * 2 * 2 * 20 * 16 * 4
    assert loaded.bytes_per_block(16) * 3 == loaded.make_cache(3, 16).num_bytes


def test_dtype_is_the_checkpoints_unless_told(llama: Path) -> None:
    assert load_model(str(llama)).dtype == torch.float32
    assert load_model(str(llama), dtype="bfloat16").dtype == torch.bfloat16
    edit_config(llama, dtype=None)
    assert load_model(str(llama)).dtype == torch.float32
    with pytest.raises(ModelRefused, match="choose one of auto, float32, float, bfloat16, float16, half"):
        load_model(str(llama), dtype="int8")


def weights_of(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    return dict(load_model(str(path), row_invariant=False, **options).model.named_parameters())


def test_float16_is_kept_to_the_bit_and_computed_in_float32(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float16).save_pretrained(llama)
    stored = load_file(llama / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    loaded = load_model(str(llama))
    assert (loaded.dtype, loaded.row_invariance is not None) == (torch.float32, True)
    assert "kept to the bit, computed in float32" in caplog.text
    for name, weight in weights_of(llama).items():
        assert torch.equal(weight, stored[name].float()), name


def test_float16_as_bfloat16_is_said_with_its_rounding(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_config(llama, dtype="float16")
    assert load_model(str(llama), dtype="bfloat16").dtype == torch.bfloat16
    assert "rounded from 11 significant bits to bfloat16's 8" in caplog.text


@pytest.mark.parametrize("name", ["half", "float16"])
def test_half_rounds_the_weights_and_nothing_else(llama: Path, name: str) -> None:
    stored = load_file(llama / "model.safetensors")
    assert load_model(str(llama), dtype=name).dtype == torch.float32
    for parameter, weight in weights_of(llama, dtype=name).items():
        assert torch.equal(weight, stored[parameter].half().float()), parameter
        assert not torch.equal(weight, stored[parameter]), parameter


def test_weights_beyond_float16_are_refused(llama: Path) -> None:
    file = llama / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.full((101, 80), 65536.0)}, file, {"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lm_head\.weight has weights beyond float16's range"):
        load_model(str(llama), dtype="half")


def test_a_folder_without_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"neither \*\.safetensors nor pytorch_model\*\.bin"):
        load_model(str(llama))


def test_a_depth_that_no_model_has_is_refused_before_transformers_builds_lists_of_it(llama: Path) -> None:
    for changes in ({"num_hidden_layers": 10**7}, {"text_config": {"n_layer": 10**9}}):
        edit_config(llama, **changes)
        with pytest.raises(ModelRefused, match="above 20000"):
            load_model(str(llama))


@pytest.mark.parametrize("num_layers", [0, 10**4])
def test_layers_that_the_files_cannot_have_are_refused_before_they_are_built(llama: Path, num_layers: int) -> None:
    edit_config(llama, num_hidden_layers=num_layers)
    with pytest.raises(ModelRefused, match=f"num_hidden_layers of its config.json is {num_layers}, and its files have"):
        load_model(str(llama))


@pytest.mark.parametrize(
    ("name", "changes", "refusal"),
    [
        ("mamba", {"state_size": 10**9}, "the sizes of its weights are not those of its config.json"),
        ("mamba", {"hidden_act": "gelu"}, "MambaMixer is not computed by our mixer in its place: activation gelu"),
        ("mamba2", {"n_groups": 0}, "division or modulo by zero"),
        ("mamba2", {"chunk_size": 0}, "Mamba2Mixer is not computed by our mixer in its place"),
        ("zamba2", {"num_mem_blocks": 0}, "transformers cannot load it"),
        ("gptj", {"rotary_dim": 3}, "GPTJForCausalLM does not work with a paged attention function"),
        ("gpt_neo", {"num_heads": 0}, "division or modulo by zero"),
        ("gpt_neo", {"window_size": -5}, "sliding_window=-5 must be positive"),
        ("falcon_40b", {"num_kv_heads": 0}, "transformers cannot load it"),
        ("falcon_rw", {"num_attention_heads": 0}, "division or modulo by zero"),
        ("bloom", {"n_head": 0}, "division or modulo by zero"),
        ("mpt", {"n_heads": 0}, "division or modulo by zero"),
        ("mpt", {"n_heads": 10**9}, "1000000000 heads in a width of 80"),
    ],
)
def test_hostile_sizes_of_attention_and_states_are_refused(
    name: str, changes: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(*(SERVED | HYBRIDS)[name], tmp_path)
    edit_config(folder, **changes)
    start = time.process_time()
    with pytest.raises(ModelRefused, match=refusal):
        load_model(str(folder), max_model_len=32)
    assert time.process_time() - start < 5


def test_missing_weights_are_refused(llama: Path) -> None:
    edit_config(llama, num_hidden_layers=3)
    with pytest.raises(ModelRefused, match=r"missing_keys.*model\.layers\.2"):
        load_model(str(llama))


@pytest.mark.parametrize("method", ["aqlm", "hqq", "quanto", "bitnet", "torchao", "vptq", "quark"])
def test_quantised_checkpoints_that_are_not_read_are_refused_by_name(llama: Path, method: str) -> None:
    edit_config(llama, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ModelRefused, match=rf"quantised \({method}, config.json\)") as refused:
        load_model(str(llama))
    assert refused.value.fix is not None


def test_quantisation_without_a_method_is_refused(llama: Path) -> None:
    edit_config(llama, quantization_config={"load_in_8bit": True})
    with pytest.raises(ModelRefused, match=r"quantised \(method not named, config.json\)"):
        load_model(str(llama))


def test_code_is_refused(llama: Path) -> None:
    edit_config(llama, model_type="no_such_model", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(ModelRefused, match="cannot be read"):
        load_model(str(llama))


def test_paths_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="cannot be read"):
        load_model(str(tmp_path))


def test_models_that_are_no_causal_language_models_are_refused(tmp_path: Path) -> None:
    transformers.CLIPConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="is multimodal, and its text part is not served"):
        load_model(str(tmp_path))


def test_max_model_len_is_bounded_by_the_config(llama: Path) -> None:
    assert load_model(str(llama), max_model_len=64).max_model_len == 64
    with pytest.raises(ModelRefused, match="above its max_position_embeddings, 128"):
        load_model(str(llama), max_model_len=129)


def test_longrope_is_served_up_to_its_original_length_only(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 10, "long_factor": [4.0] * 10, "rope_theta": 10000.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32, **factors}
    config_name, arguments = SERVED["phi3"]
    arguments = {**arguments, "rope_parameters": rope, "original_max_position_embeddings": 32}
    path = str(save_tiny_model(config_name, arguments, tmp_path))
    assert load_model(path).max_model_len == 32
    with pytest.raises(ModelRefused, match="longrope"):
        load_model(path, max_model_len=33)


def test_dynamic_rope_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config_name, arguments = SERVED["llama"]
    path = save_tiny_model(config_name, {**arguments, "rope_parameters": rope}, tmp_path)
    with pytest.raises(ModelRefused, match="longest position of the whole batch"):
        load_model(str(path))


def test_windows_that_stay_in_the_mask_are_refused(tmp_path: Path) -> None:
    config_name, arguments = SERVED["phimoe"]
    path = str(save_tiny_model(config_name, {**arguments, "sliding_window": 7}, tmp_path))
    with pytest.raises(ModelRefused, match="window of None, its config says 7"):
        load_model(path)
    assert load_model(path, max_model_len=7).max_model_len == 7


@pytest.mark.parametrize(
    ("name", "class_name", "reason"),
    [
        ("xglm", "XGLMForCausalLM", "0 times in a forward of 2 layers"),
        ("gpt_neox_japanese", "GPTNeoXJapaneseForCausalLM", "0 times in a forward of 2 layers"),
    ],
)
def test_the_probe_finds_what_a_class_promises_and_does_not_do(
    name: str, class_name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(transformers, class_name), "_supports_attention_backend", True)
    path = save_tiny_model(*REFUSED[name], tmp_path)
    with pytest.raises(ModelRefused, match=reason):
        load_model(str(path), max_model_len=32)


def test_a_probe_forward_that_wants_more_than_tokens_is_a_refusal(tmp_path: Path) -> None:
    sizes = {"vocab_size": 101, "hidden_size": 80, "intermediate_size": 100}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "is_decoder": True}
    path = save_tiny_model("XmodConfig", {**sizes, **layers}, tmp_path)
    with pytest.raises(ModelRefused, match="Input language unknown"):
        load_model(str(path))


def test_heads_that_the_kernel_cannot_take_are_refused_at_load(tmp_path: Path) -> None:
    config_name, arguments = SERVED["llama"]
    path = str(save_tiny_model(config_name, {**arguments, "hidden_size": 32}, tmp_path))
    with pytest.raises(ModelRefused, match="cpu attention kernel"):
        load_model(path)
    assert load_model(path, attention_backend="reference").attention_ops.backend == "reference"


def test_backends_and_devices_that_do_not_exist_are_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(BackendUnavailable, match="attention_backend='triton' on cpu: use 'cpu'"):
        load_model(str(llama), device="cpu", attention_backend="triton")
    with pytest.raises(BackendUnavailable, match="choose one of auto, cpu, cuda"):
        load_model(str(llama), device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="this torch sees no CUDA device"):
        load_model(str(llama), device="cuda")
    with pytest.raises(BackendUnavailable, match="choose one of auto, cpu, reference, triton"):
        resolve_attention_ops("flash", torch.device("cpu"))


def test_registering_twice_changes_nothing() -> None:
    register_attention()
    first = transformers.AttentionInterface()[ATTENTION_NAME]
    register_attention()
    assert transformers.AttentionInterface()[ATTENTION_NAME] is first
