"""Quantised experts that stay packed: the weights that were meant, in the file's memory, packed one by one.

Oracle of the logits: transformers in float32 on the weights that were meant.
"""

from __future__ import annotations

import copy
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import CachedSequence, run_step
from packed_writers import CASES, write_gpt_oss, write_model
from safetensors.torch import load_file, save_file
from tiny_models import HYBRIDS, SERVED, save_tiny_model

from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.coded_weights import RowInvariantCodes, Waiting, code_kinds
from outrider.engine.model.load import load_model
from outrider.engine.model.row_invariant_experts import PackedExpert
from outrider.engine.run.runner import ModelRunner
from outrider.kernels.linear import cpu_code_panels
from outrider.kernels.linear.codes import Codes

pytestmark = pytest.mark.skipif(not cpu_code_panels.supports(torch.bfloat16), reason="no bf16 panels here")
# Panels have 64 outputs, and groups and FP8 blocks need not divide a width.
_WIDTHS = {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32}
_LENGTH = 60
# (architecture, case) -> (kind of codes, bytes held for a byte of the file: with groups of 32, zero points take 4 for
# half a byte, and NVFP4's scales 4 for one)
_MODELS = {
    ("gpt_oss", "ct-mxfp4"): ("i4", 1.1),
    ("qwen3_moe", "gptq-4-v1"): ("i4", 1.35),
    ("qwen3_moe", "gptq-8-v1-old-file"): ("i8", 1.2),
    ("qwen3_moe", "awq"): ("i4", 1.35),
    ("qwen3_moe", "ct-w4a16"): ("i4", 1.1),
    ("qwen3_moe", "ct-w8a8"): ("i8", 1.1),
    ("qwen3_moe", "fp8-block"): ("e4m3", 1.15),
    ("qwen3_moe", "modelopt-nvfp4"): ("i4", 1.4),
    ("mixtral", "gptq-4-v1"): ("i4", 1.35),
    ("mixtral", "awq"): ("i4", 1.35),
    ("mixtral", "ct-w4a16-zeros"): ("i4", 1.35),
}
_IDS = ["-".join(model) for model in _MODELS]


def packed_model(folder: Path, architecture: str, case: str, linear: str | None = None) -> Path:
    config, arguments = SERVED[architecture]
    plain = save_tiny_model(config, {**arguments, **_WIDTHS}, folder / "plain")
    if architecture == "gpt_oss":
        write_gpt_oss(plain, folder / "packed", folder / "meant")
    elif linear is None:
        write_model(plain, CASES[case], folder / "packed", folder / "meant")
    else:
        write_model(plain, CASES[case], folder / "packed", folder / "meant", linear)
    return folder / "packed"


def load(folder: Path) -> Any:
    return load_model(str(folder), dtype="bfloat16", packed_arithmetic="bf16")


def experts_of(model: torch.nn.Module) -> list[PackedExpert]:
    return [part for part in model.modules() if isinstance(part, PackedExpert)]


def linears_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [linear for expert in experts_of(model) for linear in (expert.up, expert.down)]


def meant_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "meant", attn_implementation="eager").eval()


def require_near_the_exact_logits(loaded: Any, meant: Any) -> None:
    """In the median row: in some, rounding makes a router choose another expert."""
    runner = ModelRunner(loaded, loaded.make_cache(4, 16))
    token_ids = torch.randint(3, 97, (_LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = run_step(runner, [CachedSequence(token_ids, [0, 1, 2, 3]).rows(_LENGTH)])[0].float()
    with torch.inference_mode():
        exact = meant(torch.tensor([token_ids]), use_cache=False).logits[0]
        rounded = copy.deepcopy(meant).bfloat16()(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    ours, theirs = ((found - exact).square().mean(1).median().sqrt() for found in (logits, rounded))
    assert ours <= 1.2 * theirs


def meant_weights(meant: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of every expert's two linears in turn: the weight [K, N] and the bias, which the model has in bfloat16."""
    found = []
    for experts in (layer.mlp.experts for layer in meant.model.layers):
        for expert in range(experts.num_experts):
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(experts, name).detach()[expert]
                bias = getattr(experts, f"{name}_bias").detach()[expert] if experts.has_bias else torch.zeros(())
                found.append((weight if experts.is_transposed else weight.T, bias.bfloat16().float()))
    return found


def require_meant_weights(loaded: Any, meant: Any) -> None:
    """A row with a single 1 brings out an input's weights, each rounded once."""
    linears, wanted = linears_of(loaded.model), meant_weights(meant)
    assert len(linears) == len(wanted)
    for linear, (weight, bias) in zip(linears, wanted, strict=True):
        found = linear(torch.eye(len(weight), dtype=torch.bfloat16))
        assert torch.equal(found, (weight + bias).bfloat16())


def require_memory_of_the_file(loaded: Any, at_most: float) -> None:
    stored = load_file(Path(loaded.path) / "model.safetensors").items()
    in_file = sum(tensor.nbytes for name, tensor in stored if ".experts." in name and "bias" not in name)
    held = sum(linear.packed.nbytes for linear in linears_of(loaded.model))
    assert 0.9 * in_file < held < at_most * in_file
    assert not [name for name, parameter in loaded.model.named_parameters() if parameter.ndim > 2]


@pytest.mark.parametrize(("architecture", "case"), _MODELS, ids=_IDS)
def test_packed_experts_are_what_was_meant_in_the_files_memory(tmp_path: Path, architecture: str, case: str) -> None:
    loaded, meant = load(packed_model(tmp_path, architecture, case)), meant_model(tmp_path)
    require_memory_of_the_file(loaded, _MODELS[architecture, case][1])
    assert all(isinstance(linear, RowInvariantCodes) for linear in linears_of(loaded.model))
    assert code_kinds(loaded.model) == [_MODELS[architecture, case][0]]
    if not CASES[case].tolerance:
        require_meant_weights(loaded, meant)
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(2, 16)))
    assert certificate.holds, certificate.describe()
    require_near_the_exact_logits(loaded, meant)


@pytest.mark.parametrize("architecture", ["deepseek_v2", "phimoe", "nemotron_h", "lfm2_moe"])
def test_other_architectures_experts_are_packed_too(tmp_path: Path, architecture: str) -> None:
    """Other names and prefixes, no gate, layers without experts."""
    config, arguments = {**SERVED, **HYBRIDS}[architecture]
    plain = save_tiny_model(config, arguments, tmp_path / "plain")
    write_model(plain, CASES["ct-w8a8"], tmp_path / "packed", tmp_path / "meant")
    linears = linears_of(load(tmp_path / "packed").model)
    meant = linears_of(load_model(str(tmp_path / "meant"), dtype="float32").model)
    assert len(linears) == len(meant) > 0
    for linear, wanted in zip(linears, meant, strict=True):
        assert isinstance(linear, RowInvariantCodes)
        rows = torch.eye(linear.in_features)
        assert torch.equal(linear(rows.bfloat16()), wanted(rows).bfloat16())


def test_gate_and_up_in_different_orders_are_dequantised_and_down_is_packed(tmp_path: Path) -> None:
    loaded = load(packed_model(tmp_path, "qwen3_moe", "gptq-4-v2-act-order"))
    experts = experts_of(loaded.model)
    assert not any(isinstance(expert.up, RowInvariantCodes) for expert in experts)
    assert all(isinstance(expert.down, RowInvariantCodes) for expert in experts)
    require_meant_weights(loaded, meant_model(tmp_path))


def test_experts_of_which_one_is_plain_are_dequantised(tmp_path: Path) -> None:
    but_one = (
        r"(self_attn\.\w_proj|experts\.\d\.(gate|up)_proj|1\.mlp\.experts\.\d\.down_proj|[013]\.down_proj)\.weight$"
    )
    loaded = load(packed_model(tmp_path, "qwen3_moe", "ct-w4a16", but_one))
    experts = experts_of(loaded.model)
    assert all(isinstance(expert.up, RowInvariantCodes) for expert in experts)
    packed = [isinstance(expert.down, RowInvariantCodes) for expert in experts]
    assert packed == [False] * 4 + [True] * 4
    require_meant_weights(loaded, meant_model(tmp_path))


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_one_expert_after_another_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Never more than gate, up, and what was packed last."""
    folder = packed_model(tmp_path, architecture, "ct-w4a16")
    alive: weakref.WeakSet[Codes] = weakref.WeakSet()
    most, num_read, read = 0, 0, Waiting.codes

    def counting(self: Waiting) -> Codes:
        nonlocal most, num_read
        found = read(self)
        alive.add(found)
        most, num_read = max(most, len(alive)), num_read + 1
        return found

    monkeypatch.setattr(Waiting, "codes", counting)
    monkeypatch.setattr(Codes, "__hash__", object.__hash__)
    loaded = load(folder)
    assert num_read >= len(linears_of(loaded.model)) > 0
    assert most <= 3


def test_a_damaged_expert_is_refused_by_name_though_it_is_read_late(tmp_path: Path) -> None:
    packed = packed_model(tmp_path, "gpt_oss", "ct-mxfp4")
    file = packed / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 0, 0] = 255
    save_file(tensors, file)
    with pytest.raises(ModelRefused, match=r"layers\.1\.mlp\.experts\.down_proj: it has values that are not finite"):
        load(packed)


def test_an_expert_of_another_shape_is_refused(tmp_path: Path) -> None:
    packed = packed_model(tmp_path, "qwen3_moe", "awq")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 32}))
    with pytest.raises(ModelRefused, match=r"experts\.\d\.\w+_proj\.weight has shape \[\d+, \d+\], not"):
        load(packed)
