"""Quantised weights that nothing explains are refused, never taken for plain ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SERVED, save_tiny_model

from outrider.engine.errors import ModelRefused
from outrider.engine.model.load import load_model

_NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny_model(*SERVED["llama"], tmp_path / "llama")


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def test_a_side_file_says_it_where_config_json_does_not(llama: Path) -> None:
    quantization = {"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": None}
    (llama / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    with pytest.raises(ModelRefused, match=r"quantised \(modelopt, hf_quant_config.json\)"):
        load_model(str(llama))


def test_a_side_file_about_the_kv_cache_alone_changes_nothing(llama: Path) -> None:
    quantization = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (llama / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    assert load_model(str(llama)).num_layers == 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32])
def test_codes_behind_a_float_parameter_are_refused(llama: Path, dtype: torch.dtype) -> None:
    codes = torch.randint(0, 100, (80, 100)).to(dtype)
    add_tensors(llama, {f"{_NAME}.weight": codes})
    with pytest.raises(ModelRefused, match=rf"{_NAME}\.weight is stored as .* without a scale"):
        load_model(str(llama))


@pytest.mark.parametrize(
    "ending", ["weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale", "qzeros", "SCB"]
)
def test_scales_that_nothing_reads_are_refused(llama: Path, ending: str) -> None:
    add_tensors(llama, {f"{_NAME}.{ending}": torch.ones(())})
    with pytest.raises(ModelRefused, match=rf"does not explain.*{_NAME}\.{ending}"):
        load_model(str(llama))


def test_integers_that_are_no_parameter_are_left_alone(llama: Path) -> None:
    add_tensors(llama, {"model.layers.0.self_attn.mask": torch.ones(4, dtype=torch.uint8)})
    assert load_model(str(llama)).num_layers == 2
