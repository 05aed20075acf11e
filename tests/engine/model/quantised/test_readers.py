"""One packed weight at a time: against other libraries' own results, and every way in which its parts can be wrong.

compressed_tensors.safetensors was written by compressed-tensors 0.20 (its compressors' `compress`, `decompress`), for
random weights [24, 64]: per case the packed tensors, `expected`, and in the metadata the quantization_config.
auto_round.safetensors likewise by auto-round 0.16.1 (`pack` of the linear that its export takes for a packing_format,
and its output for the unit matrix; for AWQ its `dequantize_gemm`), for random weights [32, 64].
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_writers import CASES, Parts
from safetensors import safe_open
from safetensors.torch import save_file

from outrider.engine.errors import ModelRefused
from outrider.engine.model.quantised.formats import unpacking
from outrider.engine.model.weight_files import stored_tensors
from outrider.shared.checkpoint.quantization import Quantization

_FIXTURES = [Path(__file__).parent / f"{name}.safetensors" for name in ("compressed_tensors", "auto_round")]
_MODULE = "model.layers.0.mlp.up_proj"


def unpacked(folder: Path, settings: dict[str, Any], parts: Parts) -> torch.Tensor:
    save_file({_MODULE + ending: tensor.contiguous() for ending, tensor in parts.items()}, folder / "model.safetensors")
    quantization = Quantization(settings["quant_method"], settings, "config.json")
    readers, plain = unpacking(str(folder), quantization, stored_tensors(folder))
    assert list(readers) == [f"{_MODULE}.weight"]
    assert not plain
    return readers[f"{_MODULE}.weight"]()


def packed(name: str, outputs: int = 24, inputs: int = 64) -> tuple[dict[str, Any], Parts]:
    case = CASES[name]
    return dict(case.settings), case.pack(np.random.default_rng(3), outputs, inputs)[0]


@pytest.mark.parametrize("name", ["fp8-block", "fp8-tensor", "modelopt-fp8-block", "modelopt-nvfp4"])
def test_stacked_experts_are_read_as_single_ones_are(name: str, tmp_path: Path) -> None:
    case, generator = CASES[name], np.random.default_rng(3)
    each = [case.pack(generator, 24, 64) for _ in range(3)]
    stacked = {ending: torch.stack([parts[ending] for parts, _ in each]) for ending in each[0][0]}
    meant = np.stack([weight for _, weight in each])
    found = unpacked(tmp_path, dict(case.settings), stacked)
    np.testing.assert_allclose(found.double().numpy(), meant, rtol=1e-6, atol=0)
    quantization = Quantization(case.settings["quant_method"], case.settings, "config.json")
    reader = unpacking(str(tmp_path), quantization, stored_tensors(tmp_path))[0][f"{_MODULE}.weight"]
    assert reader.codes is None
    assert reader.expert_codes is not None
    np.testing.assert_allclose(reader.expert_codes(2).dequantised().double().numpy(), meant[2], rtol=1e-6, atol=0)


def fixture_cases() -> list[tuple[Path, str]]:
    cases = []
    for fixture in _FIXTURES:
        with safe_open(fixture, framework="pt") as file:
            cases += [(fixture, name) for name in sorted(file.metadata())]
    return cases


def from_fixture(fixture: Path, name: str) -> tuple[dict[str, Any], Parts]:
    with safe_open(fixture, framework="pt") as file:
        settings = json.loads(file.metadata()[name])
        parts = {key.removeprefix(name): file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}.")}  # noqa: SIM118
    return settings, parts


@pytest.mark.parametrize(
    ("fixture", "name"), [pytest.param(*case, id=f"{case[0].stem}-{case[1]}") for case in fixture_cases()]
)
def test_what_a_library_wrote_is_read_as_it_reads_it(tmp_path: Path, fixture: Path, name: str) -> None:
    settings, parts = from_fixture(fixture, name)
    expected = parts.pop(".expected")
    found = unpacked(tmp_path, settings, parts)
    # The library's type is a narrower one: 4-bit floats in bfloat16, AutoRound's weights in float16.
    assert torch.equal(found.to(expected.dtype), expected)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gptq-4", {"quant_method": "auto-round", "packing_format": None}),  # transformers' default
        ("gptq-4", {"packing_format": None, "backend": "auto_round:gptq:exllamav2"}),  # auto-round 0.2 to 0.4
        ("plain-2", {"packing_format": None, "backend": "auto_round:exllamav2"}),
        ("gptq-2", {"bits": 4, "extra_config": {_MODULE: {"bits": 2}, "up_proj": {"bits": 8}}}),
        ("gptq-2", {"bits": 4, "extra_config": {r"layers\.0\..*up": {"bits": 2}, ".*up_proj.*": {"bits": 8}}}),
        ("gptq-2", {"group_size": 128, "extra_config": {"[": {"bits": 8}, _MODULE: {"group_size": 32}}}),
    ],
)
def test_auto_rounds_settings_of_the_layer_and_older_names(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    settings, parts = from_fixture(_FIXTURES[1], name)
    expected = parts.pop(".expected")
    assert torch.equal(unpacked(tmp_path, settings | changes, parts).half(), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra_config": {_MODULE: {"bits": 16}}}, "it is packed, and its config says 16 bits"),
        ({"extra_config": {_MODULE: {"bits": 4}}}, "qzeros has shape"),
        ({"extra_config": {_MODULE: {"group_size": 64}}}, "scales has shape"),
        ({"packing_format": "auto_round:auto_awq"}, "has shape"),
    ],
)
def test_auto_round_settings_that_contradict_the_tensors_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    settings, parts = from_fixture(_FIXTURES[1], "gptq-2")
    del parts[".expected"]
    with pytest.raises(ModelRefused, match=message):
        unpacked(tmp_path, settings | changes, parts)


def without(ending: str) -> Callable[[Parts], Parts]:
    return lambda parts: {key: tensor for key, tensor in parts.items() if key != ending}


def changed(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Parts], Parts]:
    return lambda parts: {**parts, ending: change(parts[ending])}


def set_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


def with_nan_code(codes: torch.Tensor) -> torch.Tensor:
    return set_first(0x7F)(codes.view(torch.uint8)).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("gptq-4-v1", without(".scales"), ".scales is missing beside .qweight, .qzeros"),
        ("gptq-4-v1", changed(".qzeros", lambda zeros: zeros | 15), "a stored zero of 15"),
        ("gptq-4-v1", changed(".qzeros", lambda zeros: zeros[:, :-1]), "qzeros has shape"),
        ("gptq-4-v1", changed(".scales", lambda scales: scales[:1]), "qzeros has shape"),
        ("gptq-4-v1", changed(".scales", set_first(float("nan"))), "not finite"),
        ("gptq-4-v2-act-order", changed(".g_idx", set_first(2)), "g_idx names groups beyond the 2"),
        ("gptq-4-v2-act-order", changed(".g_idx", lambda groups: groups[:-1]), "g_idx has shape"),
        ("awq", without(".qzeros"), ".qzeros is missing"),
        ("awq", changed(".scales", lambda scales: scales[:1]), "scales has shape"),
        ("ct-w4a16", without(".weight_shape"), ".weight_shape is missing"),
        ("ct-w4a16", changed(".weight_packed", lambda words: words[:, :-1]), "weight_packed has shape"),
        ("ct-w4a16", changed(".weight_scale", lambda scale: scale[:, :1]), "scale has shape"),
        ("ct-w4a16-act-order", changed(".weight_g_idx", set_first(2)), "weight_g_idx names groups beyond the 2"),
        ("ct-w8a8", without(".weight_scale"), ".weight_scale is missing"),
        ("ct-nvfp4", changed(".weight_global_scale", set_first(0.0)), "not finite"),
        ("ct-mxfp4", changed(".weight_scale", set_first(255)), "not finite"),
        ("fp8-block", without(".weight"), "stored as nothing, not as F8_E4M3"),
        ("fp8-block", without(".weight_scale_inv"), ".weight_scale is missing"),
        ("fp8-block", changed(".weight_scale_inv", lambda scale: scale[:, :1]), "scale has shape"),
        ("fp8-block", changed(".weight", with_nan_code), "not finite"),
        ("fp8-tensor", changed(".weight", lambda codes: codes.view(torch.uint8)), "stored as U8, not as F8_E4M3"),
        ("bnb-nf4", without(".weight.absmax"), ".weight.absmax is missing"),
        ("bnb-nf4", changed(".weight.absmax", lambda absmax: absmax[:-1]), "absmax covers"),
        ("bnb-nf4", changed(".weight", lambda data: data[:-1]), "weight has shape"),
        ("bnb-int8", changed(".SCB", lambda scale: scale[:-1]), "SCB has shape"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, name: str, damage: Callable[[Parts], Parts], message: str
) -> None:
    settings, parts = packed(name)
    with pytest.raises(ModelRefused, match=rf"{_MODULE}\.weight: .*{message}"):
        unpacked(tmp_path, settings, damage(parts))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq-4-v1", {"bits": 8}, "qzeros has shape"),
        ("gptq-4-v1", {"group_size": 16}, "scales has shape"),
        ("awq", {"group_size": 128}, "scales has shape"),
        ("fp8-block", {"weight_block_size": [16, 16]}, "scale has shape"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    settings, parts = packed(name)
    with pytest.raises(ModelRefused, match=message):
        unpacked(tmp_path, settings | change, parts)


def test_a_module_that_no_config_group_names_is_refused(tmp_path: Path) -> None:
    settings, parts = packed("ct-w4a16")
    settings["config_groups"] = {"group_0": {**settings["config_groups"]["group_0"], "targets": ["re:.*down_proj$"]}}
    with pytest.raises(ModelRefused, match="no config group"):
        unpacked(tmp_path, settings, parts)


def test_the_nearest_target_of_a_config_group_decides(tmp_path: Path) -> None:
    settings, parts = packed("ct-w4a16")
    right = settings["config_groups"]["group_0"]
    wrong = {"targets": ["Linear"], "weights": {**right["weights"], "num_bits": 8}}
    for target in (_MODULE, r"re:.*up_proj$"):
        groups = {"wrong": wrong, "right": {**right, "targets": [target]}}
        unpacked(tmp_path, settings | {"config_groups": groups}, parts)


def test_gptq_settings_of_one_module_go_before_the_general_ones(tmp_path: Path) -> None:
    settings, parts = packed("gptq-4-v1")
    meant = unpacked(tmp_path, settings, parts)
    dynamic = {r"-:.*lm_head": {}, r"+:.*up_proj$": {"bits": 4}}
    assert torch.equal(unpacked(tmp_path, settings | {"bits": 8, "dynamic": dynamic}, parts), meant)


def test_a_config_that_says_packed_over_plain_tensors_is_refused(tmp_path: Path) -> None:
    save_file({f"{_MODULE}.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    quantization = Quantization("fp8", {"quant_method": "fp8"}, "config.json")
    with pytest.raises(ModelRefused, match="none is packed"):
        unpacking(str(tmp_path), quantization, stored_tensors(tmp_path))


@pytest.mark.parametrize("name", ["gptq-4-v1", "awq", "ct-w4a16-zeros", "fp8-block", "bnb-nf4", "ct-mxfp4"])
def test_the_check_itself_sees_a_code_that_is_off_by_one(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    parts, weight = case.pack(np.random.default_rng(3), 24, 64)
    assert np.array_equal(unpacked(tmp_path, case.settings, parts).numpy(), weight.astype(np.float32))
    codes = next(ending for ending in (".qweight", ".weight_packed", ".weight") if ending in parts)
    data = parts[codes].contiguous().view(torch.uint8).clone()
    data.view(-1)[1] ^= 1
    damaged = parts | {codes: data.view(parts[codes].dtype)}
    assert not np.array_equal(unpacked(tmp_path, case.settings, damaged).numpy(), weight.astype(np.float32))
