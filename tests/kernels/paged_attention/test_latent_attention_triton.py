"""GPU attention over latents, whose values are the first part of one key for all heads: against the fp64 reference, and
bit for bit in whatever company; and the heads' products in one launch. Interpreted without a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import triton as on_gpu_linear
from outrider.kernels.paged_attention import reference, triton
from tests.kernels.paged_attention.paged_cases import Session, Shape, chain, lay_out, random_session, run_kernel
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

# 48 heads are three blocks of 16 in fp32 too; 4 heads of 24 + 16 are packed with rows.
SHAPES = {
    "fp32-48": Shape(48, 1, 40, 32),
    "bf16-48": Shape(48, 1, 40, 32, torch.bfloat16),
    "bf16-4-odd": Shape(4, 1, 43, 24, torch.bfloat16),
}
if device().type == "cuda":  # DeepSeek-V3's
    SHAPES |= {"fp32-128": Shape(128, 1, 576, 512), "bf16-128": Shape(128, 1, 576, 512, torch.bfloat16)}


def _latents(sessions: list[Session], shape: Shape) -> dict[str, Any]:
    arguments = {
        name: value.to(device()) if isinstance(value, torch.Tensor) else value
        for name, value in lay_out(sessions, shape).items()
    }
    return arguments | {"value_cache": arguments["key_cache"][..., : shape.value_dim]}


@pytest.mark.parametrize("name", SHAPES)
def test_rows_match_the_reference(name: str) -> None:
    shape = SHAPES[name]
    cases = [(20, 1, None), (29, 5, 2)]
    arguments = _latents([random_session(shape, *case[:2], seed, case[2]) for seed, case in enumerate(cases)], shape)
    found = run_kernel(triton.paged_attention, arguments)
    expected = run_kernel(reference.paged_attention, arguments | {"query": arguments["query"].double()})
    is_bf16 = shape.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-8 if is_bf16 else 0, atol=1e-2 if is_bf16 else 1e-5)


@pytest.mark.parametrize("name", ["bf16-4-odd", "fp32-48"])
def test_a_row_keeps_its_bits(name: str) -> None:
    """A prompt, its rows one by one, and a chunk behind its context beside others."""
    shape = SHAPES[name]
    whole, stranger = random_session(shape, 0, 36, 1), random_session(shape, 17, 3, 2)
    expected = run_kernel(triton.paged_attention, _latents([whole], shape))
    for first, last in ((33, 34), (35, 36), (31, 36)):
        sessions = [stranger, chain(whole, first, last), stranger]
        found = run_kernel(triton.paged_attention, _latents(sessions, shape))
        assert torch.equal(found[3 : 3 + last - first], expected[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_launch_of_linears_has_the_bits_of_each(dtype: torch.dtype) -> None:
    """Read from, and written to, parts of wider rows."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, 30, generator=generator).to(dtype).to(device())[..., :20].transpose(0, 1)
    weights = torch.randn(3, 24, 20, generator=generator).to(dtype).to(device())
    out = torch.zeros(5, 3, 30, dtype=dtype, device=device())
    on_gpu_linear.linears(x, weights, out.transpose(0, 1)[..., :24])
    for index, weight in enumerate(weights):
        assert torch.equal(out[:, index, :24], on_gpu_linear.linear(x[index], weight))
    assert not bool(out[..., 24:].any()), "nothing is written beside them"
    with pytest.raises(KernelArgumentError, match="do not fit"):
        on_gpu_linear.linears(x, weights, out.transpose(0, 1)[..., :23])
