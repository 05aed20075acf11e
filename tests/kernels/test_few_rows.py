"""The few-row linear gives oneDNN's bits, reads oneDNN's own weights, and says where it cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from llvmlite import binding

from kernels.linear import cpu, cpu_few_rows, reference

SHAPES = [(16, 2), (64, 64), (192, 34), (208, 320), (1024, 1024), (320, 2100), (512, 2816), (4096, 192)]
HAS_INSTRUCTION = bool(binding.get_host_cpu_features().get("avx512bf16", False))
needs_instruction = pytest.mark.skipif(not HAS_INSTRUCTION, reason="this CPU has no AVX512-BF16")


@pytest.fixture(params=[1, 2])
def _num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _plan(weight: torch.Tensor) -> tuple[torch.Tensor, cpu_few_rows.FewRows]:
    packed = cpu.pack(weight)
    plan = cpu_few_rows.plan(packed, weight.shape[0], weight.shape[1], weight.dtype)
    assert plan is not None, "this CPU's oneDNN adds up in an order that the kernel does not know"
    return packed, plan


@needs_instruction
@pytest.mark.usefixtures("_num_threads")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_bits_are_those_of_onednn(shape: tuple[int, int], with_bias: bool) -> None:
    """Data whose sums cancel, other than the probe's; a wrong order of summation shows in nearly every output."""
    num_outputs, num_inputs = shape
    generator = torch.Generator().manual_seed(num_inputs)
    half = num_inputs // 2
    weight = torch.randn(shape, generator=generator).bfloat16()
    weight[:, half : 2 * half] = weight[:, :half]
    x = torch.randn(40, num_inputs, generator=generator).bfloat16()
    x[::2, half : 2 * half] = -x[::2, :half]
    bias = (torch.randn(num_outputs, generator=generator) / 100).bfloat16() if with_bias else None
    packed, plan = _plan(weight)
    whole = cpu.linear(x, packed, bias)
    for count in range(1, cpu_few_rows.MAX_ROWS + 1):
        found = cpu_few_rows.linear(x[count : 2 * count], plan, bias)
        assert torch.equal(found, whole[count : 2 * count]), f"{count} rows"


@needs_instruction
def test_outputs_match_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 130, generator=generator).bfloat16()
    weight = (torch.randn(64, 130, generator=generator) / 11).bfloat16()
    _packed, plan = _plan(weight)
    found = cpu_few_rows.linear(x, plan)
    assert found.shape == (2, 3, 64)
    torch.testing.assert_close(found, reference.linear(x, weight), atol=2**-6, rtol=0)


@needs_instruction
def test_another_block_of_inputs_gives_other_bits() -> None:
    """The probe can fail: on its own data every wrong order of summation shows."""
    right = cpu_few_rows.probe(256, 1024, torch.bfloat16, torch.get_num_threads())
    assert right is not None
    x, weight, _bias = cpu_few_rows._cancelling(256, 1024)
    packed = cpu.pack(weight)
    expected = cpu.linear(x, packed)
    for block_inputs in {128, 256, 512, 1024} - {right}:
        plan = cpu_few_rows._describe(packed, 256, 1024, block_inputs)
        same = (cpu_few_rows.linear(x, plan)[::2] == expected[::2]).float().mean()
        assert (block_inputs >= 1024 and right >= 1024) or same < 0.95, block_inputs


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "dtype"),
    [(64, 33, torch.bfloat16), (65, 64, torch.bfloat16), (64, 64, torch.float32)],
)
def test_shapes_that_it_cannot_take_are_left_to_onednn(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    packed = cpu.pack(torch.zeros(num_outputs, num_inputs, dtype=dtype))
    assert cpu_few_rows.plan(packed, num_outputs, num_inputs, dtype) is None


@needs_instruction
def test_a_layout_that_is_not_panels_is_noticed() -> None:
    weight = torch.randn(64, 64).bfloat16()
    assert cpu_few_rows._is_laid_out_in_panels(cpu.pack(weight), weight)
    assert not cpu_few_rows._is_laid_out_in_panels(cpu.pack(weight.t()), weight)
