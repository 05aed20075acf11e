"""Linears in integers: the law to the bit for every row count and instruction, and no further from the exact product
than it says.

Oracles: the law step by step (int8.reference), and the product in float64 with the weights that the codes stand for.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from numba import cfunc, types

from outrider.engine.errors import BackendUnavailable
from outrider.engine.model.row_kernels import resolve_code_kernels
from outrider.kernels.cpu.units import place_among_neighbours
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear.codes import Codes
from outrider.kernels.linear.int8 import cpu_lines, cpu_narrow_tiles, cpu_panels, cpu_tiles, reference
from tests.kernels.test_code_panels import CASES, integers, make_coded, make_codes, rows_and_bias, with_other
from tests.kernels.test_panels import needs_instruction

pytestmark = pytest.mark.usefixtures("_num_threads")
needs_integers = pytest.mark.skipif(cpu_lines.instruction() is None, reason="this CPU has no AVX2")

_ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 128, 129)
TAKEN = {name: codes for name, (codes, _) in CASES.items() if name not in ("one-odd-group", "fp8-block")}
_KINDS = {"i4": "w4a8", "i5": "w5a8", "i6": "w6a8", "i8": "w8a8"}


@needs_integers
@pytest.mark.parametrize("name", TAKEN)
def test_every_row_has_the_bits_of_the_law_in_any_company(name: str) -> None:
    codes = TAKEN[name]
    packed = cpu_panels.pack([codes])
    assert packed.kinds == (_KINDS[CASES[name][1]],)
    x, bias = rows_and_bias(codes)
    expected = reference.linear(x, codes, bias)
    for num_rows in _ROW_COUNTS:
        assert torch.equal(cpu_panels.linear(x[-num_rows:], packed, bias), expected[-num_rows:]), num_rows
    assert torch.equal(cpu_panels.linear(x[:2], packed), reference.linear(x[:2], codes))


@pytest.mark.parametrize("name", TAKEN)
def test_the_law_is_as_near_to_the_exact_product_as_it_promises(name: str) -> None:
    """Half a step for each input, the output's rounding, and that of sums in float32."""
    codes = TAKEN[name]
    x, bias = rows_and_bias(codes)
    x, size = x[:20], reference.group_inputs([codes])
    assert size is not None
    assert codes.grouping is not None
    weights = codes.dequantised().double()
    exact = x.double() @ weights.T + bias.double()
    order = torch.arange(x.shape[1]) if codes.grouping.order is None else codes.grouping.order
    _, steps = reference.quantise(x[:, order], size)
    half_steps = torch.empty_like(x, dtype=torch.float64)
    half_steps[:, order] = steps.double().repeat_interleave(size, 1)[:, : x.shape[1]] / 2
    minimums = codes.folded_minimums()
    sizes = codes.numbers.double().abs() * codes.scales.double().abs()[:, codes.groups]
    sizes += 0 if minimums is None else minimums.double().abs()[:, codes.groups]
    bound = 2**-8 * exact.abs() + 1.001 * half_steps @ weights.abs().T
    bound += codes.shape[1] * 2**-23 * ((x.double().abs() + half_steps) @ sizes.T + bias.double().abs())
    error = (reference.linear(x, codes, bias).double() - exact).abs()
    assert bool((error <= bound).all())
    assert bool((error > 2**-8 * exact.abs()).any()), "the bound would not tell 8 bits from none"


@pytest.mark.parametrize("what", ["numbers", "scales", "zeros", "minimums", "groups"])
def test_the_reference_sees_one_wrong_part(what: str) -> None:
    codes = TAKEN["odd-inputs"]
    if what == "groups":
        wrong = replace(codes, groups=codes.groups.roll(1))
    else:
        wrong = replace(codes, **{what: with_other(getattr(codes, what))})  # type: ignore[arg-type]
    x, _ = rows_and_bias(codes)
    assert not torch.equal(reference.linear(x[:4], wrong), reference.linear(x[:4], codes))


@needs_integers
def test_weights_of_several_kinds_and_groups_are_one_linear() -> None:
    """In groups of the largest size that divides all."""
    parts = [
        make_codes(integers(70, 512, -8, 8), 32),
        make_codes(integers(64, 512, -128, 128), 32, scale_type=torch.float32),
        make_codes(integers(3, 512, 0, 16), 16, minimums=True),
        make_codes(integers(65, 512, -100, 100), 512),
        make_coded(integers(64, 512, 0, 32), 32, minimums=True),
        make_coded(integers(66, 512, -32, 32), 16),
    ]
    packed = cpu_panels.pack(parts)
    assert packed.kinds == ("w4a8", "w5a8", "w6a8", "w8a8")
    assert packed.group_inputs == 16
    x, _ = rows_and_bias(parts[0])
    bias = torch.randn(packed.num_outputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    biases = bias.split([part.shape[0] for part in parts])  # type: ignore[no-untyped-call]
    expected = torch.cat(
        [reference.linear(x[:13], part, own, size=16) for part, own in zip(parts, biases, strict=True)], 1
    )
    assert torch.equal(cpu_panels.linear(x[:13], packed, bias), expected)
    half = cpu_panels.outputs(cpu_panels.pack(parts[:1]), 0, 64)
    assert half is not None
    assert torch.equal(cpu_panels.linear(x[:3], half), reference.linear(x[:3], parts[0])[:, :64])


@needs_integers
@pytest.mark.parametrize("name", TAKEN)
def test_rows_are_the_dequantised_weights(name: str) -> None:
    codes = TAKEN[name]
    packed = cpu_panels.pack([codes])
    ids = torch.tensor([[codes.shape[0] - 1, 0, 17], [17, 5, 1]])
    assert torch.equal(cpu_panels.rows(ids, packed), codes.dequantised().bfloat16()[ids])


@needs_integers
def test_only_a_row_with_what_is_no_number_becomes_nan() -> None:
    codes = TAKEN["q4_1"]
    packed = cpu_panels.pack([codes])
    x, bias = rows_and_bias(codes)
    x = x[:8].clone()
    x[1, 40], x[2, 95], x[3, 0] = torch.inf, -torch.inf, torch.nan
    x[4], x[5] = 0.0, 1e-39
    expected, found = reference.linear(x, codes, bias), cpu_panels.linear(x, packed, bias)
    assert torch.equal(found.isnan().all(1), torch.tensor([False, True, True, True, False, False, False, False]))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert torch.equal(found[4], bias)


@needs_integers
def test_memory_is_that_of_the_codes() -> None:
    def bits(codes: Codes) -> float:
        return 8 * cpu_panels.pack([codes]).nbytes / codes.numbers.numel()

    assert bits(make_codes(integers(128, 1024, -8, 8), 32)) < 4.6
    assert bits(make_codes(integers(128, 1024, -16, 16), 32)) < 5.6
    assert bits(make_codes(integers(128, 1024, -128, 128), 32)) < 8.6
    assert bits(make_coded(integers(128, 1024, -32, 32), 16)) < 6.7  # 210 bytes for 256 weights
    assert bits(make_coded(integers(128, 1024, 0, 16), 32, minimums=True)) < 4.7


def test_codes_that_no_law_is_for_are_not_taken() -> None:
    even, odd = make_codes(integers(64, 64, -8, 8), 32), make_codes(integers(64, 60, -8, 8), 10)
    assert cpu_panels.takes_together([even])
    assert not cpu_panels.takes_together([odd])
    assert not cpu_panels.takes_together([CASES["fp8-block"][0]])
    with pytest.raises(KernelArgumentError, match="cannot be packed"):
        cpu_panels.pack([odd])


@pytest.mark.parametrize(("instruction", "seen"), [("avxvnni", "vpdpbusd\t%ymm"), ("avx2", "vpmaddubsw\t")])
@pytest.mark.parametrize("name", ["q4_1", "iq4", "q6_k"])
def test_half_registers_give_the_same_bits(
    name: str, instruction: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code for CPUs without VNNI of 64 bytes, on one that has it."""
    if cpu_lines.instruction() != "avx512vnni":
        pytest.skip("this CPU has no VNNI of 64 bytes: all other tests are of half registers")
    for module in (cpu_lines, cpu_narrow_tiles):
        monkeypatch.setattr(module, "instruction", lambda: instruction)
    codes = TAKEN[name]
    packed, (x, _) = cpu_panels.pack([codes]), rows_and_bias(codes)
    names = ", ".join(f"a{place}" for place in range(19))
    scope = {"add": cpu_narrow_tiles.add}
    exec(f"def entry({names}):\n    add({names})", scope)
    compiled = cfunc(types.void(*[types.int64] * 19))(scope["entry"])
    assert seen in compiled._library.get_asm_str()
    q, groups = cpu_panels._quantised(x[:2].contiguous(), packed, 2)
    panel = dict(zip(cpu_tiles.Panel.names, packed.panels[0].tolist(), strict=True))
    totals = torch.zeros(2, 64)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 19)(compiled.address)
    call(
        packed.parts[0].kind, 2, q.data_ptr(), q.stride(0), groups.data_ptr(), 4 * groups.stride(0), panel["lines"],
        q.shape[1] // 4, panel["group_lines"], panel["table"], panel["base"], panel["scales"], panel["minimums"],
        panel["scale_bytes"], panel["scale_steps"], panel["minimum_steps"], panel["step_shift"], 0, totals.data_ptr(),
    )  # fmt: skip
    assert torch.equal(totals.bfloat16(), reference.linear(x[:2], codes)[:, :64])


@needs_instruction
def test_a_cpu_without_integer_products_falls_back_to_bf16_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_lines, "instruction", lambda: None)
    on, codes = torch.device("cpu"), TAKEN["q4_1"]
    kernels = resolve_code_kernels("cpu", torch.bfloat16, on)
    assert kernels is not None
    assert kernels.pack([codes]).kinds == ("i4",)
    with pytest.raises(BackendUnavailable, match="this CPU has neither VNNI nor AVX2; use 'auto' or 'bf16'"):
        resolve_code_kernels("cpu", torch.bfloat16, on, "int8")


@needs_integers
def test_the_arithmetic_is_chosen_by_groups_and_option() -> None:
    def kinds(codes: Codes, arithmetic: str) -> tuple[str, ...]:
        kernels = resolve_code_kernels("cpu", torch.bfloat16, torch.device("cpu"), arithmetic)
        assert kernels is not None
        return kernels.pack([codes]).kinds

    narrow, wide = TAKEN["q4_1"], make_codes(integers(64, 256, -8, 8), 128)
    assert [kinds(narrow, name) for name in ("auto", "int8", "bf16")] == [("w4a8",), ("w4a8",), ("i4",)]
    assert [kinds(wide, name) for name in ("auto", "int8", "bf16")] == [("i4",), ("w4a8",), ("i4",)]
    assert kinds(CASES["fp8-block"][0], "int8") == ("e4m3",)


@pytest.mark.parametrize(("num_panels", "num_threads"), [(1, 1), (1, 4), (9, 2), (48, 2), (5, 8), (64, 7)])
def test_threads_that_take_panels_in_turn_each_take_neighbours_and_together_all(
    num_panels: int, num_threads: int
) -> None:
    places = [place_among_neighbours.py_func(unit, num_panels, num_threads) for unit in range(num_panels)]
    assert sorted(places) == list(range(num_panels))
    for thread in range(min(num_threads, num_panels)):
        own = places[thread::num_threads]
        assert own == list(range(own[0], own[0] + len(own)))
