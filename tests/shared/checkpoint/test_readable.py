"""Which settings are refused by name before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.shared.checkpoint.quantization import require_readable
from outrider.shared.errors import ConfigError

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_GROUPS = {"group_0": {"targets": ["Linear"], "weights": _W4}}
_COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": _GROUPS}


@pytest.mark.parametrize(
    ("described", "cause"),
    [
        ({"model.layers.0.mlp.up_proj.weight": "W8A8_DYNAMIC", "model.norm.weight": "FLOAT", "version": "1.0.0"}, None),
        ({"model.visual.blocks.0.norm1.bias": "FLOAT", "model.layers.0.mlp.up_proj.weight": "W8A8"}, None),
        ({"model.layers.0.mlp.up_proj.weight": "W4A8_DYNAMIC"}, "weights of kind W4A8_DYNAMIC"),
        ({"model.layers.0.mlp.up_proj.weight": 8}, "weights of kind 8"),
        (
            {"model.layers.3.input_layernorm.bias": "FLOAT"},
            r"a bias beside a norm \(model.layers.3.input_layernorm.bias",
        ),
    ],
)
def test_what_msmodelslim_describes(described: dict[str, Any], cause: str | None, tmp_path: Path) -> None:
    (tmp_path / "quant_model_description.json").write_text(json.dumps(described))
    if cause is not None:
        with pytest.raises(ConfigError, match=cause):
            require_readable(tmp_path)
        return
    found = require_readable(tmp_path)
    assert found is not None
    assert found.method == "ascend"


def write(folder: Path, settings: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        _GPTQ,
        _GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True, "dynamic": {"-:.*gate": {}, "+:.*up": {"bits": 8}}},
        {"quant_method": "awq", "bits": 4, "version": "GEMM"},
        _AUTO_ROUND,
        _AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers"},
        _AUTO_ROUND | {"packing_format": "auto_round", "bits": 5, "extra_config": {"lm_head": {"bits": 16}}},
        _AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "act_bits": 16},
        _AUTO_ROUND | {"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"quant_method": "mxfp4"},
        _COMPRESSED,
    ],
)
def test_these_are_read(tmp_path: Path, settings: dict[str, Any]) -> None:
    found = require_readable(write(tmp_path, settings))
    assert found is not None
    assert found.settings == settings


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (_GPTQ | {"bits": 5}, "bits 5"),
        (_GPTQ | {"dynamic": {"+:.*up": {"bits": 6}}}, "bits 6"),
        (_GPTQ | {"is_marlin_format": True}, "marlin"),
        (_GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (_GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        (_GPTQ | {"dynamic": ["+:.*up"]}, "settings of other types"),
        (_COMPRESSED | {"config_groups": {"g": {"weights": {"strategy": ["group"]}}}}, "settings of other types"),
        (_AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format 'auto_round:llm_compressor'"),
        (_AUTO_ROUND | {"packing_format": "auto_round:fp8_static"}, "packing_format 'auto_round:fp8_static'"),
        (_AUTO_ROUND | {"packing_format": "auto_round:mlx"}, "packing_format 'auto_round:mlx'"),
        (_AUTO_ROUND | {"data_type": "mx_fp"}, "data_type 'mx_fp'"),
        (_AUTO_ROUND | {"act_bits": 8}, "act_bits 8"),
        (_AUTO_ROUND | {"rotation_config": {"hadamard_type": "hadamard"}}, "a rotation_config"),
        (_AUTO_ROUND | {"group_size": 0}, "group_size 0"),
        (_AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 9}}}, "bits 9"),
        (_AUTO_ROUND | {"extra_config": ["lm_head"]}, "settings of other types"),
        (_AUTO_ROUND | {"extra_config": {"lm_head": {"bits": "four"}}}, "bits four"),
        (_AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "bits": 3}, "bits 3 in the layout"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "version 'gemv_fast'"),
        ({"quant_method": "awq", "bits": 8}, "bits 8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        (_COMPRESSED | {"format": "marlin-24"}, "format 'marlin-24'"),
        (_COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (_COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (_COMPRESSED | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups"),
        (_COMPRESSED | {"config_groups": {"g": {"weights": {"strategy": "token"}}}}, "strategy 'token'"),
    ],
)
def test_these_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{settings['quant_method']}, config.json\).*{named}.*not read"):
        require_readable(write(tmp_path, settings))
