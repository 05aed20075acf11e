"""Compiles the linears on packed codes for GPUs that need not be there; prints the instructions that each has, as JSON.

python -m tests.kernels.compiled_codes        # without TRITON_INTERPRET
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.kernels.linear import triton_code_blocks, triton_codes
from outrider.kernels.linear.codes import Codes
from outrider.kernels.linear.int8 import triton as int8_triton
from outrider.kernels.linear.triton_tiles import tile_config
from tests.kernels.test_code_panels import e4m3, integers, make_codes

_TYPES = {
    **dict.fromkeys(("x", "bias", "out"), "*bf16"),
    **dict.fromkeys(("scales", "minimums"), "*fp16"),
    **dict.fromkeys(("table", "ids", "order"), "*i64"),
    "codes": "*u8",
    **dict.fromkeys(("x_sums", "steps", "sums"), "*fp32"),
    "q": "*i8",
}
_NUM_INPUTS = 256


def compiled(kernel: Any, constants: dict[str, Any], capability: int, **options: Any) -> list[str]:
    """Multiply-adds of matrices in a kernel whose pointers are aligned to 16 bytes."""
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else _TYPES.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if types[name].startswith("*")}
    source = ASTSource(kernel, types, values, aligned)
    target = GPUTarget("cuda", capability, 32)
    text = compile_kernel(source, target=target, options={**options, "enable_fp_fusion": False}).asm["ptx"]
    return sorted(set(re.findall(r"(?:mma\.sync|wgmma\.mma_async)\.[\w.]+", text)))


def main() -> None:
    numbers = {
        "range": integers(1, _NUM_INPUTS, -8, 8),
        "table": torch.tensor([0, 1, 3, 12, -12], dtype=torch.int8)[integers(1, _NUM_INPUTS, 0, 5).int()],
        "i8": integers(1, _NUM_INPUTS, -128, 128),
        "e4m3": e4m3(1, _NUM_INPUTS),
    }
    for kind, group, num_outputs in (("range", 128, 4096), ("table", 16, 9000), ("i8", 32, 9000), ("e4m3", 128, 1024)):
        (part,) = triton_code_blocks.pack([make_codes(numbers[kind], group, minimums=group == 32)]).parts
        layout = triton_codes.layout(part) | {"NUM_INPUTS": _NUM_INPUTS}
        tile = tile_config(num_outputs, _NUM_INPUTS, torch.bfloat16)
        for capability, block_rows in ((80, 16), (90, 16), (90, 64), (90, 128)):
            constants = layout | {
                "NUM_BLOCKS": part.codes.shape[0],
                "PADS": part.pads(_NUM_INPUTS),
                "HAS_BIAS": True,
                "BLOCK_ROWS": block_rows,
                "BLOCK_OUTPUTS": tile.block_outputs,
            }
            options = {"num_warps": tile.num_warps, "num_stages": triton_codes.num_stages(block_rows)}
            found = compiled(triton_codes._linear, constants, capability, **options)
            case = {"kind": part.kind, "capability": capability, "rows": block_rows, "uses_wgmma": tile.uses_wgmma}
            print(json.dumps({**case, "instructions": found}))
        compiled(triton_codes._rows, layout | {"HAS_ORDER": True}, 90, num_warps=1)
    sums = {"NUM_INPUTS": _NUM_INPUTS, "NUM_GROUPS": 8, "GROUP_INPUTS": 32, "BLOCK_ROWS": 8, "BLOCK_GROUPS": 8}
    compiled(triton_codes._sums, sums, 90, num_warps=4)
    for kind, group, num_outputs in (("range", 32, 4096), ("table", 16, 9000), ("i8", 128, 9000)):
        compile_in_integers(make_codes(numbers[kind], group, minimums=group == 32), num_outputs)
    sizes = {"NUM_INPUTS": _NUM_INPUTS, "NUM_GROUPS": 8, "GROUP_INPUTS": 32, "WIDTH": 32}
    compiled(int8_triton._quantise, sizes, 90, num_warps=1)


def compile_in_integers(codes: Codes, num_outputs: int) -> None:
    (part,) = int8_triton.pack([codes]).parts
    tile = tile_config(num_outputs, _NUM_INPUTS, torch.bfloat16)
    for capability, block_rows in ((80, 16), (90, 16), (90, 128)):
        constants = triton_codes.layout(part) | {
            "NUM_GROUPS": -(-_NUM_INPUTS // part.group_inputs),
            "NUM_BLOCKS": part.codes.shape[0],
            "HAS_BIAS": True,
            "BLOCK_ROWS": block_rows,
            "BLOCK_OUTPUTS": tile.block_outputs,
        }
        options = {"num_warps": tile.num_warps, "num_stages": triton_codes.num_stages(block_rows)}
        found = compiled(int8_triton._linear, constants, capability, **options)
        case = {"kind": part.kind, "capability": capability, "rows": block_rows, "in_integers": True}
        print(json.dumps({**case, "instructions": found}))


if __name__ == "__main__":
    main()
