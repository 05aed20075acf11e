"""Each packed format, model by model: the weights that are loaded are those that were meant, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packed_writers import CASES, write_gpt_oss, write_model
from tiny_models import SERVED, save_tiny_model

from outrider.engine.model.load import load_model

# Multiples of 32, as the formats want it, and of no FP8 block.
WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plain")
    widths: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen3_moe": {"moe_intermediate_size": 32},
        "gpt_oss": {"intermediate_size": 32, "num_local_experts": 3},
    }
    return {
        name: save_tiny_model(SERVED[name][0], {**SERVED[name][1], **WIDTHS, **own}, folder / name)
        for name, own in widths.items()
    }


def parameters(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    return dict(load_model(str(folder), row_invariant=False, **options).model.named_parameters())


def require_equal(packed: Path, meant: Path, tolerance: float) -> None:
    found, wanted = parameters(packed, dtype="float32"), parameters(meant, dtype="float32")
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        if tolerance:
            torch.testing.assert_close(found[name], weight, rtol=tolerance, atol=0, msg=name)
        else:
            assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("name", CASES)
def test_a_dense_model_has_the_weights_that_were_meant(plain: dict[str, Path], tmp_path: Path, name: str) -> None:
    write_model(plain["llama"], CASES[name], tmp_path / "packed", tmp_path / "meant")
    require_equal(tmp_path / "packed", tmp_path / "meant", CASES[name].tolerance)


@pytest.mark.parametrize("name", ["ct-w4a16", "fp8-block", "gptq-4-v1", "awq", "modelopt-nvfp4"])
def test_a_mixture_of_experts_has_them_too(plain: dict[str, Path], tmp_path: Path, name: str) -> None:
    write_model(plain["qwen3_moe"], CASES[name], tmp_path / "packed", tmp_path / "meant")
    require_equal(tmp_path / "packed", tmp_path / "meant", CASES[name].tolerance)


def test_gpt_oss_has_them_too(plain: dict[str, Path], tmp_path: Path) -> None:
    write_gpt_oss(plain["gpt_oss"], tmp_path / "packed", tmp_path / "meant")
    require_equal(tmp_path / "packed", tmp_path / "meant", 0)
