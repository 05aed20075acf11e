"""Linears on packed codes: the law to the bit for every row count, and no further from the exact product than it says.

Oracles: the law step by step (coded_reference), and the product in float64 with the weights that the codes stand for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.kernels.cpu.emitters import has_dot_pairs
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import coded_reference, cpu_code_panels
from outrider.kernels.linear.codes import CodedFactors, Codes
from tests.kernels.test_panels import needs_instruction

pytestmark = pytest.mark.usefixtures("_num_threads")

_ROW_COUNTS = (*range(1, 21), 128, 129)
_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)


def make_codes(
    numbers: torch.Tensor,
    group: int,
    *,
    scale_type: torch.dtype = torch.float16,
    minimums: bool = False,
    zeros: bool = False,
    scattered: bool = False,
) -> Codes:
    """Random scales, minimums and zeros for numbers [N, K] in groups of `group` inputs."""
    generator = torch.Generator().manual_seed(3)
    num_outputs, num_inputs = numbers.shape
    shape = (num_outputs, -(-num_inputs // group))
    groups = torch.arange(num_inputs) // group
    return Codes(
        numbers,
        (torch.rand(shape, generator=generator) * 0.02 + 0.001).to(scale_type),
        groups[torch.randperm(num_inputs, generator=generator)] if scattered else groups,
        torch.randint(0, 16, shape, generator=generator) if zeros else None,
        (torch.rand(shape, generator=generator) * 0.1).to(scale_type) if minimums else None,
    )


def make_coded(numbers: torch.Tensor, group: int, *, minimums: bool = False) -> Codes:
    """As make_codes, with scales and minimums as GGUF's K types have them: a step for 256 inputs."""
    generator = torch.Generator().manual_seed(9)
    num_outputs, num_inputs = numbers.shape

    def coded(low: int, sign: int) -> CodedFactors:
        codes = torch.randint(low, 64, (num_outputs, num_inputs // group), generator=generator).to(torch.int8)
        steps = sign * torch.rand((num_outputs, num_inputs // 256), generator=generator) * 0.001
        return CodedFactors(codes, steps.half())

    scales, offsets = coded(0 if minimums else -64, 1), coded(0, -1) if minimums else None
    of_minimums = None if offsets is None else offsets.values()
    groups = torch.arange(num_inputs) // group
    return Codes(numbers, scales.values(), groups, None, of_minimums, scales, offsets)


def integers(num_outputs: int, num_inputs: int, low: int, high: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_inputs)
    return torch.randint(low, high, (num_outputs, num_inputs), generator=generator).to(torch.int8)


def e4m3(num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Every code but NaN, subnormal ones too."""
    codes = integers(num_outputs, num_inputs, -128, 128).view(torch.uint8)
    codes = torch.where(codes & 0x7F == 0x7F, torch.tensor(0x38, dtype=torch.uint8), codes)
    return codes.view(torch.float8_e4m3fn)


# name -> (codes, kind)
CASES: dict[str, tuple[Codes, str]] = {
    "q8_0": (make_codes(integers(130, 96, -128, 128), 32), "i8"),
    "q4_1": (make_codes(integers(70, 96, 0, 16), 32, minimums=True), "i4"),
    "iq4": (make_codes(_IQ4[integers(64, 64, 0, 16).int()], 32), "i4"),
    "gptq-act-order": (make_codes(integers(70, 256, 0, 16), 128, zeros=True, scattered=True), "i4"),
    "one-group": (make_codes(integers(65, 320, -128, 128), 320, scale_type=torch.float32), "i8"),
    "one-odd-group": (make_codes(integers(65, 77, -128, 128), 77), "i8"),
    "long-groups": (make_codes(integers(64, 700, -8, 8), 512), "i4"),
    "odd-inputs": (make_codes(integers(65, 33, 0, 16), 16, minimums=True, zeros=True, scattered=True), "i4"),
    "q5_k": (make_codes(integers(64, 256, 0, 32), 32, minimums=True, scale_type=torch.float32), "i5"),
    "q5_0": (make_codes(integers(130, 96, -16, 16), 32), "i5"),
    "q6_k": (make_codes(integers(65, 256, -32, 32), 16, scale_type=torch.float32), "i6"),
    "six-bits-odd-inputs": (make_codes(integers(65, 77, -31, 33), 16, minimums=True, scattered=True), "i6"),
    "q4_k": (make_coded(integers(130, 768, 0, 16), 32, minimums=True), "i4"),
    "q5_k-coded": (make_coded(integers(65, 512, 0, 32), 32, minimums=True), "i5"),
    "q6_k-coded": (make_coded(integers(70, 768, -32, 32), 16), "i6"),
    "fp8-block": (make_codes(e4m3(129, 320), 128, scale_type=torch.float32), "e4m3"),
}


def rows_and_bias(codes: Codes) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(max(_ROW_COUNTS), codes.shape[1], generator=generator).bfloat16()
    return x, torch.randn(codes.shape[0], generator=generator).bfloat16()


def error_bound(x: torch.Tensor, codes: Codes, bias: torch.Tensor) -> torch.Tensor:
    """Of outputs [T, N]: the output's rounding, and that of sums in float32."""
    exact = x.double() @ codes.dequantised().double().T + bias.double()
    # What is added: products, and where there are minimums, sums of x times them.
    minimums = codes.folded_minimums()
    sizes = codes.numbers.float().double().abs() * codes.scales.double().abs()[:, codes.groups]
    if minimums is not None:
        sizes += minimums.double().abs()[:, codes.groups]
    return 2**-8 * exact.abs() + codes.shape[1] * 2**-24 * (x.double().abs() @ sizes.T + bias.double().abs())


def kind_here(kind: str) -> str:
    """Five and six bits are decoded by instructions of AVX-512; elsewhere such codes take eight."""
    return kind if has_dot_pairs() or kind not in ("i5", "i6") else "i8"


@needs_instruction
@pytest.mark.parametrize("name", CASES)
def test_every_row_has_the_bits_of_the_law_in_any_company(name: str) -> None:
    codes, kind = CASES[name]
    packed = cpu_code_panels.pack([codes])
    assert packed.kinds == (kind_here(kind),)
    x, bias = rows_and_bias(codes)
    expected = coded_reference.linear(x, codes, bias)
    for num_rows in _ROW_COUNTS:
        assert torch.equal(cpu_code_panels.linear(x[-num_rows:], packed, bias), expected[-num_rows:]), num_rows
    assert torch.equal(cpu_code_panels.linear(x[:2], packed), coded_reference.linear(x[:2], codes))


@pytest.mark.parametrize("name", CASES)
def test_the_law_is_as_near_to_the_exact_product_as_it_promises(name: str) -> None:
    codes, _ = CASES[name]
    x, bias = rows_and_bias(codes)
    x = x[:20]
    exact = x.double() @ codes.dequantised().double().T + bias.double()
    error = (coded_reference.linear(x, codes, bias).double() - exact).abs()
    assert bool((error <= error_bound(x, codes, bias)).all())


def with_other(part: torch.Tensor | None) -> torch.Tensor:
    assert part is not None
    changed = part.clone()
    changed[0, 0] += 1
    return changed


@pytest.mark.parametrize("what", ["numbers", "scales", "zeros", "minimums", "groups"])
def test_the_reference_sees_one_wrong_part(what: str) -> None:
    codes, _ = CASES["odd-inputs"]
    if what == "groups":
        wrong = replace(codes, groups=codes.groups.roll(1))
    else:
        wrong = replace(codes, **{what: with_other(getattr(codes, what))})  # type: ignore[arg-type]
    x, _ = rows_and_bias(codes)
    assert not torch.equal(coded_reference.linear(x[:4], wrong), coded_reference.linear(x[:4], codes))


@needs_instruction
@pytest.mark.parametrize("name", ["q5_k", "q5_0", "q6_k", "six-bits-odd-inputs", "q5_k-coded", "q6_k-coded"])
def test_fewer_bits_give_the_bits_of_eight(name: str) -> None:
    """The same weight, which a row with codes of all values makes an 8-bit one."""
    codes, _ = CASES[name]
    every = torch.arange(-128, 128).repeat(codes.shape[1])[: 4 * codes.shape[1]].reshape(4, -1).to(torch.int8)

    def extended(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else torch.cat([part, part[:4]])

    wide = Codes(
        torch.cat([codes.numbers, every]), torch.cat([codes.scales, codes.scales[:4]]), codes.groups,
        extended(codes.zeros), extended(codes.minimums),
    )  # fmt: skip
    narrow_panels, wide_panels = cpu_code_panels.pack([codes]), cpu_code_panels.pack([wide])
    assert wide_panels.kinds == ("i8",)
    x, _ = rows_and_bias(codes)
    for num_rows in (1, 2, 3, 6, 7, 12, 13, 129):
        found, expected = (cpu_code_panels.linear(x[:num_rows], panels) for panels in (narrow_panels, wide_panels))
        assert torch.equal(found, expected[:, :-4]), num_rows
    ids = torch.arange(codes.shape[0])
    assert torch.equal(cpu_code_panels.rows(ids, narrow_panels), cpu_code_panels.rows(ids, wide_panels))


@needs_instruction
def test_weights_of_several_kinds_are_one_linear() -> None:
    parts = [
        make_codes(integers(70, 96, -8, 8), 32),
        make_codes(integers(64, 96, -128, 128), 32, scale_type=torch.float32),
        make_codes(integers(3, 96, 0, 16), 16, minimums=True),
        make_codes(integers(65, 96, -100, 100), 96),
        make_codes(integers(64, 96, 0, 32), 32, minimums=False),
        make_codes(integers(66, 96, -32, 32), 16, scale_type=torch.float32),
    ]
    packed = cpu_code_panels.pack(parts)
    assert packed.kinds == tuple(sorted({kind_here(kind) for kind in ("i4", "i5", "i6", "i8")}))
    x, _ = rows_and_bias(parts[0])
    widths = [part.shape[0] for part in parts]
    bias = torch.randn(sum(widths), generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = torch.cat([coded_reference.linear(x[:13], part) for part in parts], 1)
    assert torch.equal(cpu_code_panels.linear(x[:13], packed), expected)
    with_bias = torch.cat(
        [
            coded_reference.linear(x[:13], part, own)
            for part, own in zip(parts, bias.split(widths), strict=True)  # type: ignore[no-untyped-call]
        ],
        1,
    )
    assert torch.equal(cpu_code_panels.linear(x[:13], packed, bias), with_bias)


@needs_instruction
@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_dequantised_weights(name: str) -> None:
    codes, _ = CASES[name]
    packed = cpu_code_panels.pack([codes])
    ids = torch.tensor([[codes.shape[0] - 1, 0, 17], [17, 5, 1]])
    assert torch.equal(cpu_code_panels.rows(ids, packed), codes.dequantised().bfloat16()[ids])


@needs_instruction
@pytest.mark.parametrize("wrong", [-1, 130])
def test_an_id_outside_is_refused(wrong: int) -> None:
    packed = cpu_code_panels.pack([CASES["q8_0"][0]])
    with pytest.raises(KernelArgumentError, match="an id names no row"):
        cpu_code_panels.rows(torch.tensor([0, wrong]), packed)


@pytest.mark.parametrize(("width", "is_read_as_it_comes"), [(64, True), (32, True), (8, False)])
def test_columns_in_another_order_are_the_same_weights(width: int, is_read_as_it_comes: bool) -> None:
    """Heads of that many inputs in another order; groups of 32."""
    codes = make_codes(integers(64, 256, -8, 8), 32, minimums=True, zeros=True)
    heads = torch.arange(256).reshape(2, 128 // width, width).transpose(0, 1).flatten()
    found = codes.columns(heads)
    assert torch.equal(found.dequantised(), codes.dequantised()[:, heads])
    assert found.grouping is not None
    assert (found.grouping.order is None) == is_read_as_it_comes


@needs_instruction
@pytest.mark.parametrize("width", [64, 8])
def test_columns_in_another_order_have_their_own_coded_scales(width: int) -> None:
    """A step is of 256 inputs, which come apart."""
    codes = make_coded(integers(64, 512, 0, 16), 32, minimums=True)
    heads = torch.arange(512).reshape(2, 256 // width, width).transpose(0, 1).flatten()
    packed = cpu_code_panels.pack([codes.columns(heads)])
    ids = torch.tensor([0, 63, 17])
    assert torch.equal(cpu_code_panels.rows(ids, packed), codes.dequantised()[:, heads].bfloat16()[ids])


def test_codes_that_no_law_is_for_are_not_taken() -> None:
    even = make_codes(integers(64, 64, -8, 8), 32)
    uneven = replace(even, groups=torch.tensor([0] * 30 + [1] * 34))
    odd = make_codes(integers(64, 63, -8, 8), 21)
    assert cpu_code_panels.takes(even)
    assert not cpu_code_panels.takes(uneven)
    assert not cpu_code_panels.takes(odd)
    assert not cpu_code_panels.takes_together([even, odd])
    scattered = make_codes(integers(64, 64, -8, 8), 32, scattered=True)
    assert not cpu_code_panels.takes_together([even, scattered])
    with pytest.raises(KernelArgumentError, match="cannot be packed"):
        cpu_code_panels.pack([even, scattered])


@needs_instruction
def test_rows_of_another_width_are_refused() -> None:
    packed = cpu_code_panels.pack([CASES["q8_0"][0]])
    with pytest.raises(KernelArgumentError, match=r"x is bfloat16 \[2, 95\], expected bfloat16 \[..., 96\]"):
        cpu_code_panels.linear(torch.zeros(2, 95, dtype=torch.bfloat16), packed)


@needs_instruction
def test_memory_is_that_of_the_codes() -> None:
    eight_bits = cpu_code_panels.pack([make_codes(integers(128, 1024, -128, 128), 128, scale_type=torch.float32)])
    assert eight_bits.nbytes / (128 * 1024) < 1 + 4 / 128 + 0.01
    four_bits_coded = cpu_code_panels.pack([make_coded(integers(128, 1024, 0, 16), 32, minimums=True)])
    assert four_bits_coded.nbytes / (128 * 1024) < 144 / 256 + 0.025  # 144 bytes for 256 weights, as in the file
    four_bits = cpu_code_panels.pack([make_codes(integers(128, 1024, -8, 8), 32)])
    assert four_bits.nbytes / (128 * 1024) < 0.5 + 2 / 32 + 0.01
    if not has_dot_pairs():
        return
    five_bits = cpu_code_panels.pack([make_codes(integers(128, 1024, -16, 16), 32)])
    assert five_bits.nbytes / (128 * 1024) < 0.625 + 2 / 32 + 0.01
    six_bits = cpu_code_panels.pack([make_codes(integers(128, 1024, -32, 32), 16, scale_type=torch.float32)])
    assert six_bits.nbytes / (128 * 1024) < 0.75 + 4 / 16 + 0.01
    # As in the file: 210 bytes for 256 weights.
    six_bits_coded = cpu_code_panels.pack([make_coded(integers(128, 1024, -32, 32), 16)])
    assert six_bits_coded.nbytes / (128 * 1024) < 210 / 256 + 0.01
