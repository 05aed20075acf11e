"""Quantised weights that compute before they are packed.

Oracle: the same checkpoint, read dequantised.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.attention.ops import resolve_attention_ops
from outrider.engine.model import guards
from outrider.engine.model.dequantising import dequantising
from outrider.engine.model.row_kernels import resolve_code_kernels
from outrider.engine.model.weights import read_weights
from outrider.engine.tensor_parallel.agreement import sample_logits
from tests.engine.model.quantised.packed_writers import CASES, write_gpt_oss, write_model
from tests.engine.tiny_models import SERVED, save_tiny_model

_WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "head_dim": 32}


def read(path: str, *, keeps_codes: bool) -> tuple[Any, Any]:
    config = guards.read_config(path)
    kernels = resolve_code_kernels("cpu", torch.bfloat16, torch.device("cpu")) if keeps_codes else None
    model = read_weights(path, config, torch.bfloat16, torch.device("cpu"), code_kernels=kernels)
    ops = resolve_attention_ops("reference", torch.device("cpu"))
    return model, guards.probe_layers(path, model, ops, guards.attention_layers(config))


@pytest.mark.parametrize(
    ("architecture", "case"),
    [("llama_tied", "gptq-4-v2-act-order"), ("llama", "fp8-block"), ("qwen3_moe", "awq"), ("gpt_oss", "ct-mxfp4")],
)
def test_the_logits_are_those_of_dequantised_weights(tmp_path: Path, architecture: str, case: str) -> None:
    """Gate and up apart and joined, biases, experts stored transposed; afterwards zeros again, as probes expect."""
    config, arguments = SERVED[architecture]
    plain = save_tiny_model(config, {**arguments, **_WIDTHS}, tmp_path / "plain")
    if architecture == "gpt_oss":
        write_gpt_oss(plain, tmp_path / "packed", tmp_path / "meant")
    else:
        write_model(plain, CASES[case], tmp_path / "packed", tmp_path / "meant")
    packed, shapes = read(str(tmp_path / "packed"), keeps_codes=True)
    of_zeros = sample_logits(packed, shapes)
    with dequantising(packed):
        found = sample_logits(packed, shapes).float()
    assert torch.equal(sample_logits(packed, shapes), of_zeros)
    wanted = sample_logits(*read(str(tmp_path / "packed"), keeps_codes=False)).float()
    errors = (found - wanted).abs().amax(1) / wanted.abs().max()
    assert errors.median() < 2**-6  # experts are summed in another order
    assert (of_zeros.float() - wanted).abs().amax(1).median() > 0.1 * wanted.abs().max()
