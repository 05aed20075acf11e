"""Tiny checkpoints in every packed format, written from the formats' descriptions: bit by bit, with numpy alone.

A case packs random codes and scales for one weight [N, K] and says what they mean, in float64. `write_model` packs
every linear of a tiny model so, and writes the same model with the plain weights.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Parts = dict[str, torch.Tensor]
# (generator, N, K) -> (ending of the name -> tensor, the weight [N, K])
Pack = Callable[[np.random.Generator, int, int], tuple[Parts, NDArray[np.float64]]]

LINEAR = r"((q|k|v|o|gate|up|down|out)_proj|in_proj_qkvz?|experts\.\d+\.w[123])\.weight$"
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP = 32


@dataclass(frozen=True)
class Case:
    pack: Pack
    settings: dict[str, Any]
    # Relative; 0: every operation on the way is exact in float32, or rounds once.
    tolerance: float = 0.0
    side_file: str | None = None  # the settings are there, and config.json says nothing
    extra: dict[str, float] = field(default_factory=dict)  # endings beside `.weight` that must be ignored


def write_model(plain: Path, case: Case, packed: Path, meant: Path, linear: str = LINEAR) -> None:
    """plain: a tiny float32 checkpoint in one file. linear: the names of the weights to pack."""
    generator = np.random.default_rng(5)
    tensors = load_file(plain / "model.safetensors")
    as_meant = dict(tensors)
    for name in [name for name in tensors if re.search(linear, name)]:
        outputs, inputs = tensors.pop(name).shape
        parts, weight = case.pack(generator, outputs, inputs)
        module = name.removesuffix(".weight")
        tensors |= {module + ending: tensor for ending, tensor in parts.items()}
        tensors |= {module + ending: torch.tensor(value) for ending, value in case.extra.items()}
        as_meant[name] = torch.from_numpy(weight.astype(np.float32))
    _write(plain, meant, as_meant, None)
    _write(plain, packed, tensors, case)


def write_gpt_oss(plain: Path, packed: Path, meant: Path) -> None:
    """Its experts alone are packed, all of a layer in one tensor, and the model has them as [E, K, N]."""
    generator = np.random.default_rng(5)
    tensors = load_file(plain / "model.safetensors")
    as_meant = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        found = [mxfp4(generator, outputs, inputs) for _ in range(experts)]
        blocks = torch.stack([parts[".weight_packed"].reshape(outputs, inputs // 32, 16) for parts, _ in found])
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": torch.stack([p[".weight_scale"] for p, _ in found])}
        as_meant[name] = torch.from_numpy(np.stack([weight.T for _, weight in found]).astype(np.float32))
    _write(plain, meant, as_meant, None)
    _write(plain, packed, tensors, Case(mxfp4, {"quant_method": "mxfp4"}))


def _write(plain: Path, folder: Path, tensors: Parts, case: Case | None) -> None:
    shutil.copytree(plain, folder)
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, folder / "model.safetensors", {"format": "pt"})
    if case is None:
        return
    if case.side_file is not None:
        (folder / case.side_file).write_text(json.dumps(case.settings))
        return
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": case.settings}))


# ---- numbers and bits ----


def pack_words(codes: NDArray[np.integer[Any]], num_bits: int) -> NDArray[np.int32]:
    """Unsigned codes [R, C] -> int32 [R, ceil(C * bits / 32)], the first code in the lowest bits."""
    num_words = -(-codes.shape[1] * num_bits // 32)
    rows = [sum(int(code) << (num_bits * place) for place, code in enumerate(row)) for row in codes]
    return np.array([np.frombuffer(row.to_bytes(4 * num_words, "little"), "<i4") for row in rows], np.int32)


def float16s(generator: np.random.Generator, *shape: int) -> NDArray[np.float64]:
    """Scales that float16 holds: positive, small."""
    return generator.uniform(0.005, 0.02, shape).astype(np.float16).astype(np.float64)


def over_groups(values: NDArray[np.float64], inputs: int, group: int = GROUP) -> NDArray[np.float64]:
    return np.repeat(values, group, axis=-1)[..., :inputs]


def _tensor(values: NDArray[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if dtype is None else tensor.to(dtype)


def _e4m3(generator: np.random.Generator, *shape: int) -> tuple[torch.Tensor, NDArray[np.float64]]:
    """Codes without NaN (0x7f, 0xff) and what they are: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    codes = generator.integers(0, 256, shape, dtype=np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, 0x38, codes).astype(np.uint8)
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(int)
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), np.where(codes & 128, -size, size)


# ---- the formats ----


def gptq(num_bits: int, *, first_version: bool, act_order: bool = False) -> Pack:
    def pack(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
        groups = -(-inputs // GROUP)
        codes = generator.integers(0, 2**num_bits, (outputs, inputs))
        zeros = generator.integers(1, 2**num_bits - 1, (groups, outputs))
        scales = float16s(generator, groups, outputs)
        g_idx = np.arange(inputs) // GROUP
        if act_order:
            generator.shuffle(g_idx)
        parts = {
            ".qweight": _tensor(pack_words(codes, num_bits).T),
            ".qzeros": _tensor(pack_words(zeros - first_version, num_bits)),
            ".scales": _tensor(scales, torch.float16),
        }
        if act_order:
            parts[".g_idx"] = _tensor(g_idx.astype(np.int32))
        return parts, (codes - zeros.T[:, g_idx]) * scales.T[:, g_idx]

    return pack


def auto_round(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
    """Three bits; eight for the MLP's second linear, the widest in the tiny models."""
    return gptq(8 if inputs > 64 else 3, first_version=False)(generator, outputs, inputs)


def awq(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
    groups = -(-inputs // GROUP)
    codes, zeros = generator.integers(0, 16, (inputs, outputs)), generator.integers(0, 16, (groups, outputs))
    scales = float16s(generator, groups, outputs)

    def shuffled(values: NDArray[Any]) -> NDArray[Any]:
        return values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape)

    parts = {
        ".qweight": _tensor(pack_words(shuffled(codes), 4)),
        ".qzeros": _tensor(pack_words(shuffled(zeros), 4)),
        ".scales": _tensor(scales, torch.float16),
    }
    return parts, (codes.T - over_groups(zeros.T.astype(float), inputs)) * over_groups(scales.T, inputs)


def integers(num_bits: int, *, per_group: bool, zeros: bool = False, act_order: bool = False) -> Pack:
    """compressed-tensors' pack-quantized."""

    def pack(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
        groups = -(-inputs // GROUP) if per_group else 1
        codes, offset = generator.integers(0, 2**num_bits, (outputs, inputs)), 2 ** (num_bits - 1)
        scales = float16s(generator, outputs, groups)
        parts = {
            ".weight_packed": _tensor(pack_words(codes, num_bits)),
            ".weight_scale": _tensor(scales, torch.float16),
            ".weight_shape": torch.tensor([outputs, inputs]),
        }
        zero = np.full((outputs, groups), offset)
        if zeros:
            zero = generator.integers(0, 2**num_bits, (outputs, groups))
            parts[".weight_zero_point"] = _tensor(pack_words(zero.T, num_bits).T)
        group_of = np.arange(inputs) // GROUP if per_group else np.zeros(inputs, int)
        if act_order:
            generator.shuffle(group_of)
            parts[".weight_g_idx"] = _tensor(group_of.astype(np.int32))
        return parts, (codes - zero[:, group_of]) * scales[:, group_of]

    return pack


def int8(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
    codes, scales = generator.integers(-128, 128, (outputs, inputs)), float16s(generator, outputs, 1) / 8
    return {".weight": _tensor(codes, torch.int8), ".weight_scale": _tensor(scales, torch.bfloat16)}, codes * (
        _tensor(scales, torch.bfloat16).double().numpy()
    )


def ascend(kind: str) -> Pack:
    """kind: "W8A8" with its deq_scale as a float32 or as the "bits" of one, or "W8A8_DYNAMIC"."""

    def pack(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
        codes, scales = generator.integers(-128, 128, (outputs, inputs)), float16s(generator, outputs, 1) / 8
        scales = _tensor(scales, torch.float16).double().numpy()
        parts = {".weight": _tensor(codes, torch.int8)}
        if kind == "W8A8_DYNAMIC":
            zeros = torch.zeros(outputs, 1, dtype=torch.float16)
            return parts | {".weight_scale": _tensor(scales, torch.float16), ".weight_offset": zeros}, codes * scales
        product = (scales[:, 0] * 0.25).astype(np.float32)
        stored = torch.from_numpy(product)
        if kind == "bits":
            stored = torch.from_numpy(product.view(np.int32).astype(np.int64))
        activations = {".input_scale": torch.tensor([0.25]), ".input_offset": torch.tensor([3.0])}
        quant_bias = torch.arange(outputs, dtype=torch.int32)
        return parts | activations | {".deq_scale": stored, ".quant_bias": quant_bias}, codes * scales

    return pack


def fp8(scale_shape: str, scale_name: str = ".weight_scale", block: tuple[int, int] = (48, 40)) -> Pack:
    def pack(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
        codes, values = _e4m3(generator, outputs, inputs)
        shape: dict[str, tuple[int, ...]] = {
            "block": (-(-outputs // block[0]), -(-inputs // block[1])),
            "channel": (outputs, 1),
            "tensor": (),
        }
        scale = generator.uniform(0.0002, 0.001, shape[scale_shape]).astype(np.float32)
        spread = np.broadcast_to(scale, shape[scale_shape]).astype(np.float64)
        if scale_shape == "block":
            spread = np.repeat(np.repeat(spread, block[0], 0), block[1], 1)[:outputs, :inputs]
        return {".weight": codes, scale_name: torch.tensor(scale)}, values * spread

    return pack


def nvfp4(packed: str, scale_of_all: str, *, divides: bool) -> Pack:
    def pack(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
        codes, values = _pairs(generator, outputs, inputs)
        scale = _tensor(generator.uniform(0.5, 2.0, (outputs, inputs // 16))).to(torch.float8_e4m3fn)
        factor = np.float32(0.0317)
        stored = np.float32(1) / factor if divides else factor
        of_all = 1.0 / np.float64(stored) if divides else np.float64(stored)
        parts = {packed: codes, ".weight_scale": scale, scale_of_all: torch.tensor([stored])}
        return parts, values * over_groups(scale.double().numpy(), inputs, 16) * of_all

    return pack


def mxfp4(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
    codes, values = _pairs(generator, outputs, inputs)
    exponents = generator.integers(119, 123, (outputs, inputs // 32))
    parts = {".weight_packed": codes, ".weight_scale": _tensor(exponents, torch.uint8)}
    return parts, values * over_groups(np.ldexp(1.0, exponents - 127), inputs, 32)


def mxfp8(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
    codes, values = _e4m3(generator, outputs, inputs)
    exponents = generator.integers(114, 118, (outputs, inputs // 32))
    parts = {".weight": codes, ".weight_scale": _tensor(exponents, torch.uint8)}
    return parts, values * over_groups(np.ldexp(1.0, exponents - 127), inputs, 32)


def _pairs(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[torch.Tensor, NDArray[np.float64]]:
    """e2m1, two a byte, the first in the low half."""
    codes = generator.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    return _tensor(codes[:, 0::2] | codes[:, 1::2] << 4), _E2M1[codes]


def bnb_4bit(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
    levels = np.sort(generator.uniform(-1, 1, 16)).astype(np.float32)
    codes = generator.integers(0, 16, outputs * inputs).astype(np.uint8)
    absmax = generator.uniform(0.05, 0.2, outputs * inputs // 64).astype(np.float32)
    parts = {".weight.absmax": _tensor(absmax)} | _bnb_parts(codes, levels, {"shape": [outputs, inputs]})
    weight = levels.astype(np.float64)[codes] * np.repeat(absmax.astype(np.float64), 64)
    return parts, weight.reshape(outputs, inputs)


def bnb_nested(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
    """absmax in 8 bits, with a table and scales of its own, about an offset."""
    levels = np.sort(generator.uniform(-1, 1, 16)).astype(np.float32)
    table = np.sort(generator.uniform(-1, 1, 256)).astype(np.float32)
    codes = generator.integers(0, 16, outputs * inputs).astype(np.uint8)
    inner = generator.integers(0, 256, outputs * inputs // 64).astype(np.uint8)
    outer = generator.uniform(0.01, 0.03, -(-len(inner) // 256)).astype(np.float32)
    offset = 0.1
    state = {"shape": [outputs, inputs], "nested_blocksize": 256, "nested_offset": offset}
    parts = {
        ".weight.absmax": _tensor(inner),
        ".weight.nested_absmax": _tensor(outer),
        ".weight.nested_quant_map": _tensor(table),
    } | _bnb_parts(codes, levels, state)
    absmax = table.astype(np.float64)[inner] * np.repeat(outer.astype(np.float64), 256)[: len(inner)] + offset
    return parts, (levels.astype(np.float64)[codes] * np.repeat(absmax, 64)).reshape(outputs, inputs)


def _bnb_parts(codes: NDArray[np.uint8], levels: NDArray[np.float32], state: dict[str, Any]) -> Parts:
    text = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"} | state).encode()
    return {
        ".weight": _tensor((codes[0::2] << 4 | codes[1::2])[:, None]),
        ".weight.quant_map": _tensor(levels),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }


def bnb_int8(generator: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, NDArray[np.float64]]:
    codes, scale = generator.integers(-127, 128, (outputs, inputs)), generator.uniform(0.1, 0.3, outputs)
    scale = scale.astype(np.float32)
    parts = {".weight": _tensor(codes, torch.int8), ".SCB": _tensor(scale)}
    return parts, codes * (scale.astype(np.float64) / 127)[:, None]


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP}
_AUTO_ROUND = {"quant_method": "auto-round", "group_size": GROUP, "sym": False, "data_type": "int"}
_BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_ONE_ROUNDING_MORE = 3e-7
_ASCEND = "quant_model_description.json"
CASES: dict[str, Case] = {
    "gptq-4-v1": Case(gptq(4, first_version=True), {**_GPTQ, "bits": 4}),
    "gptq-4-v2-act-order": Case(
        gptq(4, first_version=False, act_order=True), {**_GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}
    ),
    "gptq-8-v1-old-file": Case(
        gptq(8, first_version=True), {"bits": 8, "group_size": GROUP}, side_file="quantize_config.json"
    ),
    "gptq-3-v1": Case(gptq(3, first_version=True), {**_GPTQ, "bits": 3}),
    "auto-round": Case(
        auto_round,
        _AUTO_ROUND
        | {"bits": 3, "packing_format": "auto_round:gptqmodel", "extra_config": {".*down_proj.*": {"bits": 8}}},
    ),
    "awq": Case(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "ct-w4a16": Case(integers(4, per_group=True), _compressed("pack-quantized", **_W4)),
    "ct-w4a16-zeros": Case(integers(4, per_group=True, zeros=True), _compressed("pack-quantized", **_W4)),
    "ct-w4a16-act-order": Case(
        integers(4, per_group=True, zeros=True, act_order=True), _compressed("pack-quantized", **_W4)
    ),
    "ct-w3a16": Case(integers(3, per_group=True, zeros=True), _compressed("pack-quantized", **{**_W4, "num_bits": 3})),
    "ct-w5a16": Case(integers(5, per_group=True, zeros=True), _compressed("pack-quantized", **{**_W4, "num_bits": 5})),
    "ct-w6a16": Case(integers(6, per_group=True), _compressed("pack-quantized", **{**_W4, "num_bits": 6})),
    "ct-w8a16": Case(
        integers(8, per_group=False), _compressed("pack-quantized", num_bits=8, type="int", strategy="channel")
    ),
    "ct-w8a8": Case(int8, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "ascend-w8a8": Case(ascend("W8A8"), {"model.layers.0.mlp.up_proj.weight": "W8A8"}, side_file=_ASCEND),
    "ascend-w8a8-bits": Case(ascend("bits"), {"model.layers.0.mlp.up_proj.weight": "W8A8"}, side_file=_ASCEND),
    "ascend-dynamic": Case(
        ascend("W8A8_DYNAMIC"), {"model.layers.0.mlp.up_proj.weight": "W8A8_DYNAMIC"}, side_file=_ASCEND
    ),
    "ct-fp8": Case(
        fp8("channel"),
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        extra={".input_scale": 2.0},
    ),
    "ct-fp8-tensor": Case(fp8("tensor"), _compressed("float-quantized", num_bits=8, type="float", strategy="tensor")),
    "ct-fp8-block": Case(
        fp8("block"),
        _compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[48, 40]),
    ),
    "ct-nvfp4": Case(
        nvfp4(".weight_packed", ".weight_global_scale", divides=True),
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        _ONE_ROUNDING_MORE,
    ),
    "ct-mxfp4": Case(mxfp4, _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group")),
    "ct-mxfp8": Case(mxfp8, _compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group")),
    "fp8-block": Case(
        fp8("block", ".weight_scale_inv"), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40]}
    ),
    "fp8-tensor": Case(
        fp8("tensor"), {"quant_method": "fp8", "activation_scheme": "static"}, extra={".input_scale": 2.0}
    ),
    "modelopt-fp8": Case(
        fp8("tensor"),
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        side_file="hf_quant_config.json",
        extra={".input_scale": 2.0, ".k_scale": 1.0},
    ),
    "modelopt-fp8-block": Case(fp8("block", block=(128, 128)), {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}),
    "modelopt-nvfp4": Case(
        nvfp4(".weight", ".weight_scale_2", divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        _ONE_ROUNDING_MORE,
    ),
    "bnb-nf4": Case(bnb_4bit, _BNB4),
    "bnb-nf4-nested": Case(bnb_nested, _BNB4, 1e-6),
    "bnb-int8": Case(bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, _ONE_ROUNDING_MORE),
}
